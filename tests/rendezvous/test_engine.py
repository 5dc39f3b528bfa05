"""Two or three replicas in one thread, on a store in memory: one test per row of the failure table.

a.offer   b.offer   a.settle ─▶ closes   b.settle ─▶ reads   both: mean, apply, advance
"""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import BadDelta, ChainBroken, Corrupt, Diverged, Fenced, GaveUp, Leaving, RendezvousError
from rendezvous.keeping.garbage import Collected
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Claim, Commit, Leave, Mean, Offer, Snapshot
from rendezvous.records.wire import as_bytes
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import Fault, FaultyStore, ManualClock, VectorState

RULES = Rules(sync_every=2, max_carry=2, snapshot_every=2)
TIMING = Timing(poll=0.1, beat=0.5, dead_after=2.0, start_patience=1.0, give_up=20.0, store_patience=10.0, grace=3.0)


class Seat:
    """A replica, step by step."""

    def __init__(self, store: Store, slot: str, clock: ManualClock, rules: Rules = RULES, pid: int = 0) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.store, self.clock, self.state = store, clock, VectorState(value=100.0, fragments=rules.fragments)
        tell: Callable[..., None] = lambda event, **fields: self.told.append((event, fields))  # noqa: E731
        self.rv = Rendezvous(store, clock, slot, rules, TIMING, emit=tell, host="here", pid=pid)
        self.rv.claim()

    def join(self) -> "Seat":
        self.rv.join(self.state)
        return self

    def offer(self, *delta: float, h: int = 2) -> None:
        self.rv.offer(np.array(delta or (1, 2, 3), np.float32), h)

    def step(self) -> Commit:
        """settle, mean, apply, advance."""
        commit = self.rv.settle()
        mean, fragment = np.empty(self.state.size(0), np.float32), self.rv.fragment
        self.rv.mean(commit, mean)
        self.state.apply(fragment, mean)
        self.rv.advance(commit)
        return commit

    def events(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.told if event == name]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def bucket(clock: ManualClock, replicas: int = 2, m: int = 2, steps: int = 5) -> FaultyStore:
    store = FaultyStore(MemoryStore())
    write_control(store, clock, replicas=replicas, min_replicas=m, steps=steps)
    return store


def pair(clock: ManualClock, **wishes: Any) -> tuple[FaultyStore, Seat, Seat]:
    store = bucket(clock, **wishes)
    return store, Seat(store, "r00", clock).join(), Seat(store, "r01", clock).join()


def together(*seats: Seat) -> Commit:
    """One outer step of all, with Δ = (i+1)·(1, 1, 1)."""
    for i, seat in enumerate(seats):
        seat.offer(*[i + 1.0] * 3)
    commits = [seat.step() for seat in seats]
    return commits[0]


# ---------------------------------------------------------------------- the good day


def test_two_replicas_agree(clock: ManualClock) -> None:
    _, a, b = pair(clock)
    for t in range(3):
        commit = together(a, b)
        assert commit.t == t and [o.slot for o in commit.offers] == ["r00", "r01"] and commit.m == 2
        assert np.array_equal(a.state.theta, b.state.theta)
    assert a.state.theta.tolist() == [100 - 4.5] * 3
    assert a.rv.step == b.rv.step == 3 and not a.rv.is_behind


def test_a_replica_that_starts_late_heals_before_its_first_inner_step(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3)
    for _ in range(3):
        together(a, b)
    late = Seat(store, "r02", clock)
    late.state = VectorState(value=-7.0)
    late.join()
    assert late.rv.step == 3 and np.array_equal(late.state.theta, a.state.theta)
    assert late.events("healed")[0] == {"snapshot": 2, "step": 3, "replayed": 1}
    commit = together(a, b, late)
    assert [o.slot for o in commit.fresh_offers] == ["r00", "r01", "r02"]


def test_the_whole_fleet_dies_and_goes_on(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    for _ in range(3):
        together(a, b)
    a2, b2 = Seat(store, "r00", clock).join(), Seat(store, "r01", clock).join()
    assert (a2.rv.generation, a2.rv.step) == (2, 3) and np.array_equal(a2.state.theta, a.state.theta)
    assert together(a2, b2).fence == {"r00": 2, "r01": 2}


def test_fragments_take_turns_and_late_offers_age_by_their_own_syncs(clock: ManualClock) -> None:
    store = bucket(clock, m=1)
    two = Rules(fragments=2, sync_every=4, max_carry=1, snapshot_every=9)
    a, b = Seat(store, "r00", clock, two).join(), Seat(store, "r01", clock, two).join()
    a.offer(1, 1, 1, h=2)
    a.step()
    assert a.rv.fragment == 1 and b.rv.fragment == 0
    b.rv.members.tick()
    assert b.rv.is_behind
    assert b.rv.catch_up(late=lambda t: b.offer(3, 3, 3, h=1)) == 1
    a.offer(1, 1, 1, h=4)
    assert a.step().late_offers == (), "step 1 is about the other fragment"
    a.offer(1, 1, 1, h=4)
    carried = a.step().late_offers
    assert [(o.step, o.slot, o.weight) for o in carried] == [(0, "r01", 0.125)]


def test_a_run_is_shortened_and_one_replica_hears_of_it_when_the_others_have_ended(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it waited for a quorum that had gone home, until give_up."""
    store, a, b = pair(clock)
    together(a, b)
    write_control(store, clock, steps=1)
    a.rv.members.tick()
    assert a.rv.is_done and not b.rv.is_done
    a.rv.finish("done")
    b.offer()
    began, sleep = clock.now(), clock.sleep

    def sleep_and_tick(seconds: float) -> None:
        sleep(seconds)
        b.rv.members.tick()

    monkeypatch.setattr(clock, "sleep", sleep_and_tick)
    with pytest.raises(Leaving, match="ends after 1 outer steps, and r01-1 has taken them all"):
        b.rv.settle()
    assert clock.now() - began <= 2 * TIMING.beat, "as soon as it hears of it"
    b.rv.finish("done")
    assert (snapshot := snapshots.read(store, 1)) is not None and snapshot.confirmed and snapshot.base == a.rv.base


def test_no_step_is_closed_beyond_the_last_one_though_all_have_offered(clock: ManualClock) -> None:
    store, a, b = pair(clock, steps=1)
    together(a, b)
    for seat in (a, b):
        seat.offer()
    for seat in (a, b):
        with pytest.raises(Leaving, match="now ends after 1 outer steps"):
            seat.rv.settle()
    assert store.get(layout.commit_key(1)) is None


def test_a_first_snapshot_that_was_lost_with_the_first_commit_is_not_made_anew(clock: ManualClock) -> None:
    """A joining replica may hold anything: zeros, where a later snapshot takes the place of the start model."""
    store, a, b = pair(clock)
    for _ in range(4):
        together(a, b)
    store.delete([layout.snapshot_key(0), layout.commit_key(0)])
    late = Seat(store, "r02", clock)
    late.state = VectorState(value=0.0)
    with pytest.raises(ChainBroken, match="commit 0 is missing"):
        late.join()
    assert store.get(layout.snapshot_key(0)) is None


# ---------------------------------------------------------------------- claims


def test_two_processes_claim_one_slot_and_the_loser_says_to_whom(clock: ManualClock) -> None:
    store = bucket(clock)
    rival = Claim("r00", 1, "x", 0.0, "there", 4242).encode()
    store.faults = [
        Fault("create", "replicas/", error=None, before=lambda: store.inner.put(layout.claim_key("r00", 1), rival))
    ]
    with pytest.raises(Fenced, match=r"r00 was claimed at the same moment by process 4242 on there \(generation 1\)"):
        Seat(store, "r00", clock)


def test_real_processes_claim_one_slot_once(tmp_path: Any) -> None:
    store, clock = FileStore(tmp_path), ManualClock()
    children = []
    for i in range(8):
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(10 + Seat(store, "r00", clock, pid=i).rv.generation)
            except Fenced:
                os._exit(1)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    generations = [c - 10 for c in codes if c != 1]
    assert sorted(generations) == list(range(1, len(generations) + 1)), "every generation has one holder"


def test_the_older_of_two_lives_is_fenced_and_says_so(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    young = Seat(store, "r01", clock).join()
    b.rv.members.tick()
    with pytest.raises(Fenced, match=r"r01 now belongs to generation 2; this process \(generation 1\) ends"):
        b.offer()
    assert together(a, young).fence["r01"] == 2


def test_a_zombie_learns_it_from_the_chain_even_without_a_heartbeat(clock: ManualClock) -> None:
    store, a, zombie = pair(clock, m=1)
    Seat(store, "r01", clock)
    a.offer()
    a.step()
    zombie.offer()
    commit = zombie.rv.settle()
    with pytest.raises(Fenced):
        zombie.rv.advance(commit)
    a.offer()
    assert [o.slot for o in a.step().late_offers] == ["r01"], (
        "what it offered for step 0 was not fenced then, and counts"
    )


def test_a_generation_that_the_chain_has_fenced_trains_nothing_though_all_claims_are_lost(clock: ManualClock) -> None:
    """A snapshot at the head: no commit is replayed at the join, and the newest one's fence counts all the same."""
    store = bucket(clock, steps=2)
    a, _, young = Seat(store, "r00", clock).join(), Seat(store, "r01", clock), Seat(store, "r01", clock).join()
    together(a, young)
    assert together(a, young).fence["r01"] == 2
    for seat in (a, young):
        seat.rv.finish("done")
    assert store.get(layout.snapshot_key(2))
    write_control(store, clock, steps=3)
    for key in store.list("replicas/r01/"):
        store.delete([key])
    with pytest.raises(Fenced, match=r"r01 now belongs to generation 2; this process \(generation 1\) ends"):
        Seat(store, "r01", clock).join()
    assert Seat(store, "r01", clock).join().rv.generation == 2, "the next launch goes on"


def test_a_zombies_offer_counts_in_the_step_it_slept_in_and_in_no_later_one(clock: ManualClock) -> None:
    """Eligibility depends on the commit before alone: commit -1 fences no generation, commit 0 fences generation 1."""
    store, a, zombie = pair(clock, m=1)
    Seat(store, "r01", clock)  # its successor, while it sleeps in step 0
    a.offer(1, 1, 1)
    zombie.offer(3, 3, 3)
    commit = a.step()
    assert [(o.slot, o.generation) for o in commit.fresh_offers] == [("r00", 1), ("r01", 1)] and commit.fence[
        "r01"
    ] == 2
    assert a.state.theta.tolist() == [98.0] * 3, "the mean of both"
    old = Offer.decode(store.get(layout.offer_key(0, "r01", 0)) or b"")
    late = replace(old, step=1, base=a.rv.base, blob=layout.delta_blob(1, "r01", 1, "dead"))
    store.put(late.blob, store.get(old.blob) or b"")
    store.put(layout.offer_key(1, "r01", 0), late.encode())  # as if it had not heard of the fence yet
    a.offer(1, 1, 1)
    commit = a.step()
    assert [o.slot for o in commit.offers] == ["r00"] and a.state.theta.tolist() == [97.0] * 3


def test_a_successor_adopts_what_its_predecessor_offered(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(5, 5, 5)  # and dies
    heir = Seat(store, "r01", clock).join()
    assert heir.rv.step == 1 and heir.events("adopted") == [{"step": 0}]
    assert heir.state.theta.tolist() == [97.0] * 3
    assert np.array_equal(a.step().fresh_offers[1].generation, 1)


def test_two_lives_offer_one_step_and_the_first_counts(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    heir = Seat(store, "r01", clock).join()
    b.offer(1, 1, 1)
    heir.offer(7, 7, 7)
    assert heir.events("offer_lost") == [] and heir.rv.last_offer is None
    a.offer(1, 1, 1)
    assert a.step().t == 0 and a.state.theta.tolist() == [99.0] * 3


# ---------------------------------------------------------------------- lost answers and bad input


@pytest.mark.parametrize("part", ["replicas/", "/offer/", "/commit.json", "/mean/", "snapshots/"])
@pytest.mark.parametrize("lost", [False, True])
def test_an_unclear_create_is_read_back(clock: ManualClock, part: str, lost: bool) -> None:
    store = bucket(clock)
    store.faults = [Fault("create", part, lost=lost, times=2)]
    a, b = Seat(store, "r00", clock).join(), Seat(store, "r01", clock).join()
    for _ in range(3):
        together(a, b)
    assert store.faults[0].times == 0 and np.array_equal(a.state.theta, b.state.theta)


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (np.array([1, np.nan, 2], np.float32), "1 of 3 elements.*not finite.*Lower the inner learning rate"),
        (np.array([np.inf, -np.inf, 2], np.float32), "2 of 3 elements"),
        (np.array([1, 2, 3], np.float64), "float64"),
        (np.array([1, 2], np.float32), r"vector of 3 elements.*shape \(2,\)"),
        (np.ones((3, 1), np.float32), r"shape \(3, 1\)"),
    ],
)
def test_a_bad_delta_is_refused_and_nothing_is_lost(clock: ManualClock, delta: np.ndarray, words: str) -> None:
    store, a, b = pair(clock)
    with pytest.raises(BadDelta, match=words):
        a.rv.offer(delta, 2)
    assert not [key for verb, key in store.calls if verb == "put" and "/delta/" in key]
    together(a, b)


def test_a_huge_but_finite_delta_is_no_error(clock: ManualClock) -> None:
    _, a, _ = pair(clock)
    a.offer(3e38, 3e38, 3e38)
    assert a.rv.last_offer is not None and a.rv.last_offer.norm == pytest.approx(5.196e38, rel=1e-3)


def test_no_inner_step_is_no_offer(clock: ManualClock) -> None:
    _, a, _ = pair(clock)
    with pytest.raises(ValueError, match="at least one inner step"):
        a.offer(h=0)


def test_a_zero_delta_is_honest_and_a_fleet_of_them_is_counted(clock: ManualClock) -> None:
    _, a, b = pair(clock)
    for expected in (1, 2):
        a.offer(0, 0, 0)
        b.offer(0, 0, 0)
        assert a.step().offers[0].zero and b.step()
        assert a.rv.idle_steps == b.rv.idle_steps == expected
    a.offer(0, 0, 0)
    b.offer(0, 1, 0)
    a.step()
    assert a.rv.idle_steps == 0


def test_statistics_that_are_not_finite_do_not_stop_an_offer(clock: ManualClock) -> None:
    _, a, _ = pair(clock)
    a.rv.offer(np.ones(3, np.float32), 2, stats={"reward": float("nan"), "loss": np.float32(0.5)})  # type: ignore[dict-item]
    assert a.rv.last_offer is not None and a.rv.last_offer.stats == {"loss": 0.5}


# ---------------------------------------------------------------------- waiting


def test_too_few_replicas_give_up_in_the_end_and_name_who_is_missing(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3)
    for _ in range(3):
        b.rv.members.tick()
        clock.sleep(0.5)
        a.rv.members.tick()
    for _ in range(12):
        clock.sleep(0.5)
        a.rv.members.tick()
    a.offer()
    with pytest.raises(GaveUp) as caught:
        a.rv.settle()
    text = str(caught.value)
    assert "step 0 was open for 20 s" in text and "needs min_replicas=2" in text
    assert "r01 is silent" in text and "r02 was never seen" in text and "run the same command again" in text
    again = Seat(store, "r00", clock)
    b.offer()
    again.join()
    assert again.rv.step == 1, "the same command goes on, with what was offered"


def test_min_replicas_can_be_lowered_while_a_step_stands_open(clock: ManualClock) -> None:
    store, a, _ = pair(clock)
    a.offer()
    store.faults = [
        Fault("get", "commit", error=None, times=0),
    ]
    write_control(store, clock, min_replicas=1)
    a.rv.members.tick()
    assert a.step().m == 1


def test_a_wish_that_comes_during_the_look_counts(clock: ManualClock) -> None:
    """1. A looks for offers with m = 1.  2. m = 2 becomes durable.  3. A must not commit with m = 1."""
    store, a, b = pair(clock, m=1)
    a.offer()
    b.offer()
    store.faults = [
        Fault(
            "get", "/offer/r01", error=None, before=lambda: write_control(store.inner, clock, min_replicas=2) and None
        )
    ]
    assert a.step().m == 2


def test_asked_to_leave_while_waiting(clock: ManualClock) -> None:
    store, a, _ = pair(clock)
    a.offer()
    a.rv.ask_to_leave()
    with pytest.raises(Leaving, match="r00-1 was asked to go"):
        a.rv.settle()
    a.rv.finish("asked")
    record = Leave.decode(store.get(layout.leave_key("r00", 1)) or b"")
    assert (record.step, record.reason) == (0, "asked")


@pytest.mark.parametrize("how", ["signal", "drain", "fewer replicas"])
def test_an_offer_made_while_leaving_says_so(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock)
    wish: dict[str, Any] = {"drain": {"drain": "r01"}, "fewer replicas": {"replicas": 1}}.get(how, {})
    if wish:
        write_control(store, clock, **wish)
        b.rv.members.tick()
    else:
        b.rv.ask_to_leave()
    assert b.rv.is_leaving
    b.offer(h=1)
    a.offer()
    assert [(o.slot, o.leaving, o.weight) for o in a.step().offers] == [("r00", False, 1.0), ("r01", True, 0.5)]


def test_a_slot_that_offers_while_its_beat_stands_still_is_not_called_dead_again(clock: ManualClock) -> None:
    _, a, b = pair(clock)
    b.rv.members.tick()
    a.rv.members.tick()
    b.rv.members.tick()
    for _ in range(8):
        a.rv.members.tick()
        clock.sleep(0.5)
    assert a.rv.members.peers["r01"].is_dead(TIMING.dead_after)
    together(a, b)
    a.rv.members.tick()
    assert a.rv.members.peers["r01"].untrusted_generation == 1 and not a.rv.members.peers["r01"].is_dead(
        TIMING.dead_after
    )


# ---------------------------------------------------------------------- damage


def damage(store: Store, key: str, how: str) -> None:
    body = store.get(key) or b""
    broken = {"flipped": bytes([body[0] ^ 1]) + body[1:], "short": body[:-1], "empty": b""}
    if how == "missing":
        store.delete([key])
    else:
        store.put(key, broken[how])


DAMAGE = pytest.mark.parametrize("how", ["flipped", "short", "empty", "missing"])


@DAMAGE
def test_a_damaged_delta_is_put_back_by_its_writer(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    damage(store, b.rv.last_offer.blob, how)  # type: ignore[union-attr]
    a.rv.settle()
    b.step()  # from its own memory
    a.rv.members.tick()
    b.rv.members.tick()
    b.rv.finish("drained")  # a still stands at step 0, so b looks after its blob before it goes
    assert b.events("repaired")
    a.step()
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3


@DAMAGE
def test_a_writer_that_waits_for_others_looks_after_its_last_blob(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    damage(store, b.rv.last_offer.blob, how)  # type: ignore[union-attr]
    a.rv.settle()
    b.step()
    a.rv.members.tick()
    b.rv.members.tick()
    b.offer(3, 3, 3)  # its next body does not overwrite the one that a misses
    with pytest.raises(GaveUp):
        b.rv.settle()
    assert b.events("repaired")
    a.step()
    assert a.state.theta.tolist() == b.state.theta.tolist() == [98.5] * 3


def trio(clock: ManualClock, rules: Rules = RULES) -> tuple[FaultyStore, Seat, Seat, Seat]:
    """Three that have seen each other's heart beat, and one step's work of ten seconds."""
    store = bucket(clock, replicas=3, steps=20)
    a, b, c = (Seat(store, f"r{i:02d}", clock, rules).join() for i in range(3))
    for seat in (a, b, c) * 3:
        seat.rv.members.tick()
    clock.at += 10.0
    return store, a, b, c


@DAMAGE
def test_a_writer_that_waits_for_a_bad_blob_looks_after_all_of_its_own(clock: ManualClock, how: str) -> None:
    store, a, b, c = trio(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    a.rv.settle()
    c.rv.catch_up()
    b.step()
    damage(store, b.rv.last_offer.blob, how)  # type: ignore[union-attr]
    b.offer(3, 3, 3)
    c.offer(3, 3, 3)
    damage(store, c.rv.last_offer.blob, how)  # type: ignore[union-attr]
    with pytest.raises(Corrupt, match=r"delta/r02-1"):
        b.rv.mean(b.rv.settle(), np.empty(3, np.float32))
    assert [event["step"] for event in b.events("repaired")] == [0], "a waits for it, and c may wait for a"
    a.step()
    assert a.state.theta.tolist() == c.state.theta.tolist() == [98.5] * 3


def test_a_writer_looks_after_its_last_blob_while_somebody_heals(clock: ManualClock) -> None:
    """Seed 52001543: all others that the commit lists had left, and the one that had to replay it read a bad body."""
    store, a, b, _ = trio(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    bad = b.rv.last_offer.blob  # type: ignore[union-attr]
    a.rv.settle()
    b.step()
    b.offer(3, 3, 3)
    damage(store, bad, "flipped")
    a.rv.finish("drained")
    again = Seat(store, "r02", clock)
    again.rv.members.tick()
    with pytest.raises(GaveUp):
        b.rv.settle()
    assert b.events("repaired")
    assert again.join().state.theta.tolist() == b.state.theta.tolist()


def others_beat_meanwhile(clock: ManualClock, monkeypatch: pytest.MonkeyPatch, *seats: Seat) -> None:
    """A replica that sleeps from now on finds that these have ticked."""
    sleep = clock.sleep

    def then_tick(seconds: float) -> None:
        sleep(seconds)
        for seat in seats:
            seat.rv.members.tick()

    monkeypatch.setattr(clock, "sleep", then_tick)


SHARDS = replace(RULES, shard_from=1, shard_elements=1)


@DAMAGE
def test_a_writer_computes_the_parts_that_its_damaged_blob_keeps_others_from(
    clock: ManualClock, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, a, b, c = trio(clock, SHARDS)
    for seat in (a, b, c):
        seat.offer(1, 1, 1)
    damage(store, c.rv.last_offer.blob, how)  # type: ignore[union-attr]
    a.rv.settle()
    commit, out = c.rv.settle(), np.empty(3, np.float32)
    assert commit.mode == "sharded"
    others_beat_meanwhile(clock, monkeypatch, a, b)
    c.rv.mean(commit, out)  # from its own memory, after a while in which no other replica could do its part
    assert out.tolist() == [1.0] * 3
    for seat in (a, b):
        taken = np.empty(3, np.float32)
        seat.rv.mean(commit, taken)  # as c announced it
        assert taken.tolist() == [1.0] * 3


def test_a_part_that_nobody_can_compute_any_more_is_not_waited_for(clock: ManualClock) -> None:
    """The others die before they announce their parts; their successors go on, and collect."""
    store, a, b, c = trio(clock, SHARDS)
    for seat in (a, b, c):
        seat.offer(1, 1, 1)
    commit = a.rv.settle()
    b, c = (Seat(store, seat.rv.slot, clock, SHARDS).join() for seat in (b, c))
    blobs = [o.blob for o in commit.offers if o.slot != "r00"]
    for _ in range(6):
        together(b, c)
    store.delete(blobs)
    for seat in (b, c, a) * 2:
        seat.rv.members.tick()
    began = clock.now()
    with pytest.raises(Collected, match="step 0 cannot be read any more"):
        a.rv.mean(commit, np.empty(3, np.float32))
    assert clock.now() - began < TIMING.give_up / 2, "both live, and beat"


@DAMAGE
def test_a_damaged_delta_of_a_dead_writer_is_replaced_by_the_announced_mean(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    commit = a.step()
    assert commit.by == "r00-1"
    damage(store, commit.offers[0].blob, how)  # and r00 dies
    b.step()
    assert b.events("bad_blob") and b.state.theta.tolist() == [98.5] * 3


@DAMAGE
def test_a_damaged_delta_that_nobody_has_is_never_averaged(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    damage(store, b.rv.last_offer.blob, how)  # type: ignore[union-attr]
    commit, out = a.rv.settle(), np.empty(3, np.float32)
    with pytest.raises(Corrupt, match=r"step 0.*Nothing was averaged"):
        a.rv.mean(commit, out)
    assert a.state.theta.tolist() == [100.0] * 3


def test_a_read_that_goes_wrong_once_is_read_again(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    a.offer(1, 1, 1)
    b.offer(2, 2, 2)
    key = b.rv.last_offer.blob  # type: ignore[union-attr]
    good = store.get(key) or b""
    store.inner.put(key, b"x" * 12)
    store.faults = [
        Fault("get_into", key, error=None),
        Fault("get_into", key, error=None, before=lambda: store.inner.put(key, good)),
    ]
    a.step()
    assert a.state.theta.tolist() == [98.5] * 3 and not a.events("bad_blob")


def test_a_body_is_the_writers_own_copy(clock: ManualClock) -> None:
    _store, a, b = pair(clock)
    a.offer(1, 1, 1)
    mine = np.full(3, 2, np.float32)
    b.rv.offer(mine, 2)
    mine += 1
    out = np.empty(3, np.float32)
    b.rv.mean(b.rv.settle(), out)
    assert out.tolist() == [1.5] * 3


@DAMAGE
def test_a_damaged_mean_is_computed_again_and_put_back(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock, replicas=3)
    together(a, b)
    record = Mean.decode(store.get(layout.mean_key(0, 0)) or b"")
    good = store.get(record.blob)
    damage(store, record.blob, how)
    late = Seat(store, "r02", clock).join()
    assert late.state.theta.tolist() == [98.5] * 3 and late.events("repaired")
    assert store.get(record.blob) == good


@DAMAGE
def test_a_damaged_snapshot_is_done_without_and_mended(clock: ManualClock, how: str) -> None:
    store, a, b = pair(clock, replicas=3, steps=9)
    for _ in range(4):
        together(a, b)
    snapshot = Snapshot.decode(store.get(layout.snapshot_key(2)) or b"")
    good = store.get(snapshot.blob)
    damage(store, snapshot.blob, how)
    late = Seat(store, "r02", clock).join()
    assert np.array_equal(late.state.theta, a.state.theta) and late.rv.step == 4
    assert late.events("bad_snapshot")[0]["step"] == 2 and late.events("healed")[0]["snapshot"] == 0
    assert store.get(snapshot.blob) == good and late.events("repaired")


def test_a_snapshot_whose_bytes_are_right_but_mean_something_else_is_passed_over(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3, steps=9)
    together(a, b)
    together(a, b)
    wrong = {"theta.0": np.zeros(3, np.float32)}
    snapshots.write(store, clock, 2, wrong, base=a.rv.base, prev=None)
    late = Seat(store, "r02", clock).join()
    assert np.array_equal(late.state.theta, a.state.theta) and late.events("bad_snapshot")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"theta.7": np.zeros(3, np.float32)}, "it has no theta.0"),
        ({"theta.0": np.zeros(4, np.float32)}, r"its theta.0 is float32 \[4\], this model's is float32 \[3\]"),
        ({"theta.0": np.zeros(3, np.float64)}, "its theta.0 is float64"),
    ],
)
def test_a_forged_snapshot_with_other_arrays_is_passed_over_for_an_older_one(
    clock: ManualClock, wrong: dict[str, np.ndarray], why: str
) -> None:
    """Before: a replica that loaded it raised (in a real run OuterError: "this URL holds a run of another model")."""
    store, a, b = pair(clock, replicas=3, steps=9)
    together(a, b)
    together(a, b)
    snapshots.write(store, clock, 2, wrong, base=a.rv.base, prev=None)
    late = Seat(store, "r02", clock).join()
    assert np.array_equal(late.state.theta, a.state.theta) and late.events("healed")[0]["snapshot"] == 0
    assert re.match(why, late.events("bad_snapshot")[0]["found"])


def test_a_bucket_without_any_snapshot_says_so(clock: ManualClock) -> None:
    store, *_ = pair(clock)
    damage(store, Snapshot.decode(store.get(layout.snapshot_key(0)) or b"").blob, "missing")
    with pytest.raises(RendezvousError, match=r"not even step 0's.*backup"):
        Seat(store, "r00", clock).join()


def test_a_killed_snapshot_writer_leaves_nothing_visible(clock: ManualClock) -> None:
    store, a, b = pair(clock, replicas=3, steps=9)
    together(a, b)
    together(a, b)
    store.faults = [Fault("create", "snapshots/", error=KeyboardInterrupt())]  # type: ignore[arg-type]
    a.offer()
    b.offer()
    with pytest.raises(KeyboardInterrupt):
        a.step()
    assert [s.t for s in snapshots.newest_first(store)] == [0]
    b.step()
    assert Seat(store, "r02", clock).join().rv.step == 3


# ---------------------------------------------------------------------- bad memory


def test_a_state_that_changed_behind_our_back_is_not_offered(clock: ManualClock) -> None:
    _, a, _ = pair(clock)
    a.state.theta[1] += 1
    with pytest.raises(Diverged, match=r"θ of r00-1 changed between outer steps.*heals from the bucket"):
        a.offer()


def test_a_replica_that_applied_something_else_finds_out_and_the_next_life_heals(clock: ManualClock) -> None:
    store, a, b = pair(clock)
    a.offer()
    b.offer()
    a.step()
    commit = b.rv.settle()
    b.state.apply(0, np.ones(3, np.float32))  # not the mean
    b.rv.advance(commit)
    a.offer()
    b.offer()
    with pytest.raises(Diverged, match="differs from the one replayed"):
        b.rv.settle()
    heir = Seat(store, "r01", clock).join()
    heir.offer()
    assert store.get(layout.offer_key(1, "r01", 1)) is not None, (
        "its predecessor's offer does not count: the next number"
    )
    assert [o.generation for o in a.step().offers] == [1, 2] and a.events("base_differs")


def test_a_replay_that_confirms_ours_goes_on_against_a_wrong_commit(clock: ManualClock) -> None:
    """The committer was corrupt (m = 1): the replay is the definition, loudly, and the chain stays whole."""
    store, a, b = pair(clock, m=1)
    a.offer()
    commit = a.rv.settle()
    store.inner.put(layout.commit_key(0), replace(commit, base="corrupt").encode())
    b.offer()
    b.step()
    assert b.events("base_differs")[0]["theirs"] == "corrupt"
    assert b.rv.step == 1 and b.rv.chain.known_commit(0) is not None


def test_a_replica_that_replays_to_catch_up_knows_the_commit_that_it_takes(clock: ManualClock) -> None:
    """A simulated seed ended with a KeyError: the replay had forgotten the commit that catch_up had just read."""
    store, a, b = pair(clock, m=1)
    a.offer()
    b.offer()
    a.step()
    commit = b.rv.settle()
    heir = Seat(store, "r01", clock).join()
    b.state.apply(0, np.ones(3, np.float32))  # not the mean
    b.rv.advance(commit)
    b.offer()
    a.offer()
    a.step()
    assert heir.rv.catch_up(late=lambda t: heir.offer()) == 1 and heir.events("base_differs")
    assert heir.rv.chain.known_commit(1) is not None and heir.rv.chain.fence_before(2) is not None


# ---------------------------------------------------------------------- the end


def test_the_last_snapshot_waits_for_two_equal_digests(clock: ManualClock) -> None:
    store, a, b = pair(clock, steps=1)
    together(a, b)
    assert a.rv.is_done and b.rv.is_done
    a.rv.finish("done")
    assert store.get(layout.snapshot_key(1)) is None
    b.rv.finish("done")
    snapshot = Snapshot.decode(store.get(layout.snapshot_key(1)) or b"")
    assert snapshot.confirmed and snapshot.base == a.rv.base == b.rv.base


def test_two_that_end_with_different_digests_confirm_nothing(clock: ManualClock) -> None:
    store, a, b = pair(clock, steps=1)
    together(a, b)
    a.rv.finish("done")
    b.rv.base = "different"
    b.rv.finish("done")
    assert store.get(layout.snapshot_key(1)) is None


def test_a_solo_run_ends_with_a_snapshot_that_is_marked_unconfirmed(clock: ManualClock) -> None:
    store = bucket(clock, replicas=1, m=1, steps=1)
    a = Seat(store, "r00", clock).join()
    together(a)
    a.rv.finish("done")
    assert not Snapshot.decode(store.get(layout.snapshot_key(1)) or b"").confirmed


def test_the_leave_record_is_written_as_far_as_the_store_takes_it(clock: ManualClock) -> None:
    store, a, _ = pair(clock)
    store.faults = [Fault("create", "leave/", times=10_000)]
    a.rv.finish("asked")
    assert a.events("no_leave_record")


# ---------------------------------------------------------------------- the mean


def random_offers(n: int, carried: int, size: int, seed: int) -> list[tuple[np.ndarray, int, int]]:
    """(Δ, h, age) of each."""
    r = np.random.default_rng(seed)
    ages = [0] * (n - carried) + [1 + i % 2 for i in range(carried)]
    return [(r.standard_normal(size).astype(np.float32), int(r.integers(1, 8)), age) for age in ages]


@pytest.mark.parametrize("size", [1, 7, (1 << 18) + 3])
@pytest.mark.parametrize(("n", "carried"), [(1, 0), (2, 0), (3, 0), (4, 0), (2, 1), (4, 2)])
def test_the_mean_equals_a_reference_bit_for_bit(clock: ManualClock, n: int, carried: int, size: int) -> None:
    from rendezvous.records.digests import digest
    from rendezvous.records.records import Listed

    store, listed, offers = MemoryStore(), [], random_offers(n, carried, size, seed=n * 10 + carried)
    for i, (x, h, age) in enumerate(offers):
        store.put(f"blob{i}", as_bytes(x))
        w = float(np.float32(h / 7 * 0.5**age))
        listed.append(Listed(5 - age, f"r{i:02d}", 1, "n", f"blob{i}", x.nbytes, digest(as_bytes(x)), h, w))
    commit = Commit(5, None, "b", tuple(listed), {}, 1, 1.0, 0, "r00-1", "n", 0.0)
    reducer, out, twice = Reducer(store, clock, lambda *a, **k: None), *np.empty((2, size), np.float32)
    reducer.mean(commit, out)

    total = np.float32(offers[0][1] / 7 * 0.5 ** offers[0][2]) * offers[0][0]
    for x, h, age in offers[1:]:
        total = total + np.float32(h / 7 * 0.5**age) * x
    weights = [np.float32(h / 7 * 0.5**age) for _, h, age in offers]
    assert np.array_equal(out.view(np.int32), (total / np.float32(sum(map(float, weights)))).view(np.int32))

    exact = sum(h / 7 * 0.5**age * x.astype(np.float64) for x, h, age in offers)
    exact = exact / sum(h / 7 * 0.5**age for _, h, age in offers)
    scale = max(np.abs(x).max() for x, *_ in offers)
    assert np.abs(out - exact).max() <= 4 * n * np.finfo(np.float32).eps * scale

    reducer.announcements.announce(commit.t, 0, out)
    reducer.mean(commit, twice)
    assert np.array_equal(out.view(np.int32), twice.view(np.int32)), "announced and direct means are the same bits"
    assert store.get(layout.mean_key(5, 0)) is not None


def test_a_lonely_negative_zero_keeps_its_sign(clock: ManualClock) -> None:
    store = bucket(clock, replicas=1, m=1)
    a = Seat(store, "r00", clock).join()
    a.offer(-0.0, 0.0, -1.0)
    out = np.empty(3, np.float32)
    a.rv.mean(a.rv.settle(), out)
    assert np.signbit(out).tolist() == [True, False, True]


def test_a_replica_that_joins_within_a_step_does_what_is_left(clock: ManualClock) -> None:
    """With a full round of its own it would hold all of them up; from the next step on it does full rounds."""
    store, rules_ = bucket(clock), replace(RULES, sync_every=8)
    a, b = (Seat(store, slot, clock, rules_).join() for slot in ("r00", "r01"))
    together(a, b)
    after = Seat(store, "r01", clock, rules_, pid=2)
    for a.rv.members.status.inner in (5, 6):
        a.rv.members.tick()
        after.rv.members.tick()
    after.join()
    assert after.rv.h_cap == 2
    together(a, after)
    assert after.rv.h_cap == a.rv.h_cap == 8
