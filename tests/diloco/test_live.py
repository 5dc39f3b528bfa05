"""A live view's reading: a picture at once, then all of it, then at most a request per second, for any fleet."""

import pytest

from diloco.run.record import Run, RunRecord
from diloco.runlog.opening import View
from diloco.runlog.reader import FORGET_EVERY, Reader, read_report
from diloco.runlog.scope import EVERYTHING, STATUS, Focus, watch_scope
from diloco.views.live import KEPT_STEPS, LiveReader
from diloco.views.overview import overview
from diloco.views.pace import BURST_S, LOOK_S, RATE, AskedSoFar, next_focus
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.errors import StoreUnclear
from rendezvous.records.records import Beat
from rendezvous.stores.cache import Cache
from tests.diloco.test_report import T0, FixedClock, killed_and_replaced
from tests.support.fakes import Fault, FaultyStore
from tests.support.long_run import LongRun, long_run

STEP_S = 43.2


class FarStore(FaultyStore):
    """A store that says it is a bucket."""

    cheap = False


def live_on(run: LongRun, faults: list[Fault] | None = None) -> tuple[LiveReader, FarStore, FixedClock]:
    store = FarStore(run.store, faults or [])
    store.url = "s3://bucket/run"
    clock = FixedClock(T0 + run.step_s * len([k for k in run.store.list("steps/") if k.endswith("commit.json")]) + 5)
    record = RunRecord.decode(run.store.get(layout.RUN) or b"")
    return LiveReader(View(Run(store.url, store, record), None), clock), store, clock


@pytest.fixture(scope="module")
def fleet() -> LongRun:
    """300 outer steps of 32 replicas.  Read only."""
    return long_run(300, 32, STEP_S)


def test_the_first_picture_takes_a_few_hundred_requests_and_has_the_header_and_every_session(fleet) -> None:
    live, store, clock = live_on(fleet)
    seen = overview(live.glance(), clock.wall(), read_at=live.read_at)
    assert len(store.calls) < 450 and not live.is_whole
    assert (seen.state, seen.step, seen.steps) == ("running", 300, 301)
    assert seen.step_s == pytest.approx(STEP_S) and seen.eta_s == pytest.approx(STEP_S - 5)
    assert len(seen.rows) == 33 and {row.phase for row in seen.rows if row.is_live} == {"train"}
    assert seen.series[0].points[-1] == (299, pytest.approx(0.1 + 0.0008 * 299))


def test_the_second_look_has_every_commit_and_a_curve_over_the_whole_run(fleet) -> None:
    live, store, _ = live_on(fleet)
    live.glance()
    store.calls.clear()
    report = live.look()
    assert report is not None and live.is_whole and len(report.steps) == 300
    reward = overview(report, T0).series[0]
    assert reward.points[0][0] == 0 and reward.points[-1][0] == 299 and len(reward.points) >= 48 + 20
    offers = [key for _, key in store.calls if "/offer/" in key]
    assert len(offers) < 32 * 26 + 4 * 60, "of older steps a few replicas' offers stand for all"


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [4, 32, 64])
def test_afterwards_no_more_than_a_request_per_second_is_made(replicas) -> None:
    """Ten minutes of a fleet that goes on: it beats, commits, logs."""
    run = long_run(40, replicas, STEP_S)
    live, store, clock = live_on(run)
    live.glance()
    live.look()
    store.calls.clear()
    began, report = clock.at, None
    for second in range(0, 600, int(LOOK_S)):
        clock.at = began + second
        if second % 45 == 40:
            run.step(40 + second // 45)
        run.beat(40 + second // 45, clock.wall() - 1)
        report = live.look() or report
    assert report is not None and len(report.steps) == 40 + 600 // 45
    assert len(store.calls) <= 600 * RATE + BURST_S * RATE
    oldest = clock.wall() - min(live.read_at.values())
    assert oldest < {4: 20.0, 32: 120.0, 64: 240.0}[replicas], "every beat has its turn"
    newest = overview(report, clock.wall()).series[0].points[-1]
    assert newest[0] == len(report.steps) - 1, "a few offers of each new step make a point"


def test_a_view_that_goes_on_for_days_keeps_the_events_of_the_newest_steps_alone() -> None:
    run = long_run(3, 2, STEP_S)
    live, store, clock = live_on(run)
    store.cheap = True  # type: ignore[misc]
    live = LiveReader(live._view, clock)
    live.glance()
    live.look()
    for t in range(3, 3 + 2 * KEPT_STEPS):
        run.step(t)
        report = live.look()
    assert report is not None
    kept = {e["step"] for e in report.of_kind("step")}
    assert min(kept) >= report.head - KEPT_STEPS - FORGET_EVERY - 1 and report.steps[10].learned["r00"]["loss"] > 0
    assert report.of_kind("launched"), "what is not a step stays"


def test_what_comes_after_the_first_looks_is_not_kept_in_memory(tmp_path) -> None:
    run = long_run(20, 2, STEP_S)
    live, _, clock = live_on(run)
    cache = Cache(tmp_path / "cache")
    live = LiveReader(View(live._view.run, cache), clock)
    live.glance()
    live.look()
    before = len(cache.keys("commit"))
    for t in range(20, 40):
        run.step(t)
        clock.at += STEP_S
        live.look()
    assert before == len(cache.keys("commit")) == 20 and live._reader is not None and live._reader.ahead.cache is None
    assert len(Cache(tmp_path / "cache").keys("commit")) == 20, "the first looks are on disk for the next start"


# -------------------------------------------------------------------- what a look is about


def test_what_is_most_overdue_goes_first_and_a_spent_budget_waits() -> None:
    report = read_report(long_run(5, 3).store)
    now = T0 + 1000.0
    beats = {slot: Beat(slot, 1 if slot != "r01" else 2, 1, "train", 5, 1, 0.0, now - 2) for slot in report.beats}
    report.beats = beats
    at = {("beat", slot): now - 2 for slot in beats} | {("control", ""): now - 5, ("supervisor", ""): now - 1}
    steps = dict.fromkeys(beats, 5)
    assert next_focus(report, AskedSoFar(at, steps), now=now, budget=0.5) is None
    quiet = next_focus(report, AskedSoFar(at, steps), now=now, budget=50)
    assert quiet == Focus(False, False, frozenset(), frozenset(), frozenset(), 4)
    report.steps[-1].at = now - 2
    report.beats = {**beats, "r00": Beat("r00", 1, 1, "train", 5, 1, 0.0, now - 7200)}
    assert next_focus(report, AskedSoFar(at, steps), now=now, budget=50) == quiet, "a clock that is behind"
    report.beats = beats
    at[("beat", "r02")] = now - 30
    assert next_focus(report, AskedSoFar(at, steps), now=now, budget=2) == Focus(
        False, False, frozenset({"r02"}), frozenset(), frozenset(), 4
    )
    found = next_focus(report, AskedSoFar(at, {**steps, "r00": 4}), now=now, budget=50)
    assert found is not None and found.logs == {"r00"}, "its beat is a step further than its log"
    beats["r00"] = Beat("r00", 2, 1, "boot", 0, 0, 0.0, now)
    found = next_focus(report, AskedSoFar(at, steps), now=now, budget=50)
    assert found is not None and found.sessions == {"r00"}, "somebody new beats there"


def test_a_focus_asks_for_its_part_alone() -> None:
    run = long_run(30, 8)
    store = FarStore(run.store)
    reader = Reader(store, STATUS)
    reader.refresh()
    store.calls.clear()
    reader.refresh(Focus(False, False, frozenset({"r02", "r03"}), frozenset(), frozenset({"r04"}), 4))
    keys = {key for _, key in store.calls}
    assert keys == {layout.commit_key(30), layout.beat_key("r02"), layout.beat_key("r03"), layout.log_key("r04", 1, 31)}


def test_a_reader_in_turns_sees_in_the_end_what_one_look_sees() -> None:
    run = LongRun(40, 3)
    reader = Reader(run.store, EVERYTHING)
    slots = frozenset(run.slots)
    for t in range(40):
        run.step(t)
        if t == 20:
            run.lose("r01", 30.0 * (t + 1) + 1)
        some = frozenset({run.slots[t % 3]})
        reader.refresh(Focus(t % 4 == 0, t % 5 == 0, some, some, frozenset(), None))
    run.beat(40, T0 + 1300)
    assert reader.refresh(Focus(True, True, slots, slots, frozenset(), None)) == read_report(run.store)


def test_small_runs_are_read_whole_and_large_ones_in_samples() -> None:
    assert watch_scope(12, 3).newest == 1500 and watch_scope(12, 3).spread == 0
    assert watch_scope(1000, 32).newest == 24 and watch_scope(1000, 32).spread == 48
    b = killed_and_replaced()
    assert read_report(b.store, watch_scope(6, 2)) == read_report(b.store)


# -------------------------------------------------------------------- a bucket that fails


@pytest.mark.parametrize("key", [layout.commit_key(40), layout.offer_key(40, "r01", 0), layout.beat_key("r02")])
def test_a_look_that_fails_loses_nothing(key) -> None:
    run = long_run(40, 4, STEP_S)
    live, store, clock = live_on(run)
    live.glance()
    live.look()
    run.step(40)
    store.faults += [Fault("get", key, error=StoreUnclear("503 SlowDown")) for _ in range(2)]
    errors, report = 0, None
    for _ in range(40):
        clock.at += LOOK_S
        try:
            report = live.look() or report
        except StoreUnclear:
            errors += 1
    assert errors >= 1 and report is not None and report.head == 41
    whole = read_report(run.store)
    assert [len(s.commits) for s in report.sessions] == [len(s.commits) for s in whole.sessions]
    assert report.twice == 0 and report.steps[40].reward


def test_a_first_look_that_fails_is_begun_again() -> None:
    run = long_run(40, 4, STEP_S)
    live, store, _ = live_on(run, [])
    live.glance()
    store.faults.append(Fault("get", layout.commit_key(7), error=StoreUnclear("503 SlowDown")))
    with pytest.raises(StoreUnclear):
        live.look()
    report = live.look()
    assert report is not None and report.head == 40 and live.is_whole


def test_a_new_replica_is_found_by_the_desired_state() -> None:
    run = long_run(20, 2, STEP_S)
    live, _, clock = live_on(run)
    live.glance()
    live.look()
    write_control(run.store, run.clock, replicas=3)
    run.take("r02", 1, 900.0)
    report = None
    for _ in range(40):
        clock.at += LOOK_S
        report = live.look() or report
    assert report is not None and "r02-1" in {s.name for s in report.sessions}
