"""A replica asks its bucket for what is due, and not at every beat."""

from collections import Counter

import pytest

from rendezvous.errors import StoreUnclear
from rendezvous.membership import Membership, write_control
from rendezvous.rules import Timing
from rendezvous.stores.memory import MemoryStore
from tests.benchmarks.bench_scale import DATA, play
from tests.fakes import ManualClock

FAR = Timing(poll=1.0, beat=5.0, dead_after=20.0)


def test_a_replica_asks_for_less_in_an_outer_step() -> None:
    """204 at N = 8 before; beats of others, 92 of them, are read as before."""
    asked, seconds, _ = play(8, 2, "s3", 0.3, 0.0)
    assert sum(n for (_, what), n in asked.items() if what not in DATA) / 8 <= 185 and seconds < 71.0


class CountingStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[str]()

    def get(self, key: str) -> bytes | None:
        self.asked[key.split("/")[0]] += 1
        return super().get(key)


@pytest.fixture
def life() -> tuple[CountingStore, ManualClock, Membership]:
    """r00 of four, training for step 7."""
    store, clock = CountingStore(), ManualClock()
    write_control(store, clock, replicas=4, min_replicas=2)
    members = Membership(store, clock, "r00", 1, FAR)
    members.listen(store)
    members.status.phase, members.status.step = "train", 7
    return store, clock, members


def ticks(store: CountingStore, clock: ManualClock, members: Membership, count: int) -> Counter[str]:
    store.asked.clear()
    for _ in range(count):
        clock.sleep(FAR.beat)
        members.tick()
    return store.asked


def test_whoever_trains_asks_for_wishes_successor_and_commit_when_they_are_due(
    life: tuple[CountingStore, ManualClock, Membership],
) -> None:
    """Each at every beat before: 12 of each."""
    store, clock, members = life
    members.open(pace=80.0)
    asked = ticks(store, clock, members, 12)
    assert asked["control"] == 6 and asked["replicas"] == 3 and asked["alive"] == 3 * 12
    assert asked["steps"] == 2, "once at first, once in the middle: nothing can be decided yet"
    assert ticks(store, clock, members, 4)["steps"] >= 3, "now others may have closed without it"


def test_after_a_pause_everything_is_asked_for_at_once(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    members.open(pace=1000.0)
    ticks(store, clock, members, 1)
    clock.sleep(600.0)
    asked = ticks(store, clock, members, 1)
    assert asked["control"] and asked["replicas"] and asked["steps"]


def test_what_could_not_be_asked_is_due_at_the_next_tick(
    life: tuple[CountingStore, ManualClock, Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock, members = life
    write_control(store, clock, stop=True)
    real, broken = store.get, [True]

    def get(key: str) -> bytes | None:
        if broken[0] and key.startswith("control/"):
            raise StoreUnclear("no answer")
        return real(key)

    monkeypatch.setattr(store, "get", get)
    ticks(store, clock, members, 1)
    broken[0] = False
    ticks(store, clock, members, 1)
    assert members.wanted.stop


def test_a_stop_is_heard_within_two_beats(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    ticks(store, clock, members, 1)
    write_control(store, clock, stop=True)
    ticks(store, clock, members, 2)
    assert members.wanted.stop
