"""The blobs that are collected, those that never are, and the fate of a reader that was too slow.

The engine is wired here as `fleet.keep = "window"` wires it (`window()`), so that its own code collects.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.engine.rendezvous import Rendezvous, no_emit
from rendezvous.engine.snapshot_duty import SnapshotDuty
from rendezvous.errors import StoreRefused
from rendezvous.keeping.budget import Window
from rendezvous.keeping.collected import refuse_collected
from rendezvous.keeping.garbage import (
    Collected,
    Collector,
    announced_stands,
    blobs_before,
    look_again,
    parse_blob_key,
    sweep_ended_run,
    two_newest,
)
from rendezvous.keeping.reach import Reach, read_reach
from rendezvous.records.records import Commit, WireError
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.replay import StateReplay
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.sim import simulate
from tests.sim.simulate import Schedule, draw
from tests.support.examples import QUICK
from tests.support.fakes import Fault, FaultyStore, ManualClock

RULES = Rules(fragments=2, sync_every=2, max_carry=2, snapshot_every=5)  # deltas are kept for 4 steps more
REGISTERS = [
    layout.RUN, layout.MODEL_MANIFEST, layout.claim_key("r00", 1), layout.beat_key("r00"),
    layout.offer_key(1, "r00", 0),
    layout.commit_key(1), layout.mean_key(1, 0), layout.snapshot_key(1),
    layout.leave_key("r00", 1), layout.control_key(0),
    layout.log_key("r00", 1, 0), layout.code_key("ab", "x.bin"), layout.model_file("model.safetensors"),
]  # fmt: skip


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def fill(store: Store, steps: int, every: int = 5, start: int = 0) -> None:
    """Steps `start` … `steps`−1 of a run: two deltas, a mean, their registers; a snapshot at every `every`."""
    for t in range(start, steps):
        for slot in ("r00", "r01"):
            store.put(layout.delta_blob(t, slot, 1, "n"), b"delta")
            store.put(layout.offer_key(t, slot, 0), b"offer")
        store.put(layout.commit_key(t), commit(t, snapshot=t // every * every).encode())
        store.put(layout.mean_blob(t, "n"), b"mean")
        store.put(layout.mean_key(t, 0), b"record")
        if t % every == 0:
            snapshot(store, t)


def commit(t: int, snapshot: int) -> Commit:
    return Commit(t, None, "b", (), {}, 1, 1.0, snapshot, "r00-1", "n", 0.0)


def snapshot(store: Store, t: int, confirmed: bool = True) -> snapshots.Snapshot:
    arrays = {"theta": np.full(3, t, np.float32)}
    return snapshots.write(store, ManualClock(), t, arrays, base="b", prev=None, confirmed=confirmed)


def broom(store: Store) -> Collector:
    return Collector(store, RULES, no_emit)


def blobs(store: Store, kind: str) -> list[int]:
    """Steps that have a blob of that kind."""
    keys = [k for k in store.list("") if k.endswith((".bin", ".safetensors")) and f"{kind}" in k]
    return sorted({int(k.split("/")[1]) for k in keys})


# ---------------------------------------------------------------------- the decision


def test_what_goes_is_of_one_kind_and_older_than_asked() -> None:
    keys = [layout.delta_blob(5, "r00", 1, "n"), layout.mean_blob(5, "n"), layout.snapshot_blob(5, "n")]
    for kind, key in zip(("delta", "mean", "snapshot"), keys, strict=True):
        assert blobs_before(keys, kind, 6) == [key] and blobs_before(keys, kind, 5) == []


def test_registers_never_go() -> None:
    assert not any(blobs_before(REGISTERS, kind, 10**9) for kind in ("delta", "mean", "snapshot"))


@pytest.mark.parametrize(
    "key", ["steps/x/delta/a.bin", "steps/1/delta/a.bin", "delta/0000000001/a.bin", "steps/0000000001/delta/a/b.bin",
            "steps/0000000001/mean/a.json", "steps/0000000001/mine/a.bin", "snapshots/0000000001/a.bin", "", "a/b/c"],
)  # fmt: skip
def test_what_is_not_known_stays(key: str) -> None:
    assert not any(blobs_before([key], kind, 10**9) for kind in ("delta", "mean", "snapshot"))


def test_no_commit_at_or_above_the_floor_lists_what_goes() -> None:
    for rules in (Rules(), Rules(max_carry=0), RULES, Rules(fragments=3, sync_every=3, max_carry=1)):
        for f in range(12):
            first = Window(f, f, rules.fragments * rules.max_carry, 0, 1).first_listable
            for t in range(f, f + 3):
                carryable = [t - age * rules.fragments for age in range(rules.max_carry + 1)]
                assert all(s >= first for s in carryable if s >= 0)


# ---------------------------------------------------------------------- the floor


def floor(store: Store, hint: int = 0, at_least: int = 0) -> int:
    return two_newest(store, hint, at_least)[0]


def test_the_floor_is_the_second_newest_complete_snapshot(store: Store) -> None:
    assert floor(store) == 0
    for t in (0, 5, 10, 15):
        snapshot(store, t)
    assert floor(store) == 10 and floor(store, at_least=12) == 12


def test_a_snapshot_that_could_not_heal_anybody_does_not_count(store: Store) -> None:
    newest, _, torn = snapshot(store, 20), snapshot(store, 15, confirmed=False), snapshot(store, 10)
    snapshot(store, 5)
    body = store.get(torn.blob)
    assert body is not None
    store.put(torn.blob, body[:-1])
    assert floor(store) == 5
    store.delete([newest.blob])
    assert floor(store) == 0
    store.put(layout.snapshot_blob(25, "n"), b"a writer that was killed before the manifest")
    assert floor(store) == 0


def test_a_hint_helps_where_list_lags() -> None:
    inner = MemoryStore()
    for t in (0, 5, 10):
        snapshot(inner, t)

    class Lagging(FaultyStore):
        def list(self, prefix: str) -> list[str]:
            return [k for k in super().list(prefix) if k < layout.snapshot_key(10)]

    lagging = Lagging(inner)
    assert floor(lagging) == 0 and floor(lagging, hint=10) == 5


# ---------------------------------------------------------------------- the loop


def test_a_sweep_leaves_what_a_reader_may_need(store: Store) -> None:
    fill(store, 23)
    registers = [k for k in store.list("") if k.endswith(".json")]
    orphans = [layout.delta_blob(2, "r02", 1, "o"), layout.mean_blob(2, "o"), layout.snapshot_blob(3, "o")]
    for key in orphans:
        store.put(key, b"a writer that was killed before its register")
    assert broom(store).sweep(20) > 0
    assert blobs(store, "delta/") == list(range(11, 23))
    assert blobs(store, "mean/") == list(range(15, 23))
    assert blobs(store, "snapshots/") == [15, 20]
    assert [k for k in store.list("") if k.endswith(".json")] == registers
    assert read_reach(store) == Reach(15)


@pytest.mark.parametrize("look", [read_reach, lambda store: refuse_collected(store, 3)])
def test_a_commit_that_is_cut_off_is_named_with_what_to_do(look: Callable[[Store], Any]) -> None:
    """`verify --step`, `export --step`, `blame` and `bisect` named neither the object nor the next thing to do."""
    store = MemoryStore()
    fill(store, 23)
    key = layout.commit_key(10)  # the middle of the steps before the newest snapshot, which is looked at first
    store.put(key, (store.get(key) or b"")[:20])
    with pytest.raises(WireError, match=f"{store.url}/{key}: expected a commit.*Restore the object from a backup"):
        look(store)


def test_a_second_sweep_goes_on_where_the_first_stopped(store: Store) -> None:
    fill(store, 23)
    watched = FaultyStore(store)
    collector = broom(watched)
    collector.sweep(20)
    watched.calls.clear()
    assert collector.sweep(20) == 0 and watched.calls == [], "nothing new: nothing is asked"
    fill(store, 28, start=23)
    collector.sweep(25)
    assert blobs(store, "delta/") == list(range(16, 28)) and blobs(store, "mean/") == list(range(20, 28))
    listed = [int(k.split("/")[1]) for verb, k in watched.calls if verb == "list" and k.startswith("steps/")]
    assert min(listed) >= 11, "steps that are clean are not looked at again"


def test_work_per_call_is_bounded(store: Store) -> None:
    fill(store, 60)
    collector, calls = broom(store), 0
    while collector.sweep(55, at_most=7):
        calls += 1
    assert calls >= 46 // 7
    assert blobs(store, "delta/") == list(range(46, 60)) and blobs(store, "snapshots/") == [50, 55]


def test_a_long_run_that_was_collected_is_not_listed_again() -> None:
    store = MemoryStore()
    fill(store, 500)
    broom(store).sweep(495, at_most=10**6)
    fill(store, 505, start=500)
    watched = FaultyStore(store)
    broom(watched).sweep(500)
    assert sum(verb == "list" for verb, _ in watched.calls) < 35
    assert blobs(store, "delta/")[0] == 491


class Killed(BaseException):
    """kill -9 of the collector."""


@pytest.mark.quick(1)
def test_a_killed_collector_is_finished_by_the_next(store: Store) -> None:
    """At each of its store calls (on files, at some), before or after it has its effect."""
    calls = 0
    while True:
        for key in store.list(""):
            store.delete([key])
        fill(store, 23)
        faulty = FaultyStore(store)
        if calls >= count_calls(store):
            break
        countdown(faulty, calls)
        with pytest.raises(Killed):
            broom(faulty).sweep(20)
        broom(store).sweep(20)
        fill(store, 28, start=23)
        broom(store).sweep(25)
        assert blobs(store, "delta/") == list(range(16, 28)), f"killed at call {calls}"
        assert blobs(store, "mean/") == list(range(20, 28)), f"killed at call {calls}"
        assert blobs(store, "snapshots/") == [20, 25]
        calls += 1 if isinstance(store, MemoryStore) else 17 if os.environ.get(QUICK) else 7
    assert calls > 10


def count_calls(store: Store) -> int:
    counted = FaultyStore(store)
    broom(counted).sweep(20)
    fill(store, 23)
    return len(counted.calls)


def countdown(faulty: FaultyStore, calls: int) -> None:
    """The store call after `calls` others kills; every second one has had its effect."""
    real = faulty._call

    def call(verb: str, key: str, request: Callable[[], Any]) -> Any:
        if len(faulty.calls) == calls:
            if calls % 2:
                request()
            raise Killed
        return real(verb, key, request)

    faulty._call = call  # type: ignore[method-assign]


def test_two_collectors_do_not_hurt_each_other(store: Store) -> None:
    fill(store, 60)
    a, b = broom(store), broom(store)
    for _ in range(20):
        a.sweep(55, at_most=5)
        b.sweep(55, at_most=3)
    assert blobs(store, "delta/") == list(range(46, 60)) and blobs(store, "mean/") == list(range(50, 60))


def test_a_bucket_that_may_not_be_deleted_from_only_grows() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    faulty = FaultyStore(MemoryStore(), [Fault("delete", error=StoreRefused("no permission to delete"), times=2)])
    fill(faulty, 23)
    collector = Collector(faulty, RULES, lambda event, **fields: told.append((event, fields)))
    assert collector.sweep(20) == 0 and told[0] == ("garbage_stays", {"trouble": "no permission to delete"})
    [(event, fields)] = told[1:]  # a view shows no `garbage_stays`: the bucket grew in silence
    assert event == "warning" and "than fleet.keep allows: no permission to delete." in fields["text"]
    fill(faulty, 28, start=23)
    collector.sweep(25)
    assert [event for event, _ in told] == ["garbage_stays", "warning", "garbage_stays"], "it warns once"
    collector.sweep(25)
    assert told[-1][0] == "collected" and blobs(faulty, "mean/") == list(range(20, 28))


# ---------------------------------------------------------------------- the reader's side


def test_only_a_newer_complete_snapshot_makes_it_collected(store: Store) -> None:
    fill(store, 12)
    refuse_collected(store, 10)
    with pytest.raises(Collected, match="snapshot 10 exists") as gone:
        refuse_collected(store, 3)
    assert gone.value.newer == 10
    store.delete([k for k in store.list(layout.SNAPSHOTS) if k.endswith(".safetensors")])
    refuse_collected(store, 3)


def test_what_is_collected_while_a_slow_reader_looks_is_not_lost() -> None:
    """Seed 3006929: it slept between the list and the one snapshot on it, and said that the bucket lost objects."""

    class Slow(MemoryStore):
        others: Iterator[int] = iter([10, 15])

        def list(self, prefix: str) -> list[str]:
            seen = super().list(prefix)
            for t in self.others:
                self.delete([k for k in seen if k.endswith(".safetensors")])
                snapshot(self, t)
                break
            return seen

    store = Slow()
    fill(store, 6)
    with pytest.raises(Collected, match="snapshot 15 exists"):
        refuse_collected(store, 3)


def test_a_joiner_looks_again_as_long_as_there_is_something_newer() -> None:
    told: list[Any] = []
    answers: Iterator[Exception | int] = iter([Collected("", 5), Collected("", 10), 42])

    def heal() -> int:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert look_again(heal, lambda event, **fields: told.append((event, fields["snapshot"]))) == 42
    assert told == [("looks_again", 5), ("looks_again", 10)]
    answers = iter([Collected("", 5), Collected("", 5), 42])
    with pytest.raises(Collected):
        look_again(heal, lambda event, **fields: None)


# ---------------------------------------------------------------------- the engine, wired


@contextmanager
def window() -> Iterator[None]:
    """The engine as `fleet.keep = "window"` makes it."""
    real = Rendezvous.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        real(self, *args, **{**named, "keep": 0})

    with patch.object(Rendezvous, "__init__", init):
        yield


@pytest.fixture
def seats() -> Iterator[tuple[FaultyStore, ManualClock, list[Any]]]:
    from tests.rendezvous.test_engine import Seat, bucket

    clock = ManualClock()
    store = bucket(clock, replicas=3, m=2, steps=100)
    with window():
        yield store, clock, [Seat(store, f"r{i:02d}", clock) for i in range(3)]


def rounds(a: Any, b: Any, count: int) -> None:
    for _ in range(count):
        a.offer()
        b.offer()
        a.step()
        b.step()


def test_the_engine_collects_and_a_late_joiner_heals(seats: Any) -> None:
    store, _, (a, b, late) = seats
    a.join()
    b.join()
    rounds(a, b, 9)
    assert blobs(store.inner, "snapshots/") == [6, 8] and blobs(store.inner, "mean/")[0] == 6
    assert blobs(store.inner, "delta/")[0] == 8, "those of 6 and 7 went: their means stand, and so does snapshot 8"
    assert announced_stands(store, a.rv.chain.known_commit(6)) and announced_stands(store, a.rv.chain.known_commit(7))
    late.join()
    assert late.rv.step == 9 and np.array_equal(late.state.theta, a.state.theta)


@pytest.mark.parametrize("last", ["ab", "ba"])
def test_what_a_finished_run_leaves_is_reckoned_from_its_last_snapshot(last: str) -> None:
    """Seed 978: no step was closed after it, so all bodies since the snapshot that the last closer knew of stayed."""
    from tests.rendezvous.test_engine import Seat, bucket

    clock = ManualClock()
    store = bucket(clock, replicas=3, m=2, steps=9)
    with window():
        a, b, late = (Seat(store, f"r{i:02d}", clock) for i in range(3))
        a.join()
        b.join()
        rounds(a, b, 9)
        assert blobs(store.inner, "delta/") == [8], "the closer of the last step leaves what snapshot 9 replaces"
        for seat in last:
            {"a": a, "b": b}[seat].rv.finish("done")
        assert not a.events("repaired") + b.events("repaired"), "what was collected is not put back"
        assert blobs(store.inner, "delta/") == [] and blobs(store.inner, "mean/") == [8]
        assert blobs(store.inner, "snapshots/") == [8, 9]
        late.join()
    assert late.rv.step == 9 and np.array_equal(late.state.theta, a.state.theta)


def test_the_last_session_collects_for_a_killed_writer() -> None:
    from tests.rendezvous.test_engine import Seat, bucket

    clock = ManualClock()
    store = bucket(clock, replicas=3, m=2, steps=9)
    with window():
        a, b, third = (Seat(store, f"r{i:02d}", clock) for i in range(3))
        a.join()
        b.join()
        rounds(a, b, 8)
        third.join()
        rounds(a, b, 1)
        third.rv.catch_up()
        a.rv.finish("done")
        with patch.object(SnapshotDuty, "sweep", lambda self: None):
            b.rv.finish("done")
        assert blobs(store.inner, "delta/") == [8] and blobs(store.inner, "snapshots/")[-2:] == [8, 9]
        third.rv.finish("done")
    assert blobs(store.inner, "delta/") == [] and blobs(store.inner, "mean/") == [8]
    assert blobs(store.inner, "snapshots/") == [8, 9]


def test_where_the_writer_of_the_last_snapshot_ended_last_and_was_killed_somebody_else_collects() -> None:
    from tests.rendezvous.test_engine import Seat, bucket

    clock = ManualClock()
    store = bucket(clock, replicas=2, m=2, steps=9)
    with window():
        a, b = (Seat(store, f"r{i:02d}", clock) for i in range(2))
        a.join()
        b.join()
        rounds(a, b, 9)
        with patch.object(SnapshotDuty, "sweep", lambda self: None):
            a.rv.finish("done")
            b.rv.finish("done")
        assert blobs(store.inner, "delta/") == [8] and blobs(store.inner, "snapshots/")[-2:] == [8, 9]
        rules, elements = a.rv.rules, [a.state.size(0)]
        ask = lambda: sweep_ended_run(store, rules, no_emit, steps=9, budget=0, elements=elements)  # noqa: E731
        assert ask() > 0
    assert blobs(store.inner, "delta/") == [] and blobs(store.inner, "mean/") == [8]
    assert blobs(store.inner, "snapshots/") == [8, 9]
    store.put(layout.commit_key(8), b"garbage")
    assert ask() == 0


def test_a_replica_that_stalled_below_the_floor_must_join_again(seats: Any) -> None:
    store, clock, (a, b, stalled) = seats
    for seat in (a, b, stalled):
        seat.join()
    rounds(a, b, 9)
    with pytest.raises(Collected, match=r"step 0 cannot be read any more .* snapshot 8 exists"):
        stalled.rv.catch_up()
    from tests.rendezvous.test_engine import Seat

    again = Seat(store, "r02", clock).join()
    assert again.rv.step == 9 and np.array_equal(again.state.theta, a.state.theta)


def test_a_joiner_whose_snapshot_is_collected_meanwhile_looks_again(seats: Any) -> None:
    """1. it reads the manifest   2. two newer snapshots come, the blob goes   3. it asks for the blob."""
    _, _, (a, b, late) = seats
    a.join()
    b.join()
    rounds(a, b, 5)
    load, stalls = snapshots.load, [lambda: rounds(a, b, 6)]

    def slow(*args: Any, **named: Any) -> Any:
        while stalls:
            stalls.pop()()
        return load(*args, **named)

    with patch.object(snapshots, "load", slow):
        late.join()
    assert late.events("looks_again") and late.rv.step == 11
    assert np.array_equal(late.state.theta, a.state.theta)


def test_a_joiner_whose_replay_is_collected_meanwhile_looks_again(seats: Any) -> None:
    """1. it loads snapshot 4   2. two newer ones come, mean 4 goes   3. it asks for mean 4."""
    _, _, (a, b, late) = seats
    a.join()
    b.join()
    rounds(a, b, 5)
    load, stalls = StateReplay.load_snapshot, [lambda: rounds(a, b, 6)]

    def slow(*args: Any) -> bool:
        found = load(*args)
        while stalls:
            stalls.pop()()
        return found

    with patch.object(StateReplay, "load_snapshot", slow):
        late.join()
    assert late.events("looks_again") and late.rv.step == 11
    assert np.array_equal(late.state.theta, a.state.theta)


def test_when_the_newest_snapshot_rots_the_floor_still_heals_and_mends(seats: Any) -> None:
    store, _, (a, b, late) = seats
    a.join()
    b.join()
    rounds(a, b, 9)
    newest = next(iter(snapshots.newest_first(store)))
    store.put(newest.blob, b"x" * newest.size)
    late.join()
    assert late.events("healed")[0]["snapshot"] == 6 and late.events("repaired")
    assert np.array_equal(late.state.theta, a.state.theta)


# ---------------------------------------------------------------------- the simulator


def busy(seed: int) -> Schedule:
    """An ordinary schedule in which the floor moves at every step or second step, and sleepers are common."""
    plan = replace(draw(seed), keep=(0, 0, 0, 1_500)[seed % 4])
    return replace(plan, rules=replace(plan.rules, snapshot_every=1 + seed % 2), pause=max(plan.pause, 0.003))


@pytest.mark.slow
def test_the_promises_hold_while_everybody_collects() -> None:
    """Readers that stall are collected under, collectors are killed between two deletes: no replica averages a gap."""
    results = [simulate.run(busy(seed)) for seed in range(120)]
    red = [f"seed {r.schedule.seed}: {r.red}" for r in results if r.red]
    assert not red, "\n".join(red)
    fired = sum((r.fired for r in results), Counter[str]())
    assert fired["collected"] > 1500 and fired["ends: Collected"] > 0 and fired["kill at delete"] > 0, fired


def test_an_object_with_a_name_that_is_no_key_does_not_stop_the_collection() -> None:
    assert parse_blob_key("steps/0000000003/delta/a\\b.bin") is None
    assert parse_blob_key("steps/0000000003/delta/r00-1-ab.bin") == ("delta", 3)
