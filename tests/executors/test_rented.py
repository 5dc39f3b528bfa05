"""The supervisor on rented machines: a platform in memory, in virtual time (tests/support/cloud.py)."""

from dataclasses import replace

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR, read_report
from executors.cli.looking.status import status_table
from executors.platforms.base import State, Unavailable
from executors.platforms.places import Place
from executors.supervision.costs import END_S, LEASE_S
from executors.supervision.money.bills import costs
from executors.supervision.notices.messages import all_troubles, reward_waits, unserved
from executors.supervision.shutdown import stop_run
from executors.supervision.slots.launches import Launches
from executors.supervision.slots.slot_state import past
from rendezvous import layout
from rendezvous.agreement.membership import claim, launch_of, newest_claim, read_beat, read_control, write_control
from rendezvous.errors import Fenced, StoreFull, StoreUnclear
from tests.rendezvous.test_keeping import fill
from tests.support.cloud import CloudExecutor
from tests.support.world import Beating, World

pytestmark = pytest.mark.usefixtures("decoded_once")


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


# -------------------------------------------------------------------- one slot, one process


def test_a_spec_has_all_that_its_place_says(world):
    world.tick()
    spec = world.cloud.job("r01").spec
    assert (spec.gpu, spec.timeout_s, spec.secrets, spec.env) == (("H100",), 3600.0, ("s3-keys",), {"A": "b"})
    assert spec.argv == (world.run.url, "--slot", "r01")
    assert world.cloud.calls.count("launch") == 1  # both at once


def test_a_launch_that_waits_for_a_machine_is_left_alone_and_costs_nothing(world):
    world.tick()
    world.pass_time(4000)
    assert set(world.cloud.jobs) == {("r00", 1), ("r01", 1)} and world.usd() == 0.0
    world.cloud.begin("r00")
    world.pass_time(900)
    assert world.usd() == pytest.approx(1.0, rel=0.02)  # a quarter of an hour of one, at $4
    assert not world.told("lost", "replacing")


def test_a_long_wait_for_a_machine_is_shown_with_the_platforms_reason(world):
    """A Slurm job that is longer than its partition allows waits for ever: seen with slurmctld 22.05."""
    world.tick()
    waits = lambda: [t for t in status_table(world.report(), world.clock.wall()) if "waiting for a machine" in t]  # noqa: E731
    world.pass_time(10)
    assert waits()[0].startswith("  waiting for a machine: r00, r01 for ") and not world.told("queued")
    world.pass_time(60)
    assert [("why" in e, e["seconds"] >= 60) for e in world.told("queued")] == [(False, True)] * 2
    world.cloud.job("r01").reason = "PartitionTimeLimit"
    world.pass_time(60)
    first, second = waits()
    assert "machine: r00 for 2 min" in first and "machine: r01 for 2 min" in second
    assert second.endswith(" (PartitionTimeLimit)") and not first.endswith(")")
    world.cloud.job("r01").reason = ""
    world.pass_time(50)
    world.cloud.job("r01").reason = "PartitionTimeLimit"
    world.cloud.begin("r00")
    world.pass_time(50)
    assert len(waits()) == 1 and [e.get("why") for e in world.told("queued")] == [None, None, "PartitionTimeLimit"]


@pytest.mark.slow
def test_a_bill_that_waited_goes_on_when_another_supervisor_sees_it_run(world):
    world.tick()
    world.pass_time(80)
    world.supervisor.lease.beat("left")
    world.cloud.begin("r00")  # while no supervisor looks
    world.cloud.live(80, step=8.0)
    world.another()
    world.pass_time(904)
    ran = 4.0 * (80 + 904) / 3600  # since it claimed its slot
    assert world.usd() == pytest.approx(ran, rel=0.02)
    world.cloud.job("r00").state, world.cloud.job("r00").alive = State.PENDING, False  # preempted, and no machine
    world.another()
    world.pass_time(904)
    assert world.usd() == pytest.approx(ran, rel=0.03)  # what was spent stays spent


def test_a_platform_that_restarts_a_replica_keeps_its_slot(world):
    world.started()
    world.cloud.preempt("r00")
    world.pass_time(50)
    assert world.cloud.restart("r00", 1)
    world.pass_time(200)
    assert set(world.cloud.jobs) == {("r00", 1), ("r01", 1)}
    assert world.cloud.job("r00").cancels == 0 and world.cloud.job("r00").generation == 2


def test_after_the_grace_the_old_one_is_ended_first(world):
    world.started()
    world.cloud.preempt("r00")
    world.cloud.deaf = True
    world.pass_time(75)
    assert world.cloud.job("r00").cancels == 1 and ("r00", 2) not in world.cloud.jobs  # it says RUNNING
    world.cloud.end("r00", None, State.CANCELLED)
    world.pass_time(2)
    assert ("r00", 2) in world.cloud.jobs
    (lost,) = world.told("lost")
    assert (lost["slot"], lost["attempt"], lost["own_fault"]) == ("r00", 1, False)


def test_a_replica_that_does_not_end_is_fenced_and_cannot_come_back(world):
    world.started()
    world.cloud.preempt("r00")
    world.cloud.deaf = True
    world.pass_time(60 + 30 + 5)
    assert (fence := newest_claim(world.run.store, "r00")) is not None
    assert fence.host.startswith("supervisor/r00.")
    (second,) = [a for s, a in world.cloud.jobs if s == "r00" and a != 1]
    assert second == launch_of(fence.host, "r00")
    assert not world.cloud.restart("r00", 1)  # the platform tries, and its replica goes
    world.cloud.begin("r00")
    world.pass_time(5)
    assert world.cloud.running("r00") == [second]


def test_a_fenced_launch_is_cancelled_until_it_has_ended_and_the_run_waits_for_that(world):
    world.started()
    world.cloud.preempt("r00")
    world.cloud.deaf = True
    world.pass_time(200)
    world.another()  # it knows about the old one from the log alone
    cancels = world.cloud.jobs["r00", 1].cancels
    world.pass_time(70)
    assert world.cloud.jobs["r00", 1].cancels > cancels
    world.cloud.begin("r00")
    world.supervisor.leave()
    world.cloud.end("r01", exitcodes.LEFT)
    world.cloud.end("r00", exitcodes.LEFT)
    world.pass_time(60)
    assert world.outcome is None
    world.cloud.deaf = False
    world.pass_time(60)
    assert world.outcome is not None and world.outcome.code == exitcodes.LEFT
    assert all(j.state.ended for j in world.cloud.jobs.values())


def test_a_container_that_never_beats_is_replaced_after_its_time_to_boot(world):
    world.started()
    world.cloud.end("r00", None, State.LOST)
    world.pass_time(5)
    world.cloud.job("r00").state = State.RUNNING
    world.pass_time(100)
    assert world.cloud.job("r00").spec.attempt == 2 and not world.told("replacing")
    world.pass_time(40)
    assert world.cloud.job("r00").spec.attempt == 3 and world.cloud.running("r01") == [1]
    assert world.told("lost")[-1]["reason"] == "its supervisor ended it, because it sent no heartbeat"


@pytest.mark.slow
def test_a_job_that_its_platform_recovered_late_gets_its_time_to_boot_again(world):
    """Before: its last heartbeat was too old in the moment in which it ran again, and it was cancelled."""
    world.started()
    world.cloud.preempt("r00")
    world.cloud.job("r00").state = State.STARTING
    world.pass_time(80)  # longer than restart_grace_s
    world.cloud.job("r00").state = State.RUNNING
    world.pass_time(80)  # it loads its model; longer than restart_grace_s, shorter than boot_s
    assert world.cloud.job("r00").cancels == 0 and not world.told("replacing")
    assert world.cloud.restart("r00", 1)
    world.pass_time(10)
    world.cloud.preempt("r00")
    world.pass_time(75)
    assert len(world.told("replacing")) == 1, "it was silent again, after heartbeats"


# -------------------------------------------------------------------- platforms that do not answer


def test_what_a_platform_does_not_answer_changes_nothing(world):
    world.started()
    world.cloud.down = "503"
    world.pass_time(1000)  # their heartbeats move all the time
    assert world.outcome is None and set(world.cloud.jobs) == {("r00", 1), ("r01", 1)}
    world.cloud.end("r00", None, State.LOST)
    world.pass_time(20)
    assert ("r00", 2) not in world.cloud.jobs
    world.cloud.down = ""
    world.pass_time(5)
    assert ("r00", 2) in world.cloud.jobs


def test_a_platform_that_does_not_answer_at_the_start_is_waited_for(world):
    world.cloud.down = "503"
    world.pass_time(60)
    assert world.outcome is None and not world.cloud.jobs
    world.cloud.down = ""
    world.pass_time(2)
    assert len(world.cloud.jobs) == 2


def test_a_supervisor_that_begins_while_a_platform_is_away_waits_if_replicas_may_run(world):
    world.started()
    world.another()
    world.cloud.down = "503"
    world.pass_time(1000)  # shorter than the lease
    assert world.outcome is None
    world.cloud.down = ""
    world.pass_time(5)
    assert world.outcome is None and set(world.cloud.jobs) == {("r00", 1), ("r01", 1)} and not world.told("lost")


def test_a_supervisor_waits_for_its_store_as_long_as_replicas_wait_for_progress(world, monkeypatch):
    monkeypatch.setattr(world.supervisor, "tick", fails(StoreUnclear("503 SlowDown")))
    world.pass_time(560)
    assert world.outcome is None
    with pytest.raises(StoreUnclear):
        world.pass_time(80)


@pytest.mark.parametrize(
    ("error", "phase", "code"),
    [(StoreUnclear("503"), "starting", 75), (StoreFull("no space"), "left", 75), (RuntimeError("a defect"), "left", 1)],
)
def test_only_an_end_that_another_start_may_mend_leaves_the_supervisor_to_its_platform(
    world, monkeypatch, error, phase, code
):
    """A job of the Hub is started again if its supervisor did not say "left" (hosted.py)."""
    monkeypatch.setattr(world.supervisor, "tick", fails(error))
    monkeypatch.setattr("executors.supervision.supervisor.PATIENCE_S", 1.0)
    monkeypatch.setattr(type(world.run), "timing", replace(world.run.timing, give_up=1.0))
    with pytest.raises(type(error)):
        world.supervisor.supervise()
    beat = read_beat(world.run.store, SUPERVISOR)
    assert beat is not None and beat.phase == phase and [e["code"] for e in world.told("crashed")] == [code]


def fails(error):
    def tick():
        raise error

    return tick


def test_what_can_never_be_launched_ends_the_run_at_once(tmp_path):
    world = World(tmp_path, places=[Place("cloud", gpu=("TPU",)).to_dict()])
    world.tick()
    assert world.outcome is not None and world.outcome.code == exitcodes.USER_ERROR
    assert "no GPU" in world.outcome.text


# -------------------------------------------------------------------- supervisors come and go


def test_the_next_supervisor_takes_over_what_runs(world):
    world.started()
    world.another()
    world.pass_time(100)
    assert set(world.cloud.jobs) == {("r00", 1), ("r01", 1)} and len(world.told("launched")) == 2


def test_a_launch_that_nobody_wrote_down_is_found(world):
    world.tick()
    for key in [k for k in world.run.store.list(layout.LOGS) if "supervisor" in k]:
        world.run.store.delete([key])
    world.another()
    world.pass_time(5)
    assert len(world.cloud.jobs) == 2 and {e["slot"] for e in world.told("found")} == {"r00", "r01"}


def test_restarts_are_counted_across_supervisors(world):
    world.started()
    for attempt in (1, 2, 3):
        assert world.outcome is None and world.cloud.job("r00").spec.attempt == attempt
        world.cloud.begin("r00") if attempt > 1 else None
        world.cloud.end("r00", 1)
        world.another()  # the last one has not seen that end
        world.pass_time(20)
    assert world.outcome is not None and "failed 3 times in a row" in world.outcome.text
    world.pass_time(5)
    world.outcome = None
    world.another()  # a person has read that, and starts it again
    world.pass_time(20)
    assert world.cloud.job("r00").spec.attempt == 4


def test_the_pause_before_a_restart_outlives_the_supervisor(world):
    world.started()
    for code in (-9, -9, -9):
        world.cloud.end("r00", code, State.LOST)
        world.pass_time(10)
    attempt = world.cloud.job("r00").spec.attempt
    world.cloud.end("r00", -9, State.LOST)
    world.pass_time(1)
    world.another()
    world.pass_time(2)
    assert world.cloud.job("r00").spec.attempt == attempt  # 4 s after the fourth
    world.pass_time(3)
    assert world.cloud.job("r00").spec.attempt == attempt + 1


def test_a_replica_that_waits_for_failing_rewards_ends_no_run_and_starts_again(world):
    """Before: exit code 75 of the one that waited for a quorum ended the run; so did three ends by the reward."""
    world.started()
    fill(world.run.store, 1)
    world.pass_time(40)
    world.cloud.end("r00", exitcodes.NO_REWARD, State.FAILED)
    world.pass_time(2)
    world.cloud.end("r01", exitcodes.GAVE_UP, State.FAILED)
    world.pass_time(30)
    report = read_report(world.run.store)
    assert world.outcome is None and set(world.cloud.jobs) == {("r00", 1), ("r01", 1)}
    assert [(e["slot"], e["by_reward"], e["again_in_s"]) for e in report.of_kind("lost")] == [
        ("r00", True, 60.0), ("r01", True, 60.0)
    ]  # fmt: skip
    (line,) = [text for text in status_table(report, world.clock.wall()) if "the reward failed" in text]
    assert "r00 1 of 6 times in a row, again in 2" in line and "; those sessions cost $0.10" in line
    assert "cost" not in reward_waits(replace(report, events=world.told("lost")), world.clock.wall())[0]
    world.pass_time(40)
    assert {("r00", 2), ("r01", 2)} <= set(world.cloud.jobs)
    assert reward_waits(read_report(world.run.store), world.clock.wall()) == []


def test_a_reward_that_never_worked_in_this_run_gets_three_strikes(world):
    world.started()
    for attempt in (1, 2, 3):
        world.cloud.end("r00", exitcodes.NO_REWARD, State.FAILED)
        world.pass_time(4)
        if attempt < 3:
            world.cloud.begin("r00")
            world.pass_time(2)
    assert ("r00", 4) not in world.cloud.jobs and not any(e["by_reward"] for e in world.told("lost"))
    assert world.told("gave_up_on")[0]["why"].startswith("failed 3 times in a row (exit code 9")


def told(kind: str, attempt: int, at: float = 0.0, who: str = "supervisor-1", **more) -> dict:
    return {"who": who, "event": kind, "slot": "r00", "generation": 0, "at": at, "attempt": attempt, **more}


LOST = {"useful": False, "own_fault": True, "state": "FAILED", "exit_code": 1}
FIRST, SECOND = [told("launched", 1), told("lost", 1, **LOST)], [told("launched", 2), told("lost", 2, **LOST)]
USEFUL = told("lost", 2, **{**LOST, "useful": True})
PASTS = [
    # log                                     attempt, losses, failures, state
    ([told("launched", 1)], (1, 0, 0, None)),
    (FIRST, (1, 1, 1, State.FAILED)),
    (FIRST + SECOND, (2, 2, 2, State.FAILED)),
    ([*FIRST, told("launched", 2), USEFUL], (2, 1, 1, State.FAILED)),
    ([told("launched", 1), told("lost", 1, **{**LOST, "own_fault": False})], (1, 1, 0, State.FAILED)),
    ([*FIRST, told("launched", 2), told("ended", 2)], (2, 0, 0, None)),
    ([*FIRST, told("launched", 2), told("ended", 1)], (2, 1, 1, State.FAILED)),  # a stray
    ([*FIRST, told("gave_up_on", 0)], (1, 0, 0, None)),
    ([*FIRST, told("stopped", 0, code=4)], (1, 0, 0, None)),
    ([*FIRST, told("stopped", 0, code=3)], (1, 1, 1, State.FAILED)),  # another supervisor took over
    ([told("launched", 1), told("lost", 1, who="r00-1", **LOST)], (1, 0, 0, None)),  # no supervisor's word
    ([told("launched", 1), told("lost", 1)], (1, 1, 0, State.LOST)),  # of an older release
]


@pytest.mark.parametrize(("events", "expected"), PASTS)
def test_the_past_of_a_slot_from_the_log(events, expected):
    found = past(events)["r00"]
    assert (found.attempt, found.strikes.losses, found.strikes.failures, found.state) == expected


# -------------------------------------------------------------------- a night


@pytest.mark.parametrize("killed", [False, True])
def test_a_night_without_a_supervisor_costs_what_ran_and_leaves_the_budget(world, killed):
    """The lease ends the fleet.  Before: `resume` billed the whole night, and a budget ended the run for it."""
    write_control(world.run.store, world.clock, max_usd=20.0)
    world.started()
    if killed:
        world.pass_time(900, supervised=False)
        world.cloud.end("r00", None, State.LOST)
        world.cloud.end("r01", None, State.LOST)
    world.pass_time(12 * 3600, supervised=False)
    ran = sum(times[-1] - times[0] for times in world.cloud.beaten_at.values()) / 3600
    world.supervisor.lease.beat("left")
    world.another()
    world.tick()
    assert world.outcome is None and {("r00", 2), ("r01", 2)} <= set(world.cloud.jobs)
    world.pass_time(2)
    first = [b for b in world.costs().bills if b.attempt == 1]
    assert sum(b.usd for b in first) == pytest.approx(ran * 4.0, rel=0.05)
    assert world.outcome is None


# -------------------------------------------------------------------- a wanted slot is served, or it is said why not


def test_replicas_that_finished_alone_are_started_again_for_more_steps(world):
    """Before: an exit code 0 that no supervisor had counted was a DONE of the steps that are wanted now, in silence."""
    world.started()
    world.supervisor.lease.beat("left")
    fill(world.run.store, 6)
    for slot in ("r00", "r01"):
        world.cloud.finish(slot)
    write_control(world.run.store, world.clock, steps=8)
    world.another()
    world.pass_time(5)
    assert {("r00", 2), ("r01", 2)} <= set(world.cloud.jobs) and not world.told("lost")
    assert {e["why"] for e in world.told("launched")[-2:]} == {
        "it ended with exit code 0, and more outer steps are wanted"
    }


def test_a_replica_that_ends_as_the_run_does_is_not_started_again(world):
    """The report is read after the platform was asked, so it has the commit that the replica ended for."""
    world.started()
    ask = world.supervisor.slots.ask

    def ends_meanwhile(read):
        fill(world.run.store, 6)
        for slot in ("r00", "r01"):
            world.cloud.finish(slot)
        return ask(read)

    world.supervisor.slots.ask = ends_meanwhile
    world.tick()
    world.tick()
    assert world.outcome is not None and world.outcome.code == exitcodes.DONE
    assert set(world.cloud.jobs) == {("r00", 1), ("r01", 1)}


def test_a_slot_that_ends_well_again_and_again_before_the_run_is_given_up(world):
    """os._exit(0) in a reward.  Before: it was started ten times, in silence."""
    world.started()
    while world.outcome is None:
        world.cloud.finish("r00")
        world.pass_time(20)
    assert "failed 3 times in a row (it ended with exit code 0, and more outer steps are wanted)" in world.outcome.text


def test_a_job_that_somebody_else_cancelled_is_a_loss(world):
    """Before: CANCELLED for ever, and when all were, a supervisor that stood there at $0.00 and said nothing."""
    world.started()
    world.cloud.end("r00", None, State.CANCELLED)
    world.cloud.end("r01", exitcodes.LEFT, State.CANCELLED)
    world.pass_time(10)
    assert {("r00", 2), ("r01", 2)} <= set(world.cloud.jobs)
    assert [e["reason"] for e in world.told("lost")] == ["cancelled, and not by this run"] * 2
    world.cloud.begin("r00")
    world.another()
    world.cloud.end("r00", None, State.CANCELLED)  # and this end is seen by no earlier supervisor
    world.another()
    world.pass_time(10)
    assert ("r00", 3) in world.cloud.jobs


def test_a_wanted_slot_that_is_not_started_says_why(world):
    world.started()
    write_control(world.run.store, world.clock, max_usd=0.5)
    world.pass_time(3)
    world.cloud.price = 400.0
    world.supervisor._limit._prices.clear()
    world.cloud.end("r01", None, State.LOST)
    world.pass_time(100)
    assert not [t for t in status_table(world.report(), world.clock.wall()) if "neither running" in t]
    world.pass_time(40)
    (line,) = [t for t in status_table(world.report(), world.clock.wall()) if "neither running" in t]
    assert "r01 for 2 min" in line or "r01 for 1" in line
    assert "max_usd" in line
    assert [t.kind for t in all_troubles(world.report(), world.clock.wall()) if t.kind == "slot_unserved"]
    write_control(world.run.store, world.clock, max_usd=0.0)
    world.pass_time(5)
    assert not unserved(world.report(), world.clock.wall())


# -------------------------------------------------------------------- smaller and larger


def test_a_drained_slot_leaves_by_itself_first(world):
    world.started()
    write_control(world.run.store, world.clock, drain="r01")
    world.pass_time(5)
    job = world.cloud.job("r01")
    assert (job.state, job.code, job.cancels) == (State.FAILED, exitcodes.LEFT, 0)
    assert not world.told("lost") and [e["slot"] for e in world.told("ended")] == ["r01"]
    world.pass_time(60)
    assert ("r01", 2) not in world.cloud.jobs


def test_a_drained_slot_that_does_not_go_is_ended(world):
    world.started()
    world.cloud.job("r01").deaf = True
    write_control(world.run.store, world.clock, drain="r01")
    world.pass_time(15)
    assert world.cloud.job("r01").cancels == 0
    world.pass_time(10)
    assert world.cloud.job("r01").state is State.CANCELLED


def test_a_slot_that_waits_for_its_machine_is_drained_at_once(world):
    world.tick()
    write_control(world.run.store, world.clock, replicas=1)
    world.pass_time(2)
    assert world.cloud.job("r01").state is State.CANCELLED and world.cloud.job("r00").state is State.PENDING


def test_it_shrinks_and_grows_again(world):
    world.started()
    write_control(world.run.store, world.clock, replicas=1)
    world.pass_time(10)
    write_control(world.run.store, world.clock, replicas=3)
    world.pass_time(5)
    assert {s: world.cloud.job(s).spec.attempt for s in ("r00", "r01", "r02")} == {"r00": 1, "r01": 2, "r02": 1}


def test_a_wish_that_was_taken_back_costs_nobody_its_place(world):
    world.started()
    world.cloud.job("r01").deaf = True  # it has not heard of it
    write_control(world.run.store, world.clock, drain="r01")
    world.pass_time(10)
    write_control(world.run.store, world.clock, replicas=2)
    world.pass_time(50)
    assert world.cloud.job("r01").cancels == 0 and world.cloud.running("r01") == [1]
    write_control(world.run.store, world.clock, drain="r01")
    world.pass_time(10)
    assert world.cloud.job("r01").cancels == 0  # it has its whole time again


def test_ctrl_c_reaches_rented_machines_and_the_run_goes_on_later(world):
    world.started()
    world.supervisor.leave()
    world.pass_time(5)
    assert world.outcome is not None and world.outcome.code == exitcodes.LEFT
    assert [j.cancels for j in world.cloud.jobs.values()] == [1, 1]
    world.outcome = None
    world.another()
    world.pass_time(5)
    assert world.cloud.job("r00").spec.attempt == 2


# -------------------------------------------------------------------- money


def test_a_launch_that_the_budget_does_not_allow_is_refused(tmp_path):
    world = World(tmp_path, max_usd=0.1)
    world.tick()
    assert not world.cloud.jobs and world.outcome is not None and world.outcome.code == exitcodes.USER_ERROR
    assert "max_usd = 0.1" in world.outcome.text


def test_an_unknown_price_is_refused_unless_told_so(tmp_path):
    world = World(tmp_path)
    world.cloud.price = None
    world.tick()
    assert not world.cloud.jobs and world.outcome is not None and "--allow-unknown-price" in world.outcome.text
    world.outcome = None
    write_control(world.run.store, world.clock, allow_unknown_price=True)
    world.another()
    world.tick()
    assert len(world.cloud.jobs) == 2


def test_the_run_ends_before_its_budget_is_passed(tmp_path):
    world = World(tmp_path, max_usd=2.0)
    world.started()
    world.pass_time(1000)
    assert world.outcome is not None and world.outcome.code == exitcodes.LEFT and "max_usd = 2" in world.outcome.text
    assert 1.5 < world.usd() <= 2.0
    assert all(j.code == exitcodes.LEFT and j.cancels == 0 for j in world.cloud.jobs.values())  # by themselves


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("seconds", "overwritten"),  # a bill of one lease, and of several; each with the other way is slow
    [
        (100, True),
        (1700, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((100, False), (1700, True))),
    ],
)
def test_a_removed_supervisor_log_gives_no_money_back(tmp_path, seconds, overwritten):
    world = World(tmp_path, max_usd=10.0)
    world.started()
    world.pass_time(seconds)
    before = world.usd()
    logs = [key for key in world.run.store.list(layout.LOGS) if "supervisor" in key]
    for key in logs:
        world.run.store.put(key, b"nothing\n") if overwritten else world.run.store.delete([key])
    assert before <= world.usd() <= before + 2.0, "that lease and no more"
    beats = sum(job.beats for job in world.cloud.jobs.values())
    world.another()
    world.pass_time(7200)
    assert world.outcome is not None and "max_usd = 10" in world.outcome.text
    later = (sum(job.beats for job in world.cloud.jobs.values()) - beats) * 8.0 / 3600 * 4.0  # what the cloud bills
    assert 7.0 < before + later <= 10.0


def test_boxes_after_a_lost_log_hide_no_bill_from_the_budget(tmp_path):
    world = World(tmp_path, max_usd=14.0)
    world.started()
    world.cloud.box_usd["r00"] = 2.0
    world.pass_time(1700)
    before, record = world.costs(), read_control(world.run.store).spent
    assert 0.0 < record.usd <= before.usd - 2.0 < 4.5, "of launches alone"
    world.run.store.delete([key for key in world.run.store.list(layout.LOGS) if "supervisor" in key])
    world.another()
    for boxes in (4.0, 6.0, 8.0):
        world.cloud.box_usd["r00"] = boxes
        world.pass_time(100)
        assert world.usd() >= before.usd - 2.0 + boxes
    world.cloud.box_usd["r00"] = 11.0
    world.pass_time(100)
    assert world.outcome is not None and "max_usd = 14" in world.outcome.text


def test_max_hours_ends_it_too_even_where_nothing_costs(tmp_path):
    world = World(tmp_path, max_hours=0.5)
    world.cloud.price = 0.0
    world.started()
    world.pass_time(1700)
    assert world.outcome is None
    world.pass_time(100)
    assert world.outcome is not None and "max_hours = 0.5" in world.outcome.text


def test_more_money_lets_it_go_on(tmp_path):
    world = World(tmp_path, max_usd=2.0)
    world.started()
    world.pass_time(1200)
    world.outcome = None
    write_control(world.run.store, world.clock, max_usd=4.0)
    world.another()
    world.pass_time(3)
    assert world.cloud.job("r00").spec.attempt == 2 and world.outcome is None
    assert read_control(world.run.store).until > world.clock.wall()


def test_the_lease_is_renewed_while_somebody_looks_and_ends_the_fleet_when_nobody_does(tmp_path):
    world = World(tmp_path, max_usd=100.0)
    world.started()
    world.pass_time(2 * LEASE_S)
    assert len(world.cloud.running("r00") + world.cloud.running("r01")) == 2
    assert len(world.run.store.list("control/")) < 10  # not at every look
    world.pass_time(LEASE_S + 8, supervised=False)  # supervisor and laptop are gone
    assert all(j.code == exitcodes.LEFT for j in world.cloud.jobs.values())


def test_a_lease_never_reaches_beyond_the_money(tmp_path):
    world = World(tmp_path, max_usd=2.0)
    world.started()
    world.pass_time(10)
    world.pass_time(2000, supervised=False)
    report = read_report(world.run.store)
    assert costs(report, world.clock.wall()).usd <= 2.0
    assert read_control(world.run.store).until <= world.clock.wall() + 900 - END_S


@pytest.mark.slow
def test_waiting_for_machines_writes_few_records(tmp_path):
    world = World(tmp_path, max_usd=1.0)
    world.tick()
    world.pass_time(4000)
    assert world.outcome is None and len(world.run.store.list("control/")) < 40


@pytest.mark.slow
def test_a_rented_fleet_has_a_lease_without_a_budget_too(world):
    """No supervisor looks after it any more: it bills no longer than half an hour."""
    world.tick()
    assert world.cloud.jobs and read_control(world.run.store).until > world.clock.wall(), "before anything can run"
    world.started()
    world.pass_time(2 * LEASE_S)
    assert len(world.cloud.running("r00") + world.cloud.running("r01")) == 2
    world.pass_time(LEASE_S + 8, supervised=False)
    assert all(j.code == exitcodes.LEFT for j in world.cloud.jobs.values())


def test_no_lease_lets_a_rented_fleet_go_on(tmp_path):
    world = World(tmp_path, places=[Place("cloud", gpu=("H100",), lease=False).to_dict()])
    world.started()
    world.pass_time(100)
    assert read_control(world.run.store).until == 0.0
    world.pass_time(2 * LEASE_S, supervised=False)
    assert len(world.cloud.running("r00") + world.cloud.running("r01")) == 2


def test_what_costs_nothing_has_no_lease(tmp_path):
    world = World(tmp_path)
    world.cloud.price = 0.0
    world.started()
    world.pass_time(100)
    assert read_control(world.run.store).until == 0.0


def test_rented_gpus_are_not_launched_before_the_model_is_there(tmp_path):
    world = World(tmp_path, places=[Place("modal", gpu=("H100",)).to_dict()])
    world.run.store.delete([layout.MODEL_MANIFEST])
    world.tick()
    assert {slot for slot, _ in world.cloud.jobs} == {"publish"}
    world.pass_time(20)
    assert {slot for slot, _ in world.cloud.jobs} == {"publish"}
    world.run.store.put(layout.MODEL_MANIFEST, b"{}")
    world.cloud.begin("publish")
    world.cloud.end("publish", 0, State.SUCCEEDED)
    world.pass_time(3)
    assert {slot for slot, _ in world.cloud.jobs} == {"publish", "r00", "r01"}


def test_after_a_stop_no_publisher_is_started_again(tmp_path):
    world = World(tmp_path)
    world.run.store.delete([layout.MODEL_MANIFEST])
    world.tick()
    world.cloud.begin("publish")
    write_control(world.run.store, world.clock, stop=True)
    world.pass_time(2)
    world.cloud.end("publish", None, State.LOST)
    world.pass_time(20)
    assert ("publish", 2) not in world.cloud.jobs
    assert world.outcome is not None and world.outcome.code == exitcodes.LEFT


def test_no_launch_follows_when_less_than_a_boot_is_affordable(tmp_path):
    """At $4 an hour the last dollar is 15 minutes of one; of a new one 5 are its boot."""
    world = World(tmp_path, max_usd=2.0)
    world.started()
    world.pass_time(780)  # $1.74 of $2
    world.cloud.end("r00", None, State.LOST)
    world.pass_time(120)
    assert set(world.cloud.jobs) == {("r00", 1), ("r01", 1)}, "it would be billed, and end while it boots"
    assert any("until it has booted" in e["text"] for e in world.told("refused"))


# -------------------------------------------------------------------- stop


def test_a_stop_that_was_taken_back_leaves_the_next_one_its_grace(world):
    """Before: the grace was counted from the first stop, so a second one cancelled all in its first moment."""
    world.started()
    for slot in ("r00", "r01"):
        world.cloud.job(slot).deaf = True
    write_control(world.run.store, world.clock, stop=True)
    world.pass_time(2)
    write_control(world.run.store, world.clock, resume=True)
    world.pass_time(100)
    write_control(world.run.store, world.clock, stop=True)
    world.pass_time(5)
    assert [job.cancels for job in world.cloud.jobs.values()] == [0, 0] and world.outcome is None


def test_stop_asks_the_store_that_it_was_given_for_claims(world, monkeypatch):
    """`diloco stop` gives a patient one.  Before, each look opened another, and its first 503 was the end of it."""
    world.started()
    world.supervisor.lease.beat("left")
    monkeypatch.setattr("executors.platforms.on_host.executor.open_signed", lambda url: pytest.fail("another store"))
    ends = stop_run(world.run.store, Beating(world), 10.0, lambda text: None, CloudExecutor(world.cloud))
    assert [end.live for end in ends] == [False, False]


@pytest.mark.parametrize("ask", ["find", "orphans"])
def test_stop_goes_on_without_a_platform_or_its_claims(world, monkeypatch, ask):
    world.started()
    error = StoreUnclear("503 SlowDown") if ask == "find" else Unavailable("no list of prices")
    monkeypatch.setattr(CloudExecutor, ask, lambda self, *_: fails(error)())
    launches = Launches(world.run.store, CloudExecutor(world.cloud))
    assert launches.out_of_reach == str(error) and len(launches.there) == 2


def test_stop_ends_everything_on_the_platform_and_says_so(world):
    world.started()
    world.cloud.job("r01").deaf = True
    said: list[str] = []
    world.supervisor.lease.beat("left")
    clock = Beating(world)
    ends = stop_run(world.run.store, clock, 10.0, said.append, CloudExecutor(world.cloud))
    assert {e.name: e.live for e in ends} == {"r00-1": False, "r01-1": False}
    assert world.cloud.job("r00").code == exitcodes.LEFT and world.cloud.job("r01").state is State.CANCELLED
    assert any("r01: job-r01.1 on cloud was still there after 10 s; it is cancelled now" in text for text in said)
    usd = world.usd()
    world.clock.sleep(3600)
    assert world.usd() == usd  # its bills are closed


@pytest.mark.parametrize("silent", [False, True], ids=["cancels are not heard", "it does not answer"])
def test_stop_does_not_say_that_nothing_lives_while_machines_of_it_do(world, silent):
    """They have begun, and no replica has claimed a slot yet.  Before: "none of them runs" beside two live ones."""
    world.pass_time(2)
    world.cloud.deaf = True
    world.cloud.down = "503" if silent else ""
    world.supervisor.lease.beat("left")
    said: list[str] = []
    ends = stop_run(world.run.store, Beating(world), 1.0, said.append, CloudExecutor(world.cloud))
    assert any(e.live for e in ends), ends
    assert not [e.text for e in ends if "none of them runs" in e.text]
    assert not [text for text in said if text.endswith("; cancelled")], "it was asked for, and not confirmed"


def test_stop_does_not_say_that_all_is_over_when_it_is_not(world):
    world.started()
    world.cloud.deaf = True
    world.cloud.job("r01").deaf = True
    world.supervisor.lease.beat("left")
    ends = stop_run(world.run.store, Beating(world), 5.0, lambda text: None, CloudExecutor(world.cloud))
    assert [e.name for e in ends if e.live] == ["r01-1", "r01.1"]


def test_stop_says_which_platform_it_could_not_ask(world):
    world.started()
    world.supervisor.lease.beat("left")
    world.cloud.down = "no credentials"
    ends = stop_run(world.run.store, Beating(world), 5.0, lambda text: None, CloudExecutor(world.cloud))
    assert any(e.live and "no credentials" in e.text for e in ends)


def test_stop_reaches_launches_that_only_the_log_knows(world):
    world.started()
    world.cloud.preempt("r00")
    world.cloud.deaf = True
    world.pass_time(150)
    world.cloud.deaf = False
    world.supervisor.lease.beat("left")
    stop_run(world.run.store, Beating(world), 2.0, lambda text: None, CloudExecutor(world.cloud))
    assert all(j.state.ended for j in world.cloud.jobs.values()) and len(world.cloud.jobs) == 3


def test_stop_that_another_command_takes_back_ends_without_a_kill(world):
    """Before: `resume` from another terminal said yes, and `stop` killed the replicas minutes later."""

    class Resuming(Beating):
        def sleep(self, seconds: float) -> None:
            if read_control(world.run.store).stop:
                write_control(world.run.store, world.clock, resume=True)
            super().sleep(seconds)

    world.started()
    for slot in ("r00", "r01"):
        world.cloud.job(slot).deaf = True
    (end,) = stop_run(world.run.store, Resuming(world), 30.0, lambda text: None, CloudExecutor(world.cloud))
    assert end.live and "has let the run go on" in end.text
    assert [world.cloud.job(slot).cancels for slot in ("r00", "r01")] == [0, 0]


def test_stop_of_a_run_that_is_supervised_writes_each_end_once(world):
    """Before: its supervisor wrote the ends and "stopped", and then `diloco stop` wrote all of them again."""
    world.started()
    ends = stop_run(world.run.store, Supervising(world), 60.0, lambda text: None, CloudExecutor(world.cloud))
    assert not [e.name for e in ends if e.live] and world.outcome.code == exitcodes.LEFT
    assert sorted(e["slot"] for e in world.told("ended", "lost")) == ["r00", "r01"]
    assert len(world.told("stopped")) == 1


def test_a_later_launch_bars_an_earlier_one_but_a_restart_may_claim_again(world):
    store, clock = world.run.store, world.clock
    assert claim(store, clock, "r00", host="cloud/r00.2") == 1
    assert claim(store, clock, "r00", host="cloud/r00.2") == 2
    with pytest.raises(Fenced, match="later launch"):
        claim(store, clock, "r00", host="cloud/r00.1")
    assert claim(store, clock, "r00", host="laptop", pid=5) == 3
    assert claim(store, clock, "r01", host="cloud/r01.1") == 1
    assert [launch_of(h, "r00") for h in ("a/r00.3", "a/r01.3", "laptop", "host.12", "")] == [3, 0, 0, 0, 0]


class Supervising(Beating):
    """The supervisor lives as well, and says goodbye as `supervise` does."""

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.world.outcome is None:
            self.world.tick()
            if (outcome := self.world.outcome) is not None:
                self.world.supervisor.emit("stopped", code=outcome.code, text=outcome.text)
                self.world.supervisor.lease.beat("left")


@pytest.mark.parametrize("typed", ["memory://{}/run/", "memory://./{}/run"])
def test_a_run_has_one_name_at_the_platforms_however_its_url_was_typed(tmp_path, typed):
    """`stop` knows the store alone; jobs under another name would be none of its."""
    world = World(tmp_path)
    world.supervisor.lease.beat("left")
    world.run = replace(world.run, url=typed.format(tmp_path))
    world.another()
    world.started()
    assert {job.spec.run for job in world.cloud.jobs.values()} == {world.run.store.url}
    world.supervisor.lease.beat("left")
    ends = stop_run(world.run.store, Beating(world), 5.0, lambda text: None, CloudExecutor(world.cloud))
    assert {e.name for e in ends} == {"r00-1", "r01-1"} and not any(e.live for e in ends)
