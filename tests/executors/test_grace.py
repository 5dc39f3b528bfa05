"""How long a replica may take to leave, and what is said of one that could not."""

import signal
import time
from dataclasses import replace

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import Report, read_report
from executors.platforms.base import State
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.supervision import lease, shutdown, supervisor
from executors.supervision.grace import EVALUATION_S, FINISH_S, GRACE_S, finish_s, leave_s, lost_work
from executors.supervision.shutdown import stop_run
from executors.supervision.slots.plan import Cancel, Desired, Drain, Observation, plan
from executors.supervision.slots.slot_state import SlotState
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import Leaving, StoreUnclear
from rendezvous.records.records import Beat
from tests.executors.test_supervisor import QUICK, Numbers, Toy, executor, found, wait_for  # noqa: F401
from tests.support.fakes import ManualClock
from tests.support.world import World

HERE = __name__
STEP_S = 1.5


class SlowToy(Toy):
    """Its inner step lasts STEP_S, and it hears that it is to leave when that ends."""

    def step(self, state: Numbers) -> None:
        self.rv.members.status.rate = STEP_S
        time.sleep(STEP_S)
        super().step(state)


def slow_replica(argv: list[str]) -> int:
    return SlowToy(argv[0], argv[2]).live()


def deaf_replica(argv: list[str]) -> int:
    toy = Toy(argv[0], argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.rv.members.status.phase, toy.rv.members.status.inner, toy.rv.members.status.rate = "train", 3, 0.01
    time.sleep(600)
    return 1


def beat_of(phase: str = "train", step: int = 4, inner: int = 2, rate: float = 65.0) -> Beat:
    return Beat(slot="r00", generation=1, n=9, phase=phase, step=step, inner=inner, rate=rate, at=0.0)


@pytest.mark.parametrize(
    ("beat", "asked", "boundary", "seconds"),
    [
        (beat_of(), beat_of(), 1, 20 + 3 * 65),
        (beat_of(), beat_of(), 8, 20 + 8 * 65),  # the first inner step of a generation takes the time of all
        (beat_of(rate=0.0), beat_of(rate=0.0), 1, 20 + FINISH_S),  # its pace is not known yet
        (beat_of(inner=3), beat_of(), 1, 20 + 3 * 65 + FINISH_S),  # its inner step has ended: it uploads
        (beat_of("wait"), beat_of(), 1, 20),
        (beat_of("boot", rate=0.0), None, 1, 20),
    ],
)
def test_the_grace_follows_the_pace_of_the_inner_steps(beat, asked, boundary, seconds):
    assert leave_s(beat, asked, boundary, 20.0) == seconds


def test_on_a_slow_store_a_supervisor_gives_more_time(tmp_path, executor):  # noqa: F811
    """With 4 s per request, a replica that waited needed 50 to 75 s to hear the request and to leave, and had 20 s."""
    run = found(tmp_path, replicas=1, steps=50)
    vars(run.store)["request_s"] = 4.0
    looks = supervisor_of_toys(run, executor, "replica", lambda *_: None)
    report = replace(read_report(run.store), beats={"r00": beat_of("wait")})
    assert looks._grace_s(SlotState("r00", still_since=looks.clock.now()), report) > 75.0
    looks.slots.look(report, {})
    (seen,) = looks.slots.observed(report)
    assert seen.leave_s > 75.0


def test_the_last_evaluation_is_not_cut_short():
    """Before: killed after 300 s, and its prompts were in no report."""
    last = replace(beat_of(step=10), evaluates=True)
    assert finish_s(last, steps=10, usual=20.0) == EVALUATION_S
    noted = replace(last, evaluates=False, note="evaluates θ_10, says user code")
    assert finish_s(noted, steps=10, usual=20.0) == FINISH_S
    assert finish_s(replace(last, phase="left"), steps=10, usual=20.0) == 20.0


def test_the_work_that_a_kill_costs():
    assert lost_work(beat_of()) == "2 inner steps (130 s of work) and the one that it was in"
    assert lost_work(beat_of(inner=0)) == "the inner step that it was in (about 65 s of work)"
    assert lost_work(beat_of("wait")) == lost_work(beat_of("left")) == lost_work(None) == ""


def test_a_drained_replica_may_end_its_inner_step():
    late = Observation("r01", state=State.RUNNING, draining_s=70.0, leave_s=215.0)
    assert [type(a) for a in plan(Desired(frozenset()), [late], 0.0)] == [Drain]
    assert [type(a) for a in plan(Desired(frozenset()), [replace(late, draining_s=216.0)], 0.0)] == [Cancel]


def supervisor_of_toys(run, executor: LocalProcessExecutor, function: str, act) -> Supervisor:  # noqa: F811
    return Supervisor(run, executor, SystemClock(), entrypoint=f"{HERE}:{function}", limits=QUICK, each_tick=act)


def test_ctrl_c_in_a_long_inner_step_loses_nothing(tmp_path, executor, monkeypatch):  # noqa: F811
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    run = found(tmp_path, replicas=1, steps=50)

    def interrupt(looks: Supervisor, report: Report) -> None:
        if any(b.phase == "train" and b.rate for b in report.beats.values()):
            looks.leave()

    outcome = supervisor_of_toys(run, executor, "slow_replica", interrupt).supervise()
    assert outcome.code == exitcodes.LEFT and outcome.text.endswith("; nothing is lost")
    assert [x.how for x in read_report(run.store).sessions] == ["left"]


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_kill_lost_is_said(tmp_path, executor, monkeypatch, again):  # noqa: F811
    monkeypatch.setattr(supervisor, "GRACE_S", 600.0 if again else 0.1)
    run = found(tmp_path, replicas=1, steps=50)

    def interrupt(looks: Supervisor, report: Report) -> None:
        if any(b.phase == "train" and b.inner for b in report.beats.values()):
            looks.kill() if again else looks.leave()

    outcome = supervisor_of_toys(run, executor, "deaf_replica", interrupt).supervise()
    assert "r00 lost 3 inner steps (0 s of work) and the one that it was in" in outcome.text, outcome
    assert "nothing is lost" not in outcome.text
    (session,) = read_report(run.store).sessions
    assert session.how == "killed" and "3 inner steps" in session.why, session


def test_a_second_ctrl_c_kills_while_the_bucket_is_away(tmp_path, executor, monkeypatch):  # noqa: F811
    """Before: the store's error came before the only place that looked, and rented machines ran on."""
    looks = supervisor_of_toys(found(tmp_path, replicas=1, steps=50), executor, "replica", lambda *_: None)
    ended = list[float]()
    monkeypatch.setattr(looks.slots, "cancel", lambda states, grace_s: ended.append(grace_s))

    def away() -> None:
        raise StoreUnclear("no answer")

    monkeypatch.setattr(looks, "tick", away)
    looks.leave()
    assert looks._patient_tick() is None and ended == []
    looks.kill()
    assert looks._patient_tick() is None and ended == [0.0]


def test_a_slow_platform_costs_no_heartbeat(tmp_path, executor, monkeypatch):  # noqa: F811
    """Before: a poll of fifteen seconds was a silence, and another command took the lease."""
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    run = found(tmp_path, replicas=1, steps=50)
    beats = list[int]()
    ask = executor.poll

    def slow(handles):
        before = looks.lease.beats
        time.sleep(0.3)
        beats.append(looks.lease.beats - before)
        return ask(handles)

    monkeypatch.setattr(executor, "poll", slow)
    looks = supervisor_of_toys(run, executor, "replica", lambda looks, report: looks.leave() if beats else None)
    looks.supervise()
    assert max(beats) >= 3


def test_the_last_line_does_not_promise_a_run_that_is_gone(tmp_path, executor):  # noqa: F811
    run = found(tmp_path, replicas=1, steps=50)

    def interrupt(looks: Supervisor, report: Report) -> None:
        if report.beats:
            run.store.delete([layout.RUN])
            looks.leave()

    outcome = supervisor_of_toys(run, executor, "replica", interrupt).supervise()
    assert outcome.code == exitcodes.USER_ERROR and layout.RUN in outcome.text, outcome


def replica(argv: list[str]) -> int:
    return Toy(argv[0], argv[2]).live()


class UploadingToy(Toy):
    """Its inner step is short, and the upload of its offer lasts STEP_S."""

    def step(self, state: Numbers) -> None:
        self.rv.members.status.phase, self.rv.members.status.rate = "train", 0.01
        self.rv.members.status.inner += 1
        if self.rv.is_leaving:
            time.sleep(STEP_S)
            raise Leaving("asked to leave")
        time.sleep(0.05)


def uploading_replica(argv: list[str]) -> int:
    return UploadingToy(argv[0], argv[2]).live()


def stopped_while_it_trains(run, executor, entry):  # noqa: F811
    """Start one replica of toys under a supervisor that then leaves; -> what `diloco stop` found and said."""
    looks, said = supervisor_of_toys(run, executor, entry, lambda *_: None), list[str]()

    def trains() -> bool:
        looks.tick()
        return any(b.phase == "train" and b.rate for b in read_report(run.store).beats.values())

    wait_for(trains, "an inner step")
    looks.lease.beat("left")
    (end,) = stop_run(run.store, SystemClock(), None, said.append)
    return end, said


def test_stop_waits_for_an_upload_that_began_after_it_asked(tmp_path, executor, monkeypatch):  # noqa: F811
    """Before: the seconds were reckoned once, from the pace of inner steps, and the upload was cut off."""
    monkeypatch.setattr(shutdown, "GRACE_S", 0.3)
    end, said = stopped_while_it_trains(found(tmp_path, replicas=1, steps=50), executor, "uploading_replica")
    assert not end.live and "left at outer step" in end.text, (
        end,
        said,
    )  # it says 0.33 s, or five minutes if the upload has begun


@pytest.mark.slow
def test_stop_waits_for_a_long_inner_step(tmp_path, executor, monkeypatch):  # noqa: F811
    monkeypatch.setattr(shutdown, "GRACE_S", 0.1)
    end, said = stopped_while_it_trains(found(tmp_path, replicas=1, steps=50), executor, "slow_replica")
    assert not end.live and "left at outer step" in end.text and "within 4.6 s" in said[0], (end, said)


def test_a_clock_that_is_ahead_takes_no_time_from_replicas_that_beat(tmp_path):
    """`diloco stop` on a laptop two minutes ahead of the platform: each heartbeat looks old, and they change."""
    world = World(tmp_path).started()
    ahead = ManualClock(world.clock.at + 120.0)
    patience = shutdown.Patience(world.run.store, ahead, None)
    assert patience.seconds() == GRACE_S, "as if they were dead"
    world.pass_time(2, supervised=False)
    assert patience.seconds() > GRACE_S
