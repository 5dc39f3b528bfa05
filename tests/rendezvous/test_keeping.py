"""A run's bytes stay within the budget; what goes, goes in the order that is promised, and is said."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path

import numpy as np
import pytest

from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.engine.rendezvous import Rendezvous, no_emit
from rendezvous.keeping.budget import (
    RETRY,
    Kept,
    Sizes,
    SnapshotPace,
    Window,
    choose_kept,
    largest_window,
    parts_of,
    snapshot_period,
)
from rendezvous.keeping.garbage import Collector
from rendezvous.keeping.reach import Reach, read_reach
from rendezvous.keeping.thinning import thin_snapshots
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Listed, Mean
from rendezvous.records.tensors import TensorFile
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.rendezvous.test_engine import Seat, bucket
from tests.support.fakes import FaultyStore, ManualClock, VectorState

RULES = Rules(sync_every=2, max_carry=1, snapshot_every=5)
BODY, MEAN = 100, 50  # bytes of one delta, and of a mean, as `fill` writes them


def window(floor: int, snapshot: int = 100) -> Window:
    return Window(floor, floor + 5, carry=1, snapshot=snapshot, every=5)


# ---------------------------------------------------------------------- the decision


def steps(count: int) -> dict[int, Sizes]:
    return {t: Sizes(deltas=20, mean=10) for t in range(count)}


def ask(budget: int, head: int = 100) -> Kept:
    floor = (head - 1) // 5 * 5 - 5
    answer = choose_kept(budget, head, steps(head), window(floor), range(0, floor, 5))
    assert answer is not None
    return answer


def test_deltas_go_first_then_means_then_snapshots_thin_out() -> None:
    everything = 21 * 100 + 100 * 30
    assert ask(everything * 4) == Kept(frozenset(range(0, 90, 5)), 0, 0)
    answers = [ask(budget) for budget in range(everything + 100, 0, -50)]
    gone = [(90 - len(a.snapshots) * 5, a.means_from, a.deltas_from) for a in answers]
    for before, after in pairwise(gone):
        assert before <= after or before[0] < after[0], "a snapshot less may leave room for some means"
    first = {kind: next(i for i, g in enumerate(gone) if g[kind] > 0) for kind in (0, 1, 2)}
    assert first[2] < first[1] < first[0], "deltas, means, snapshots"
    assert all(a.deltas_from == 95 for a in answers if a.means_from > 0 and not a.over)


def test_a_window_that_has_no_room_stays_and_is_known_to_exceed() -> None:
    answer = ask(500)
    assert answer.snapshots == frozenset() and (answer.means_from, answer.deltas_from) == (90, 95)
    need = 2 * 100 + 10 * 10 + 5 * 20  # two snapshots, the means since the older one, the deltas since the newest
    on_their_way = 100 + 3 * 30
    assert answer.over == need + on_their_way - 0.95 * 500


def test_no_answer_before_enough_is_known() -> None:
    some = {t: size for t, size in steps(100).items() if t >= 50}
    older = range(0, 90, 5)
    assert choose_kept(10_000, 100, some, window(90), older) is None
    assert choose_kept(10_000, 0, {}, window(90), older) is None, "seed 167: a joiner at the end has heard of none"
    assert choose_kept(1500, 100, some, window(90), older) == choose_kept(1500, 100, steps(100), window(90), older)
    assert choose_kept(10**6, 100, some, window(90), older) == Kept(frozenset(older), 0, 0), "it would fit four times"


@pytest.mark.parametrize("room", [1, 2, 5, 10, 20])
def test_snapshots_stay_at_ages_of_about_powers_of_two(room: int) -> None:
    stay = thin_snapshots(range(0, 10_000, 10), 10_000, 10, room)
    assert 0 in stay and room / 4 <= len(stay) <= room
    ages = sorted(10_000 - t for t in stay)
    assert all(after <= 6 * before for before, after in pairwise(ages) if room >= 10), ages


@pytest.mark.quick(1)
@pytest.mark.parametrize("gaps", [0.0, 0.2])
def test_a_snapshot_that_was_given_up_is_never_asked_for_again(gaps: float) -> None:
    """So collectors that look at other times, or come late, agree on the kept set."""
    rng = random.Random(71_000_000)
    for room in range(14):
        run = [t for t in range(0, 3000, 10) if t == 0 or rng.random() >= gaps]
        gone = set[int]()
        for i in range(2, len(run)):
            stay = thin_snapshots(run[:i], run[i], 10, room)
            assert len(stay & gone) <= (room if gaps else 0), "where one is missing, a few that went are missed"
            assert len(stay) <= room
            gone |= set(run[:i]) - stay


def test_a_step_in_the_window_keeps_its_deltas_where_no_mean_is_announced() -> None:
    """As with three bodies of int8, of which a mean in fp32 would be longer."""
    direct = {t: Sizes(deltas=20, mean=0) for t in range(100)}
    answer = choose_kept(400, 100, direct, window(90), ())
    assert answer is not None and answer.over == 2 * 100 + 10 * 20 + 100 + 3 * 20 - 0.95 * 400
    many = [window(90).bytes_needed(t, direct[t]) for t in (89, 90, 94, 95, 99)]
    few = [window(90).bytes_needed(t, Sizes(20, 10)) for t in (89, 90, 94, 95, 99)]
    assert (many, few) == ([0, 20, 20, 20, 20], [0, 10, 10, 30, 30])


@pytest.mark.parametrize(("owners", "shards"), [(3, 64), (4, 2), (7, 3), (1, 1)])
def test_a_mean_has_the_parts_that_have_shards(owners: int, shards: int) -> None:
    """With more owners than shards some own nothing, and announce nothing."""
    one = Listed(7, "r00", 1, "n", layout.delta_blob(7, "r00", 1, "n"), 8, "d", 1, 1.0, shards=("d",) * shards)
    names = tuple(f"r{i:02d}" for i in range(owners))
    made = replace(commit(7, one), mode="sharded", owners=names)
    rules = Rules(shard_from=1, shard_elements=2)
    reducer = Reducer(MemoryStore(), ManualClock(), no_emit, rules)
    assert parts_of(made) == [j for j, part in enumerate(reducer.parts.split(made, 2 * shards)) if part]


# ---------------------------------------------------------------------- when a snapshot is due


@pytest.mark.parametrize("step", [Sizes(60, 20), Sizes(45, 0), Sizes(15, 5), Sizes(0, 0)])
@pytest.mark.parametrize("snapshot", [0, 40, 1_000])
def test_the_window_fits_with_the_longest_period_that_fits(step: Sizes, snapshot: int) -> None:
    """One function says how often, the other how much: each is the other's inverse."""
    for budget in range(1, 9_000, 37):
        period = snapshot_period(budget, 50, snapshot, step)
        fits = largest_window(period, snapshot, step) <= budget
        assert 1 <= period <= 50 and (fits or period == 1 or step == Sizes(0, 0))
        assert period == 50 or largest_window(period + 1, snapshot, step) > budget


def test_no_budget_leaves_the_period_of_the_rules() -> None:
    assert snapshot_period(0, 7, 10**9, Sizes(10**9, 10**9)) == 7


def test_the_window_at_its_largest_is_what_the_collector_keeps() -> None:
    """Snapshots at 90 and 100; that of 110 is begun, and seen when step 111 has been taken."""
    step, known = Sizes(20, 10), steps(111)
    answer = choose_kept(1, 110, known, Window(90, 100, carry=1, snapshot=100, every=10), ())
    assert answer is not None and answer.over == int(0.95 * largest_window(10, 100, step) - 0.95 * 1)


def due(
    pace: SnapshotPace, t: int, newest: int, *, closed: bool = True, owes: bool = False, there: bool = True
) -> bool:
    return pace.is_due(t, newest, closed=closed, owes=owes, stands=lambda step: there)


def steps_due(pace: SnapshotPace, begin: int, end: int, sizes: Sizes, *, newest: int = 0) -> list[int]:
    """The steps at which a snapshot is begun, if each stands at once."""
    found = []
    for t in range(begin, end):
        pace.take_step(t, sizes, snapshot=100, newest=newest)
        if due(pace, t + 1, newest):
            found.append(newest := t + 1)
    return found


def budget_for(period: int) -> int:
    """A snapshot has 100, a step 20 + 10: three snapshots and three steps are 390, and each step of a period is 40."""
    return ceil((390 + 40 * period) / 0.95)


def test_a_budget_that_binds_brings_snapshots_forward_and_another_does_not() -> None:
    assert steps_due(SnapshotPace(10, budget_for(4)), 0, 13, Sizes(20, 10)) == [4, 8, 12]
    assert steps_due(SnapshotPace(10, budget_for(1)), 0, 4, Sizes(20, 10)) == [1, 2, 3, 4]
    assert steps_due(SnapshotPace(10, 1), 0, 4, Sizes(20, 10)) == [1, 2, 3, 4], "below the floor, too"
    for roomy in (0, budget_for(10), budget_for(99)):
        assert steps_due(SnapshotPace(10, roomy), 0, 35, Sizes(20, 10)) == [10, 20, 30]


def test_a_step_with_more_replicas_brings_the_snapshot_forward() -> None:
    pace = SnapshotPace(50, budget_for(6))
    assert steps_due(pace, 0, 8, Sizes(20, 10)) == [6]
    assert steps_due(pace, 8, 12, Sizes(40, 10), newest=6) == [9, 12], "3 steps of 60 have room beside 450"


def test_a_replica_that_joins_at_a_snapshot_plans_as_the_others_do() -> None:
    old, new = SnapshotPace(50, budget_for(5)), SnapshotPace(50, budget_for(5))
    steps_due(old, 0, 20, Sizes(20, 10))
    new.take_step(20, Sizes(20, 10), snapshot=100, newest=20)
    assert steps_due(old, 20, 41, Sizes(20, 10), newest=20) == [25, 30, 35, 40]
    assert steps_due(new, 21, 41, Sizes(20, 10), newest=20) == [25, 30, 35, 40]


@pytest.mark.parametrize("budget", [0, budget_for(10), budget_for(99)])
def test_the_writer_of_a_snapshot(budget: int) -> None:
    pace = SnapshotPace(20, budget)
    period = min(20, 20 if not budget else snapshot_period(budget, 20, 100, Sizes(20, 10)))
    for t in range(period):
        assert not due(pace, t, 0)
        pace.take_step(t, Sizes(20, 10), snapshot=100, newest=0)
    assert due(pace, period, 0) and not due(pace, period, 0, closed=False), "the closer of the step before"
    pace.take_step(period, Sizes(20, 10), snapshot=100, newest=0)
    assert not due(pace, period + 1, 0, there=False), "it is on its way, and another closer does not know of it"
    assert due(pace, period + 1, 0, closed=False, owes=True), "its own was given up"
    pace.take_step(period + 1, Sizes(20, 10), snapshot=100, newest=0)
    late = period + RETRY
    assert due(pace, late, 0, there=False) and not due(pace, late, 0, there=True) and not due(pace, late, period)
    assert not due(pace, late, 0, there=False, closed=False)
    assert due(pace, 40, 0, closed=False), "two periods without one: anybody"


def test_a_late_snapshot_does_not_move_those_that_follow() -> None:
    pace = SnapshotPace(10, 0)
    assert steps_due(pace, 12, 35, Sizes(20, 10), newest=12) == [20, 30]


# ---------------------------------------------------------------------- a collector and a bucket


def fill(store: Store, count: int, start: int = 0) -> None:
    for t in range(start, count):
        if t % 5 == 0:
            arrays = {"theta": np.full(25, t, np.float32)}
            snapshots.write(store, ManualClock(), t, arrays, base="b", prev=None)
        offers = []
        for slot in ("r00", "r01"):
            blob = layout.delta_blob(t, slot, 1, "n")
            store.put(blob, bytes(BODY))
            offers.append(Listed(t, slot, 1, "n", blob, BODY, "d", 1, 1.0))
        store.put(layout.commit_key(t), commit(t, *offers).encode())
        store.put(layout.mean_blob(t, "n"), bytes(BODY))
        store.put(layout.mean_key(t, 0), Mean(t, layout.mean_blob(t, "n"), BODY, "d", "n").encode())


def commit(t: int, *offers: Listed) -> Commit:
    return Commit(t, None, "b", offers, {}, 1, 1.0, t // 5 * 5, "r00-1", "n", 0.0)


def blob_bytes(store: Store) -> int:
    return sum(len(store.get(k) or b"") for k in store.list("") if k.endswith((".bin", ".safetensors")))


def swept(store: Store, budget: int, until: int, *, broom: Collector | None = None, start: int = 0) -> Collector:
    """One collector, at every step."""
    broom = broom or Collector(store, RULES, no_emit, budget)
    for t in range(start, until):
        fill(store, t + 1, start=t)
        broom.note_commit(Commit.decode(store.get(layout.commit_key(t)) or b""))
        broom.sweep(t // 5 * 5)
    return broom


def steps_with(store: Store, kind: str) -> list[int]:
    keys = [k for k in store.list("") if k.endswith((".bin", ".safetensors")) and kind in k]
    return sorted({int(k.split("/")[1]) for k in keys})


def layout_of(store: Store) -> list[tuple[str, list[int]]]:
    return [(kind, steps_with(store, kind)) for kind in ("delta/", "mean/", "snapshots/")]


@pytest.mark.quick(1)
def test_the_bytes_stay_within_the_budget_at_every_step(store: Store) -> None:
    budget, broom = 12_000, None
    for t in range(150):
        broom = swept(store, budget, t + 1, broom=broom, start=t)
        assert blob_bytes(store) <= budget
    assert steps_with(store, "snapshots/")[0] == 0 and steps_with(store, "snapshots/")[-2:] == [140, 145]
    assert steps_with(store, "delta/")[-1] == 149


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    yield MemoryStore() if request.param == "memory" else FileStore(tmp_path)


def test_a_collector_that_comes_late_leaves_what_one_that_was_there_leaves() -> None:
    one, two = MemoryStore(), MemoryStore()
    swept(one, 9_000, 100)
    fill(two, 100)
    late = Collector(two, RULES, no_emit, 9_000)
    late.note_commit(Commit.decode(two.get(layout.commit_key(99)) or b""))
    for _ in range(3):
        late.sweep(95, at_most=60)
    assert layout_of(two) == layout_of(one), "the same, from the records alone"


def test_collectors_that_look_at_other_times_leave_no_more_and_no_less() -> None:
    alone, many = MemoryStore(), MemoryStore()
    swept(alone, 9_000, 120)
    brooms, rng = [Collector(many, RULES, no_emit, 9_000) for _ in range(3)], random.Random(71_000_001)
    for t in range(120):
        fill(many, t + 1, start=t)
        for broom in brooms:
            broom.note_commit(Commit.decode(many.get(layout.commit_key(t)) or b""))
        rng.choice(brooms).sweep(t // 5 * 5)
    for broom in brooms:
        broom.sweep(115)
    assert layout_of(many) == layout_of(alone)


def test_a_long_run_costs_a_few_requests_per_step_and_is_not_read_again() -> None:
    store = MemoryStore()
    swept(store, 9_000, 400)
    watched = FaultyStore(store)
    fresh = Collector(watched, RULES, no_emit, 9_000)
    swept(watched, 9_000, 410, broom=fresh, start=400)
    reads = [key for verb, key in watched.calls if verb == "get" and key.endswith("commit.json")]
    assert len(reads) < 10 + 120, "as many commits as the budget holds, not 400"
    watched.calls.clear()
    swept(watched, 9_000, 420, broom=fresh, start=410)
    lists = sum(verb == "list" for verb, _ in watched.calls)
    assert lists <= 2 * 10 + 2 * 2, "a LIST of each kind per step, and of snapshots when there is a new one"


def test_the_budget_is_named_once_when_the_window_alone_exceeds_it() -> None:
    store, said = MemoryStore(), list[str]()
    broom = Collector(store, RULES, lambda event, **fields: said.append(str(fields.get("text", ""))), 500)
    swept(store, 500, 30, broom=broom)
    warnings = [text for text in said if "fleet.keep is" in text]
    assert len(warnings) == 1 and "that a replica needs to heal take" in warnings[0]
    assert steps_with(store, "snapshots/") == [20, 25] and steps_with(store, "mean/")[0] == 20


def test_a_body_goes_once_its_mean_stands_and_a_newer_snapshot_does() -> None:
    store = MemoryStore()
    fill(store, 12)
    broom = Collector(store, RULES, no_emit, 0)
    for t in range(12):
        broom.note_commit(Commit.decode(store.get(layout.commit_key(t)) or b""))
    (missing, record), torn = (layout.mean_key(3, 0), store.get(layout.mean_key(3, 0)) or b""), layout.mean_blob(7, "n")
    store.delete([missing])
    store.put(torn, bytes(BODY - 1))
    late = layout.delta_blob(4, "r02", 1, "n")  # which no commit has listed yet
    store.put(late, bytes(BODY))
    broom.sweep(10)
    assert steps_with(store, "delta/") == [4, 7, 10, 11], "3 went: it is before the older snapshot, where nobody begins"
    assert store.get(late) is not None and store.get(layout.delta_blob(4, "r00", 1, "n")) is None
    store.put(missing, record)
    store.put(torn, bytes(BODY))
    swept(store, 0, 16, broom=broom, start=12)
    assert steps_with(store, "delta/") == [15]
    assert steps_with(store, "mean/") == list(range(10, 16)) and steps_with(store, "snapshots/") == [10, 15]


def test_before_the_second_snapshot_bodies_go_that_announced_means_replace() -> None:
    store = MemoryStore()
    swept(store, 0, 9)
    assert steps_with(store, "delta/") == [5, 6, 7, 8] and steps_with(store, "mean/") == list(range(9))
    assert steps_with(store, "snapshots/") == [0, 5], "θ of every step can still be told"
    assert read_reach(store) == Reach(0)


def test_a_reader_whose_bodies_go_while_it_reads_takes_the_mean_that_was_announced() -> None:
    """A replay in parts: the mean was not announced when it looked, and is when the bodies have gone."""
    clock, rules = ManualClock(), replace(RULES, fragments=1, shard_from=1, shard_elements=2, max_carry=0)
    store = bucket(clock, replicas=3, m=3, steps=10)
    seats = [Seat(store, f"r0{i}", clock, rules).join() for i in range(3)]
    for seat in seats:
        seat.offer(1, 2, 3)
    for seat in seats:
        seat.rv.settle()
    made = seats[0].rv.chain.read(0)
    assert made is not None and made.mode == "sharded"
    sums, elements = [np.empty(3, np.float32) for _ in range(2)], 3
    reader, others = Reducer(store, clock, no_emit, rules), Reducer(store, clock, no_emit, rules)
    looked = reader.parts.take

    def take_part(*asked: object) -> bool:
        if (found := looked(*asked)) or store.get(layout.mean_key(0, 0)) is not None:  # type: ignore[arg-type]
            return found
        for j, part in enumerate(others.parts.split(made, elements)):
            if part:
                others.announcements.announce(made.t, j, others.parts.make(made, part, sums[0]))
        store.delete([o.blob for o in made.offers])
        return False

    reader.parts.take = take_part  # type: ignore[method-assign]
    reader.mean(made, sums[1])
    assert sums[0].tolist() == sums[1].tolist() == [1, 2, 3]


# ---------------------------------------------------------------------- what can still be told


def test_what_is_left_is_known_from_the_bucket() -> None:
    store = MemoryStore()
    assert read_reach(store) == Reach(0)
    swept(store, 9_000, 100)
    left = read_reach(store)
    means = steps_with(store, "mean/")[0]
    kept_ones = steps_with(store, "snapshots/")
    assert left.since == min(t for t in kept_ones if t >= means)
    assert left.before == tuple(t for t in kept_ones if t < left.since)
    assert left.covers_step(left.since + 1) and left.covers_step(0) and not left.covers_step(1)
    assert left.in_words() == f"reaches back to step {left.since}, and every step that has a snapshot: " + ", ".join(
        map(str, left.before)
    )


# ---------------------------------------------------------------------- the engine


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Rendezvous.__init__
    monkeypatch.setattr(Rendezvous, "__init__", lambda self, *a, **n: real(self, *a, **{**n, "keep": 2_000}))


@pytest.mark.usefixtures("tight")
def test_a_run_under_a_budget_heals_a_joiner_at_any_step_and_stays_within_it() -> None:
    clock = ManualClock()
    store = bucket(clock, replicas=3, m=2, steps=1000)
    a, b = (Seat(store, f"r0{i}", clock).join() for i in range(2))
    for t in range(60):
        for seat in (a, b):
            seat.offer()
        for seat in (a, b):
            seat.step()
        assert blob_bytes(store.inner) <= 2_000
        joiner = Seat(store, "r02", clock).join()
        assert joiner.rv.step == t + 1 and np.array_equal(joiner.state.theta, a.state.theta)
    left = read_reach(store.inner)
    assert left.since > 0 and left.before[0] == 0 and not left.covers_step(1)


def seated(store: Store, clock: ManualClock, keep: int, monkeypatch: pytest.MonkeyPatch) -> list[Seat]:
    """Three replicas of 100 elements under this budget, with no other reason for a snapshot."""
    real = Rendezvous.__init__
    monkeypatch.setattr(Rendezvous, "__init__", lambda self, *a, **n: real(self, *a, **{**n, "keep": keep}))
    seats = [Seat(store, f"r0{i}", clock, RARELY) for i in range(3)]
    for seat in seats:
        seat.state = VectorState(100)
        seat.join()
    return seats


RARELY = Rules(sync_every=2, max_carry=1, snapshot_every=1000)
LEFT, SNAPSHOT = Sizes(deltas=3 * 400, mean=400), TensorFile({"theta.0": np.zeros(100, np.float32)}).size


def take_steps(seats: list[Seat], store: FaultyStore, count: int) -> int:
    """Each closes in turn; -> the most bytes of blobs that were there at any time."""
    most = 0
    for t in range(count):
        for i, seat in enumerate(seats):
            seat.offer(*[i + 1.0] * 100)
            most = max(most, blob_bytes(store.inner))
        for i in range(len(seats)):
            seats[(i + t) % len(seats)].step()
            most = max(most, blob_bytes(store.inner))
    return most


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_snapshots_come_early_so_that_the_window_follows_the_budget(
    period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closers take turns, and none of them knows what another has begun."""
    budget, clock = largest_window(period, SNAPSHOT, LEFT), ManualClock()
    store = bucket(clock, replicas=3, m=3, steps=1000)
    seats = seated(store, clock, budget, monkeypatch)
    assert take_steps(seats, store, 40) <= budget
    made = snapshots.steps_of(store.list(layout.SNAPSHOTS))
    assert made == list(range(0, 40, period)), "no more of them than the budget asks for"
    assert {fields["kind"] for seat in seats for fields in seat.events("warning")} == set()
    joiner = Seat(store, "r02", clock, RARELY)
    joiner.state = VectorState(100)
    joiner.join()
    assert np.array_equal(joiner.state.theta, seats[0].state.theta)


def test_below_the_floor_the_window_is_the_floor_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    floor, clock = largest_window(1, SNAPSHOT, LEFT), ManualClock()
    store = bucket(clock, replicas=3, m=3, steps=1000)
    seats = seated(store, clock, floor // 2, monkeypatch)
    assert floor // 2 < take_steps(seats, store, 20) <= floor
    said = [fields["text"] for seat in seats for fields in seat.events("warning")]
    assert said and all(
        "even with a snapshot at every step" in text and 'outer.codec = "int8"' in text for text in said
    )


@pytest.mark.parametrize("keep", [None, 0])
def test_without_a_budget_snapshots_come_as_the_rules_say(keep: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    store = bucket(clock, replicas=3, m=3, steps=1000)
    take_steps(seated(store, clock, keep, monkeypatch), store, 20)  # type: ignore[arg-type]
    assert snapshots.steps_of(store.list(layout.SNAPSHOTS)) == [0]


def test_a_state_that_cannot_be_seen_into_has_no_snapshots_to_bring_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VectorState, "arrays", lambda self, fragment: {})
    clock = ManualClock()
    store = bucket(clock, replicas=3, m=3, steps=1000)
    take_steps(seated(store, clock, 1, monkeypatch), store, 10)
    assert snapshots.steps_of(store.list(layout.SNAPSHOTS)) == [0]


def test_a_planned_snapshot_whose_writer_died_is_begun_again_and_the_window_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blob of snapshot 5 does not reach the store, and the next closers find nothing there."""
    budget, clock = largest_window(5, SNAPSHOT, LEFT), ManualClock()
    store = bucket(clock, replicas=3, m=3, steps=1000)
    seats = seated(store, clock, budget, monkeypatch)
    monkeypatch.setattr(seats[1].rv._snapshots.writer, "start", lambda *a, **n: None)
    take_steps(seats[:], store, 20)
    made = snapshots.steps_of(store.list(layout.SNAPSHOTS))
    assert 5 not in made and 7 in made and max(b - a for a, b in pairwise(made)) <= 7
    assert blob_bytes(store.inner) <= budget
