"""A replica asks its bucket for little: others' beats only while it waits, everything else only when it is due."""

import math
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.membership import (
    Membership,
    newest_claim,
    read_control,
    refuse_lost,
    updated_peer,
    write_control,
)
from rendezvous.agreement.rules import Peer, Rules, Timing, beat_age
from rendezvous.agreement.step_wait import StepWait
from rendezvous.errors import RecordsLost
from rendezvous.records.records import Beat, Claim
from rendezvous.stores.memory import MemoryStore
from tests.benchmarks.bench_scale import DATA, Counting, calm_fleet, deaths, play
from tests.rendezvous.test_engine import TIMING, Seat, bucket, together
from tests.support.fakes import ManualClock

FAR = Timing(poll=1.0, beat=5.0, dead_after=20.0)


def polling(replicas: int, steps: int = 2) -> float:
    """Requests per replica and outer step, without bodies and means."""
    asked, _, _ = play(replicas, steps, "s3", 0.3, 0.0)
    return sum(n for (_, what), n in asked.items() if what not in DATA) / replicas


@pytest.mark.quick(2)
@pytest.mark.parametrize(("replicas", "most"), [(3, 60), (8, 60), (32, 90)])
def test_a_replica_asks_for_little_in_an_outer_step(replicas: int, most: int) -> None:
    """206 at N = 8 and 253 at N = 32 before, 181 at N = 8 when all replicas still watched all beats."""
    assert polling(replicas) <= most


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("replicas", [64, 256])
def test_a_replica_asks_for_hardly_more_in_a_crowd(replicas: int) -> None:
    """335 at N = 64 and 725 at N = 256 before."""
    assert polling(replicas, steps=1) <= 90


@pytest.mark.parametrize("timing", ["file", "s3"])
def test_a_fleet_without_faults_leaves_nobody_out(timing: str) -> None:
    """A quorum of one, and inner steps of which the slowest takes 30 % longer: all three count, and in time."""
    world = Counting(calm_fleet(3, timing), steps=6)
    world.run()
    commits = world.observer.commits
    assert len(commits) >= 6 and all(len(c.fresh_offers) == 3 and not c.late_offers for c in commits)


def test_closing_takes_no_longer_for_it() -> None:
    """0.54 s when all replicas polled for offers; now the last to come closes, and asks for claims all at once."""
    _, seconds, closed = play(8, 4, "s3", 0.3, 0.0)
    assert max(closed) < 1.0 and seconds < 71.0


def test_a_death_is_noticed_as_soon_as_if_all_were_watched_all_the_time() -> None:
    """Half of a normal step for a death in its middle, as before: the survivors take that long to offer."""
    found = [wait for share, slot, wait in deaths(3, "file", 10.0, 3.4) if slot == 0 and share == 0.5]
    assert found and found[0] < 0.6 * 3.4


def test_a_death_near_the_end_of_a_step_is_noticed_no_later_than_by_a_watch() -> None:
    """Far apart looks.  With all replicas watching 19 s on average; by the last two looks alone 22 s."""
    found = [wait for share, _, wait in deaths(3, "s3", 117.0, 55.0, shares=(0.7,))]
    assert sum(found) / len(found) < 19.0


# ---------------------------------------------------------------------- what one tick asks for


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
    members.hear_control(store)
    members.status.phase, members.status.step = "train", 7
    return store, clock, members


def ticks(store: CountingStore, clock: ManualClock, members: Membership, count: int) -> Counter[str]:
    store.asked.clear()
    for _ in range(count):
        clock.sleep(FAR.beat)
        members.tick()
    return store.asked


def test_a_training_replica_reads_no_beat(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    members.begin_step(pace=80.0, owed=set())
    asked = ticks(store, clock, members, 12)
    assert "alive" not in asked and asked["control"] == 6 and asked["replicas"] == 3
    assert asked["steps"] == 1, "once in the middle: nothing can be decided yet"
    assert ticks(store, clock, members, 4)["steps"] >= 3, "now others may have closed without it"


def test_replicas_that_may_miss_our_body_are_looked_at_once(
    life: tuple[CountingStore, ManualClock, Membership],
) -> None:
    store, clock, members = life
    store.put(layout.beat_key("r01"), a_beat("r01", 3, step=7).encode())
    store.put(layout.beat_key("r02"), a_beat("r02", 3, step=6).encode())
    members.begin_step(pace=20.0, owed={"r01", "r02"})
    assert ticks(store, clock, members, 4)["alive"] == 4 and members.owed == {"r02"}, "r02 is still there"


def test_a_session_looks_at_all_slots_when_it_starts(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    members.status.phase = "heal"
    assert ticks(store, clock, members, 2)["alive"] == 6


def test_after_a_pause_everything_is_asked_for_at_once(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    members.begin_step(pace=1000.0, owed=set())
    ticks(store, clock, members, 1)
    clock.sleep(600.0)
    asked = ticks(store, clock, members, 1)
    assert asked["control"] and asked["replicas"] and asked["steps"]


def test_what_could_not_be_asked_is_due_at_the_next_tick(
    life: tuple[CountingStore, ManualClock, Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rendezvous.errors import StoreUnclear

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


def test_a_crowd_is_read_a_dozen_per_beat(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    store, clock, members = life
    crowd = [f"r{i:02d}" for i in range(40)]
    store.asked.clear()
    for _ in range(5):
        members.read_beats(crowd)
    assert store.asked["alive"] == rules.LARGE_FLEET
    clock.sleep(FAR.beat)
    members.tick()
    members.read_beats(crowd)
    assert store.asked["alive"] == 2 * rules.LARGE_FLEET and len(members._read_at) == 2 * rules.LARGE_FLEET


# ---------------------------------------------------------------------- two looks far apart


def a_beat(slot: str, n: int, at: float = 0.0, **more: Any) -> Beat:
    return replace(Beat(slot, 1, n, "train", 5, 0, 1.0, at), **more)


@pytest.mark.parametrize(
    ("n", "at", "elapsed", "wall", "age"),
    [
        (9, 110.0, 60.0, 60.0, 50.0),  # two beats in sixty seconds: dead for fifty
        (19, 160.0, 60.0, 60.0, 0.0),  # twelve beats: alive
        (17, 157.0, 60.0, 60.0, 3.0),  # ticks that last longer than a beat: its clock says so
        (19, 70.0, 60.0, 60.0, 0.0),  # its clock was put back; the counter goes on
        (9, 500.0, 60.0, 60.0, 0.0),  # its clock was put forward: believed
        (19, 160.0, 60.0, 900.0, 0.0),  # our own clock was put forward
        (9, 110.0, 20.0, 60.0, 10.0),  # we slept for forty of the sixty
    ],
)
def test_the_age_of_a_beat_follows_from_two_looks(n: int, at: float, elapsed: float, wall: float, age: float) -> None:
    assert beat_age(Peer(a_beat("r01", 7, 100.0)), a_beat("r01", n, at), elapsed, wall, 5.0) == age


def test_a_new_life_is_as_young_as_can_be() -> None:
    assert (
        beat_age(Peer(a_beat("r01", 700, 100.0), silent=9.0), a_beat("r01", 1, 101.0, generation=2), 60.0, 60.0, 5.0)
        == 0.0
    )


def test_a_death_between_two_looks_is_known_at_the_second(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    """Silent for 0 s, as after any changed beat, before: it was called dead a whole dead_after later."""
    store, clock, members = life
    store.put(layout.beat_key("r01"), a_beat("r01", 1, clock.wall()).encode())
    members.read_beats(["r01"])
    store.put(layout.beat_key("r01"), a_beat("r01", 3, clock.wall() + 10.0, inner=1).encode())  # and dies
    ticks(store, clock, members, 12)
    members.read_beats(["r01"])
    peer = members.peers["r01"]
    assert peer.is_dead(FAR.dead_after) and peer.silent == peer.still == 50.0


def test_each_look_makes_the_age_more_exact(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    """One look found a beat of 1 s: no later one is wrong by more.  By the last two looks alone it was 16.5 s old."""
    store, clock, members = life
    for n, age in ((1, 4.0), (11, 1.0), (20, 3.0), (26, 19.5)):
        ticks(store, clock, members, 10)
        store.put(layout.beat_key("r01"), a_beat("r01", n, clock.wall() - age).encode())
        members.read_beats(["r01"])
    assert 18.5 - 3 * 50.0 * rules.DRIFT <= members.peers["r01"].silent <= 18.5


def test_a_look_that_takes_long_makes_nobody_look_dead(
    life: tuple[CountingStore, ManualClock, Membership], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 25 s old before: dead, and its beat was never trusted again once it had offered."""
    store, clock, members = life
    store.put(layout.beat_key("r01"), a_beat("r01", 1, clock.wall()).encode())
    members.read_beats(["r01"])
    ticks(store, clock, members, 2)
    store.put(layout.beat_key("r01"), a_beat("r01", 3, clock.wall()).encode())
    real = store.get

    def hangs(key: str) -> bytes | None:
        body = real(key)
        if key.startswith("alive/"):
            for _ in range(5):  # its own heart beats meanwhile
                clock.sleep(FAR.beat)
                members._ticked = members.awake_s, clock.now()
        return body

    monkeypatch.setattr(store, "get", hangs)
    members.read_beats(["r01"])
    assert members.peers["r01"].silent == 0.0 and members.awake_s == 35.0


def test_a_replica_on_a_slow_store_is_not_dead(life: tuple[CountingStore, ManualClock, Membership]) -> None:
    """At 4 s per request, its heartbeat was 24 s old at times: as after its death."""
    store, clock, members = life
    get, put, now = store.get, store.put, clock.sleep
    store.get = lambda key: now(4.0) or get(key)  # type: ignore[method-assign]
    store.put = lambda key, body: now(4.0) or put(key, body)  # type: ignore[method-assign]
    died, dead = 400.0, []
    while clock.now() < 700.0:
        n = int(min(clock.now(), died) / 28.0)
        put(layout.beat_key("r01"), a_beat("r01", n, clock.wall() - clock.now() + 28.0 * n).encode())
        ticks(store, clock, members, 1)
        members.read_beats(["r01"], apart=0.0)
        dead += [clock.now()] if members.peers["r01"].is_dead(FAR.dead_after) else []
    assert died + 20.0 < dead[0] < died + 120.0, "it is dead when it is, and not before"


def test_an_answer_that_comes_after_that_of_a_later_look_is_dropped(
    life: tuple[CountingStore, ManualClock, Membership],
) -> None:
    _, clock, members = life
    early = members.awake_s, clock.wall()
    clock.sleep(FAR.beat)
    members._observe_beat("r01", a_beat("r01", 5, clock.wall()), (members.awake_s, clock.wall()))
    later = members.peers["r01"]
    members._observe_beat("r01", a_beat("r01", 6, clock.wall()), early)
    assert members.peers["r01"] is later


@pytest.mark.parametrize("slow", [0.0001, 0.0009])
def test_clocks_that_do_not_go_alike_never_make_a_living_replica_look_dead(slow: float) -> None:
    """A hundred millionths are usual: without `DRIFT` they added up to 20 s in two days."""
    peer, steps = Peer(a_beat("r01", 0)), 5000
    for k in range(1, steps):
        beat = a_beat("r01", int(12 * k * (1 - slow)), at=60.0 * k * (1 - slow))
        peer = updated_peer(peer, beat, (60.0 * k, 60.0 * k), 5.0)
    assert peer.silent < 1.0


def test_a_beat_is_no_older_than_the_look_that_did_not_find_it() -> None:
    """Its writer's clock was put back again and again."""
    old = Peer(a_beat("r01", 7, 100.0), silent=18.0)
    assert beat_age(old, a_beat("r01", 8, 90.0), 4.0, 4.0, 5.0) <= 4.0


def test_a_beat_of_a_slot_that_may_have_died_is_read_again(
    life: tuple[CountingStore, ManualClock, Membership],
) -> None:
    """Within a beat of a look in vain no replica looked again, and a death was found up to four seconds late."""
    store, clock, members = life
    for n in (1, 2):
        store.put(layout.beat_key("r01"), a_beat("r01", n, clock.wall()).encode())
        members.read_beats(["r01"], apart=0.0)
        clock.sleep(FAR.beat)
        members.tick()
    for _ in range(3):
        members.read_beats(["r01"])
        clock.sleep(FAR.beat - 0.1)
        members.tick()
    members.read_beats(["r01"])
    clock.sleep(0.4)
    store.asked.clear()
    members.read_beats(["r01"])
    assert store.asked["alive"] == 1 and members.peers["r01"].is_dead(FAR.dead_after)
    members.read_beats(["r01"], apart=math.inf)
    assert store.asked["alive"] == 1, "who is dead is read again as rarely as others"


# ---------------------------------------------------------------------- when to look again


def soon(*peers: Peer | None, waited: float = 0.0) -> list[float]:
    wait = rules.WaitState(waited, took=40.0, upload=3.0, least_pause=1.5)
    return rules.resolved_in(5, peers, wait, Rules(sync_every=4), FAR)


def test_the_next_look_comes_when_something_can_have_changed() -> None:
    training = Peer(a_beat("r01", 9, inner=2, rate=6.0), changes=3)
    assert soon(training) == [12.0 + 3.0 + 2.0], "two inner steps, the upload, two polls for whoever closes"
    assert soon(replace(training, silent=15.0)) == [5.0], "or it is called dead before"
    assert soon(None, waited=4.0) == [16.0], "half of what an offer takes is all the patience there is"
    assert soon(replace(training, changes=0, silent=15.0)) == [17.0], "who was never seen to beat cannot be called dead"
    assert soon(training, replace(training, silent=30.0)) == [0.0, 17.0]
    late = replace(training, beat=a_beat("r01", 9, inner=4, rate=6.0), still=7.0)
    assert soon(late) == [5.0] and soon(replace(late, still=30.0), waited=19.5) == [1.5], (
        "in vain: an eighth of the wait"
    )
    assert soon(replace(late, still=30.0, silent=19.0), waited=0.0) == [1.0], "but never past a death"
    assert soon(replace(training, silent=30.0, untrusted_generation=1)) == [17.0], (
        "who offers without a beat is not called dead again"
    )


def test_a_waiter_wakes_when_its_next_look_is_due() -> None:
    """It slept for up to four polls past it."""
    clock = ManualClock()
    wait = StepWait(clock, FAR, due=60.0)
    clock.sleep(8.0)
    wait.count_time()
    assert wait.pause_s == 4.0
    wait.attempt_in(1.5, at_most=10.0)
    assert wait.pause_s == 1.5
    wait.attempt_in(9.0, at_most=10.0)
    assert wait.pause_s == 4.0
    wait.attempt_in(0.0, at_most=10.0)
    assert wait.next_attempt == wait.idle + 1.0, "nothing is known: an eighth of the wait, a poll at least"


def test_three_lead_whatever_the_fleet() -> None:
    for slots in (1, 2, 3, 4, 8, 12, 64, 256):
        for t in range(20):
            ranks = sorted(rules.commit_rank(t, s, slots) for s in range(slots))
            assert ranks == [*range(min(3, slots)), *[rules.LED] * (slots - 3)]


@pytest.mark.parametrize("seen_beating", [True, False])
@pytest.mark.parametrize("m", [1, 2])
def test_a_replica_left_alone_closes_although_it_does_not_lead(seen_beating: bool, m: int) -> None:
    """Seed 7200563: it let others close first, until it gave up with its offer in the bucket."""
    clock, t = ManualClock(), 3
    store = bucket(clock, replicas=5, m=m, steps=9)
    seats = [Seat(store, layout.slot_name(i), clock).join() for i in range(5)]
    for _ in range(t):
        for seat in seats if seen_beating else ():
            seat.rv.members.tick()
        clock.sleep(TIMING.beat)
        together(*seats)
    led = [seat for i, seat in enumerate(seats) if rules.commit_rank(t, i, 5) == rules.LED]
    assert len(led) == 2
    began = clock.now()
    for seat in led[:m]:  # all others are dead
        seat.offer()
    commit = led[0].rv.settle()
    assert [o.slot for o in commit.fresh_offers] == [seat.rv.slot for seat in led[:m]]
    assert clock.now() - began < 2 * TIMING.dead_after + 2 * TIMING.beat


class Far(MemoryStore):
    """A bucket far away: it counts GETs, and how many rounds of requests at the same time there were."""

    cheap = False

    def __init__(self) -> None:
        super().__init__()
        self.gets, self.rounds, self._asking = 0, 0, 0

    def get(self, key: str) -> bytes | None:
        if threading.current_thread() is threading.main_thread():
            self.rounds += 1  # the first request of a round is this thread's own
        self.gets += 1
        return super().get(key)


@pytest.mark.slow
def test_a_run_of_weeks_is_read_in_rounds_and_a_renewed_lease_reads_on() -> None:
    """Before: 2,880 control records were 2,880 GETs one after the other, in each `stop` and each replacement."""
    store, clock = Far(), ManualClock()
    wanted = write_control(store, clock, replicas=2, steps=9, min_replicas=1)
    for minute in range(1, 1500):
        wanted = write_control(store, clock, wanted, until=60.0 * minute)
    store.gets = store.rounds = 0
    assert read_control(store) == wanted and wanted.records == 1500
    assert store.rounds <= 6 + 1500 // 64 + 1 and store.gets < 1500 + 2 * 64
    store.gets = store.rounds = 0
    assert write_control(store, clock, wanted, stop=True).stop and store.gets <= 3
    for generation in range(1, 301):
        store.create(layout.claim_key("r00", generation), Claim("r00", generation, "n", 0.0, "h", 1).encode())
    store.rounds = 0
    assert getattr(newest_claim(store, "r00"), "generation", 0) == 300 and store.rounds <= 12


def test_a_renewed_lease_notices_a_record_lost_behind_what_it_knows() -> None:
    """Before: the renewal went on, while whoever read from scratch refused the run."""
    store, clock = Far(), ManualClock()
    wanted = write_control(store, clock, replicas=2, steps=9, min_replicas=1)
    for minute in range(1, 100):
        wanted = write_control(store, clock, wanted, until=60.0 * minute)
    listed = store.list
    store.list = lambda prefix: []  # type: ignore[method-assign]  # a LIST that is out of date proves nothing
    store.gets = 0
    wanted = write_control(store, clock, wanted, until=1.0)
    assert store.gets <= 3 + 64, "and costs a bounded number of requests"
    store.list = listed  # type: ignore[method-assign]
    store.delete([layout.control_key(2)])
    with pytest.raises(RecordsLost, match=r"control/000002.json has vanished, though it was read before"):
        write_control(store, clock, wanted, until=2.0)


@pytest.mark.parametrize("count", [3, 8, 15, 40, 140])
def test_a_lost_record_is_a_gap_in_any_round_of_requests(count: int) -> None:
    """A reader that went on behind a gap numbered the rest wrongly: a stop and a budget were gone without a word."""
    for gap in {1, 2, 5, count // 2, count - 2} & {*range(1, count - 1)}:
        store, clock = Far(), ManualClock()
        wanted = write_control(store, clock, replicas=2, steps=9, min_replicas=1)
        for number in range(1, count):
            wanted = write_control(store, clock, wanted, max_usd=float(number))
        store.delete([layout.control_key(gap)])
        found = read_control(store)
        assert found.records == gap
        with pytest.raises(RecordsLost, match="has vanished"):
            refuse_lost(store, found)
        with pytest.raises(RecordsLost):
            write_control(store, clock, stop=True)
