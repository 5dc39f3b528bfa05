"""The numbers of a live view, from hand-written buckets."""

from dataclasses import replace

import pytest

from diloco.runlog.reader import SUPERVISOR, read_report
from diloco.runlog.sessions import end_words
from diloco.runlog.steps import Step
from diloco.runlog.summary import kept_words
from diloco.views.overview import LABELS, SessionRow, overview, samples_per_second, seconds_per_step
from executors.cli.looking.status import describe_supervisor, status_table
from rendezvous import layout
from rendezvous.agreement.membership import read_beat, write_control
from rendezvous.records.records import Beat
from tests.diloco.test_report import T0, Bucket, FixedClock, killed_and_replaced
from tests.support.long_run import STEP_S, long_run


def steps(*times: float) -> list[Step]:
    return [Step(t, at, "r00-1", ("r00",), (), True) for t, at in enumerate(times)]


def test_seconds_per_step_is_the_median_of_the_newest_intervals() -> None:
    assert seconds_per_step(steps(5.0)) is None
    assert seconds_per_step(steps(0.0, 10.0, 20.0, 500.0)) == 10.0
    assert seconds_per_step(steps(*range(0, 5000, 500), *range(5000, 5011))) == 1.0
    assert seconds_per_step(steps(10.0, 5.0)) == 0.0, "a clock that was set back is no negative pace"


def test_the_end_says_how_many_outer_steps_learned_nothing() -> None:
    run = Bucket(steps=3)
    for t in range(3):
        offers = [replace(run.offer(t, slot, 1, 0.2), zero=t > 0 or slot == "r00") for slot in ("r00", "r01")]
        run.commit(t, t + 1.0, offers)
    words = "all 3 outer steps are committed; 2 of them learned nothing, since all pseudogradients were zero"
    assert end_words(read_report(run.store)) == words
    assert end_words(read_report(killed_and_replaced().store)) == "all 6 outer steps are committed"


def test_samples_per_second_are_of_the_newest_step_that_lists_a_slot() -> None:
    found = steps(0.0, 10.0, 30.0)
    found[1].samples = {"r00": 100.0, "r01": 50.0}
    found[2].samples = {"r00": 100.0}
    assert samples_per_second(found) == {"r00": 5.0, "r01": 5.0}


def test_a_run_that_goes_on_has_an_eta_and_one_that_ended_has_none() -> None:
    run = long_run(40, 4)
    now = T0 + STEP_S * 40 + 10
    seen = overview(read_report(run.store), now)
    assert (seen.state, seen.step, seen.steps, seen.step_s, seen.open_s) == ("running", 40, 41, STEP_S, 10.0)
    assert seen.eta_s == pytest.approx(STEP_S - 10)
    write_control(run.store, run.clock, stop=True)
    seen = overview(read_report(run.store), now)
    assert seen.state == "stopped" and seen.eta_s is None
    done = overview(read_report(killed_and_replaced().store), T0 + 1e6)
    assert done.state == "done" and done.eta_s is None and done.elapsed_s == pytest.approx(16.9)


def test_a_run_in_which_nothing_happened_yet_has_rows_that_start() -> None:
    seen = overview(read_report(Bucket(replicas=2).store), T0 + 5)
    assert seen.state == "not begun" and seen.rows == (SessionRow("r00", 0), SessionRow("r01", 0))
    assert (seen.step, seen.step_s, seen.eta_s, seen.snapshot, seen.series) == (0, None, None, None, ())


def test_an_actor_that_you_started_under_a_name_has_no_neighbours_that_should_be_there() -> None:
    """`python -m diloco.actor RUN --name a03` alone: a00, a01 and a02 stood in `status` as not started for ever."""
    run = Bucket(replicas=1)
    write_control(run.store, run.clock, guest="a03")
    report = read_report(run.store)
    assert [row.slot for row in overview(report, T0 + 5).rows] == ["r00", "a03"][::-1]
    assert [line.split()[0] for line in status_table(report, T0 + 5)[2:4]] == ["r00", "a03"]
    write_control(run.store, run.clock, actors=2)
    assert [row.slot for row in overview(read_report(run.store), T0 + 5).rows] == ["a00", "a01", "a03", "r00"]


def test_a_row_says_where_what_how_far_and_how_it_ended() -> None:
    run = long_run(40, 2)
    rows = {row.name: row for row in overview(read_report(run.store), T0 + STEP_S * 40 + 4).rows}
    assert list(rows) == ["r00-1", "r01-1", "r01-2"]
    live = rows["r01-2"]
    assert (live.place, live.phase, live.step, live.inner, live.inner_steps) == ("modal", "train", 40, 3, 6)
    assert live.beat_age_s == pytest.approx(2.0) and live.is_live and live.is_newest
    dead = rows["r01-1"]
    assert dead.end == "lost" and "preempted" in dead.why and not dead.is_live and not dead.is_newest


def test_a_beat_that_was_old_when_it_was_read_is_silent_and_one_that_was_not_read_since_is_not() -> None:
    run, now = long_run(3, 2), T0 + 1000.0
    for slot, at in (("r00", now - 60), ("r01", now - 62)):
        run.store.put(layout.beat_key(slot), Beat(slot, 1, 9, "train", 3, 1, 1.0, at).encode())
    rows = {r.name: r for r in overview(read_report(run.store), now, read_at={"r00": now - 59}).rows}
    assert rows["r00-1"].phase == "train" and rows["r00-1"].beat_unread_s == pytest.approx(59)
    assert rows["r01-2"].phase == "starting", "the beat is of the session before"


def test_on_a_slow_store_a_live_replica_and_supervisor_are_not_silent() -> None:
    """With 4 s per request, `status` called replicas silent whose heartbeats were 24 s old."""
    run, now = long_run(3, 2), T0 + 1000.0
    run.store.put(layout.beat_key("r00"), Beat("r00", 1, 9, "train", 3, 1, 1.0, now - 24).encode())
    beat = Beat(SUPERVISOR, 1, 9, "watching", 0, 0, 0.0, now - 70)
    for request_s, phase, words in ((0.05, "silent", "! its supervisor"), (4.0, "train", "supervised by")):
        vars(run.store)["request_s"] = request_s
        report = read_report(run.store)
        assert overview(report, now).rows[0].phase == phase
        assert describe_supervisor(beat, FixedClock(now), report)[0].startswith(words)


def test_status_tells_why_a_supervisor_ended_and_not_all_of_a_replicas_last_lines() -> None:
    """The log's reader has no line breaks: eleven lines of a replica's progress stood before the reason."""
    b = killed_and_replaced()
    b.store.delete([layout.commit_key(5)])
    lines = ["r00: its bucket is wrong. Its last lines:", "    r00-1  outer step 4", "    r00: the store was emptied"]
    b.tell("supervisor", 1, 17.0, "stopped", code=2, text="\n".join(lines))
    words = describe_supervisor(read_beat(b.store, SUPERVISOR), FixedClock(), read_report(b.store))[0]
    assert words.endswith("ended with code 2: r00: its bucket is wrong. Its last line: r00: the store was emptied")


def test_curves_are_by_outer_step_and_of_what_was_measured() -> None:
    run = long_run(40, 2)
    series = {s.name: s for s in overview(read_report(run.store), T0).series}
    assert list(series) == ["reward", "loss", "kl", "entropy", "completion_length"] and set(series) < set(LABELS)
    assert series["reward"].points[10] == (10, pytest.approx(0.108)) and len(series["kl"].points) == 40


def test_the_snapshot_is_as_old_as_the_commit_before_it() -> None:
    report = read_report(long_run(40, 2).store)
    report.steps[-1].snapshot = 30
    seen = overview(report, T0 + STEP_S * 40)
    assert seen.snapshot == 30 and seen.snapshot_age_s == pytest.approx(STEP_S * 10)


def test_a_snapshot_that_its_writer_has_told_of_is_the_newest() -> None:
    """The commit after it names it, and of the last one there is no commit after it."""
    b = killed_and_replaced()
    b.tell("r00", 1, 17.0, "snapshot", step=6)
    b.tell("r00", 1, 17.1, "snapshot", step=9)  # beyond the run: no record vouches for a log
    report = read_report(b.store)
    assert report.snapshot == 6 and overview(report, T0 + 20).snapshot == 6


def test_a_run_that_lost_nothing_says_nothing_of_what_is_gone() -> None:
    b = killed_and_replaced()
    b.tell("r00", 1, 17.0, "collected", deltas_from=0, means_from=0, snapshots=[0, 4])
    assert kept_words(read_report(b.store)) == []
    b.tell("r00", 1, 18.0, "collected", deltas_from=3, means_from=0, snapshots=[0, 4])
    assert kept_words(read_report(b.store)) == ["pseudogradients before 3 are gone (fleet.keep = 0)"]


def test_a_run_whose_last_evaluation_goes_on_is_not_done() -> None:
    b, clock = killed_and_replaced(), FixedClock()
    now = clock.wall()
    beat = Beat("r00", 1, 9, "train", 6, 0, 1.0, now - 1, note="evaluates θ_6: 3 of 9 prompts")
    b.store.put(layout.beat_key("r00"), beat.encode())
    words = "all 6 outer steps are committed, but not all is done: r00 evaluates θ_6: 3 of 9 prompts"
    b.store.delete([layout.beat_key("r01")])
    assert describe_supervisor(read_beat(b.store, SUPERVISOR), clock, read_report(b.store))[0] == words
    b.store.put(layout.beat_key("r00"), replace(beat, phase="left").encode())
    assert describe_supervisor(read_beat(b.store, SUPERVISOR), clock, read_report(b.store))[0] == "done"
