"""Platforms that give no news (supervision/outage.py): what is asked, what is said, what `status` shows meanwhile.

First in virtual time (support/cloud.py); then the same mechanism on every executor; last a token that is revoked in the
middle of a run, with the real client, against tests/support/hf_server.py.
"""

import sys
import time
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR, read_report
from executors.cli import main as cli
from executors.platforms.base import Handle, Refused, State, Status, Unavailable, unanswered
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.on_sky import SkyExecutor
from executors.platforms.on_slurm.executor import SlurmExecutor
from executors.platforms.places import Place, mixed_executor
from executors.supervision.notices.messages import message_lines
from executors.supervision.outage import Outages
from executors.supervision.silence import REPORT_S
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import read_beat
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreFull
from tests.executors.test_hf_jobs_run import URL, founded, hub, outputs, s3
from tests.support.cloud import CloudExecutor
from tests.support.fakes import ManualClock
from tests.support.world import World

__all__ = ["hub", "s3"]  # fixtures


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def silent(world: World) -> list[dict]:
    return world.told("platform_silent")


def note(world: World) -> str:
    """The note of the supervisor's beat."""
    beat = read_beat(world.run.store, SUPERVISOR)
    assert beat is not None
    return beat.note


def shown(world: World) -> list[str]:
    """The remarks of `diloco status`, now."""
    return message_lines(read_report(world.run.store), world.clock.wall())


# -------------------------------------------------------------------- in virtual time


@pytest.mark.slow
def test_a_refusal_is_told_at_once_and_then_once_a_minute_until_it_is_over(world):
    world.started()
    world.cloud.refused = "401: the token is not valid"
    world.pass_time(10)
    (first,) = silent(world)
    assert (first["platform"], first["refused"], first["slots"]) == ("cloud", True, ["r00.1", "r01.1"])
    assert any("cloud refuses us" in line and "401" in line for line in shown(world)), shown(world)
    assert "cloud refuses us" in note(world) and "r00.1, r01.1" in note(world)
    for _ in range(3):
        world.pass_time(99)
    assert len(silent(world)) == 6 and world.outcome is None
    world.cloud.refused = ""
    world.pass_time(20)
    (over,) = world.told("platform_answers")
    assert over["platform"] == "cloud" and over["seconds"] == pytest.approx(310, abs=20)
    assert not any("refuses" in line for line in shown(world)) and note(world) == ""


def test_a_lost_answer_is_told_only_after_a_minute(world):
    world.started()
    world.cloud.down = "503"
    world.pass_time(REPORT_S - 5)
    assert not silent(world)
    world.pass_time(10)
    (told,) = silent(world)
    assert not told["refused"] and told["text"] == "503" and told["seconds"] == pytest.approx(REPORT_S, abs=5)
    assert any("cloud gives no answer, for 6" in line for line in shown(world)), shown(world)


@pytest.mark.slow
def test_answers_that_are_lost_now_and_then_are_never_told(world):
    world.started()
    for _ in range(60):
        world.cloud.down = "503"
        world.pass_time(3)
        world.cloud.down = ""
        world.pass_time(5)
    assert not silent(world) and not world.told("platform_answers")


def test_a_platform_that_refuses_is_asked_ever_more_rarely(world):
    world.started()
    world.cloud.refused, world.cloud.calls[:] = "401", []
    world.pass_time(100)
    assert world.cloud.calls.count("poll") in range(7, 12), "100 ticks; after 1, 3, 7, 15, 30, 45 … s"


def test_what_was_lost_meanwhile_is_replaced_when_the_platform_answers_again(world):
    world.started()
    world.cloud.refused = "401"
    world.pass_time(20)
    world.cloud.end("r00", None, State.LOST)
    world.pass_time(40)
    assert ("r00", 2) not in world.cloud.jobs
    world.cloud.refused = ""
    world.pass_time(20)
    assert ("r00", 2) in world.cloud.jobs


def test_a_launch_that_is_refused_while_others_run_is_told_and_tried_again(world):
    world.started()
    world.cloud.no_launch = Refused("403: the token may not start jobs")
    world.cloud.calls[:] = []
    world.cloud.end("r00", None, State.LOST)
    world.pass_time(100)
    assert world.outcome is None and world.cloud.calls.count("launch") in range(6, 12)
    assert any("the platform refuses us" in x and "cannot start r00" in x and "403" in x for x in shown(world))
    world.cloud.no_launch = None
    world.pass_time(20)
    assert ("r00", 2) in world.cloud.jobs and not any("refuses" in line for line in shown(world))


def test_a_run_whose_last_replica_is_lost_while_its_token_is_refused_goes_on_afterwards(world):
    world.started()
    world.cloud.no_launch = Refused("401")
    for slot in ("r00", "r01"):
        world.cloud.end(slot, None, State.LOST)
    world.pass_time(300)
    assert world.outcome is None
    world.cloud.no_launch = None
    world.pass_time(20)
    assert {("r00", 2), ("r01", 2)} <= set(world.cloud.jobs)


def test_a_token_that_is_refused_before_anything_ran_ends_the_run_with_its_words(world):
    world.cloud.no_launch = Refused("401: the token is not valid")
    world.pass_time(3)
    assert world.outcome is not None and world.outcome.code == exitcodes.USER_ERROR
    assert "the token is not valid" in world.outcome.text


def test_one_silent_handle_among_others_is_an_outage_of_its_own():
    """Modal is asked call by call: one of them may stay without an answer."""
    clock, asked = ManualClock(), []
    handles = [Handle("s3://b/r", slot, 1, "modal", native=slot) for slot in ("r00", "r01")]

    class Executor(CloudExecutor):
        def __init__(self):
            pass

        def poll(self, handles):
            asked.append([h.slot for h in handles])
            found = [Status(h, State.RUNNING) for h in handles]
            return [unanswered(s, "no answer") if s.handle.slot == "r01" else s for s in found]

    outages, told = Outages(clock), []
    for _ in range(70):
        first, second = outages.poll(Executor(), handles)
        assert not first.stale and second.stale
        told += outages.news()
        clock.sleep(1.0)
    (event,) = told
    assert event["slots"] == ["r01.1"] and sum("r00" in x for x in asked) == 70 and sum("r01" in x for x in asked) < 25
    outages.poll(Executor(), handles[:1])
    assert [e["event"] for e in outages.news()] == ["platform_answers"], "nobody asks for r01 any more"


# -------------------------------------------------------------------- every executor tells it in the same way


def rented(executor: str) -> Handle:
    return Handle("s3://bucket/run", "r00", 1, executor, native="7", files="/nowhere")


def test_modal_tells_a_refusal_from_a_lost_answer(monkeypatch):
    import modal.exception

    monkeypatch.setattr("executors.platforms.on_modal.executor.Register.open", lambda name, create: None)
    for error, refused in [
        (modal.exception.AuthError("token revoked"), True),
        (modal.exception.PermissionDeniedError("not allowed"), True),
        (modal.exception.ServiceError("unavailable"), False),
        (ConnectionResetError("gone"), False),
    ]:
        monkeypatch.setattr("executors.platforms.on_modal.calls.sdk", lambda error=error: FailingModal(error))
        executor = ModalExecutor()
        (status,) = executor.poll([rented("modal")])
        executor.close()
        assert (status.stale, status.refused) == (True, refused), (error, status)
        assert str(error) in status.trouble


class FailingModal:
    """Modal's module, whose calls fail."""

    def __init__(self, error: Exception) -> None:
        import modal

        self.exception, self._error = modal.exception, error
        self.FunctionCall = self

    def from_id(self, _: str) -> "FailingModal":
        return self

    def get(self, timeout: float) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", False),
        ("slurm_load_jobs error: Protocol authentication error", True),
        ("squeue: error: Invalid user or permission denied", True),
    ],
)
def test_slurm_tells_a_refusal_from_a_lost_answer(tmp_path, monkeypatch, said, refused):
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!{sys.executable}\nimport sys\nsys.exit({said!r})\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (status,) = SlurmExecutor(folder=tmp_path).poll([rented("slurm")])
    assert (status.stale, status.refused) == (True, refused) and said.split(": ")[-1] in status.trouble


def test_skypilot_tells_why_it_gives_no_news(monkeypatch):
    def jobs(ids=None):
        raise Unavailable("SkyPilot does not answer: its API server is gone")

    monkeypatch.setattr("executors.platforms.on_sky._list_jobs", jobs)
    (status,) = SkyExecutor().poll([rented("sky")])
    assert (status.stale, status.refused) == (True, False) and "API server is gone" in status.trouble


def test_a_platform_that_is_no_place_of_the_run_any_more_is_told(tmp_path):
    world = World(tmp_path)
    mixed = mixed_executor([Place("cloud")], [CloudExecutor(world.cloud)])
    (status,) = mixed.poll([rented("modal")])
    assert status.stale and "one of the run's places" in status.trouble


# -------------------------------------------------------------------- a token that is revoked in mid-run


def test_the_hub_tells_a_refusal_from_a_lost_answer(hub):
    executor = HFJobsExecutor(namespace="tester")
    handle = rented("hf-jobs")
    hub.token = "another"
    (status,) = executor.poll([handle])
    assert (status.stale, status.refused) == (True, True)
    assert "Invalid credentials" in status.trouble and "hf auth login" in status.trouble
    hub.token = "hf_test_token"
    hub.fault("503", path="^/api/jobs")
    (status,) = executor.poll([handle])
    assert (status.stale, status.refused) == (True, False) and "injected" in status.trouble
    hub.fault("403", method="POST", path="^/api/jobs")
    with pytest.raises(Refused, match=r"would not start r00.*Pro, Team or Enterprise"):
        executor._hub.start("s3://b/r", "r00", 1, 60, image="x", command=["x"], flavor="cpu-basic")


@pytest.mark.slow
def test_an_end_is_told_only_once_the_token_may_read_its_last_lines(hub, tmp_path):
    """Else a replica that ended well is called lost, as its last words could not be read."""
    from tests.executors.test_hf_jobs import only, spec
    from tests.executors.test_hf_jobs import wait_for as until

    executor = HFJobsExecutor(packages=("tests",))
    handle = only(executor.launch_replicas([spec("exits", kwargs={"folder": str(tmp_path), "code": 5})]))
    until(lambda: hub.jobs[handle.native].stage == "ERROR")
    hub.fault("401", path="/logs")
    status = only(executor.poll([handle]))
    assert not status.state.ended and status.stale and status.refused
    status = only(executor.poll([handle]))
    assert (status.state, status.exit_code) == (State.FAILED, 5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_token_that_is_revoked_in_mid_run_ends_nothing_and_status_says_so(tmp_path, hub, s3, capsys, monkeypatch):
    """Three replicas; the Hub refuses the token for 40 s, and one job is killed meanwhile."""
    monkeypatch.setattr("executors.supervision.silence.REFUSED_PAUSE_S", 4.0)
    run, seen = founded(tmp_path, s3), dict[str, Any]()

    def meddle(supervisor: Supervisor, report) -> None:
        beat = report.beats.get("r01")
        if "since" not in seen and beat is not None and beat.step >= 1:
            seen["since"], hub.token = time.monotonic(), "revoked"
            handle = supervisor.handle("r01")
            assert handle is not None
            hub.kill(handle.native)
        if "since" in seen and "status" not in seen and time.monotonic() - seen["since"] > 35:
            assert cli.main(["status", URL]) == 0
            seen["status"], seen["beat"] = capsys.readouterr().out, read_beat(run.store, SUPERVISOR)
        if "status" in seen and hub.token == "revoked":
            hub.token = "hf_test_token"

    executor = HFJobsExecutor(secrets=("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    outcome = Supervisor(run, executor, SystemClock(), each_tick=meddle).supervise()
    assert outcome.code == exitcodes.DONE, (outcome.text, outputs(hub))
    report = read_report(run.store)
    assert report.done and {x.slot for x in report.sessions if x.commits} == {"r00", "r01", "r02"}
    assert "hf-jobs refuses us" in seen["status"] and "Invalid credentials" in seen["status"], seen["status"]
    assert "hf auth login" in seen["beat"].note
    assert report.of_kind("platform_answers") and hub.live() == []


def test_a_full_disk_is_said_on_the_terminal_once_a_minute(world, monkeypatch, capsys):
    """Before: 100 s and more without a word in a pipe, since no event can be written there."""
    world.started()
    put, key = type(world.run.store).put, layout.beat_key(SUPERVISOR)

    def full(store, name, body):
        if name == key:
            raise StoreFull(f"cannot write {name}: No space left on device")
        put(store, name, body)

    with monkeypatch.context() as filled:
        filled.setattr(type(world.run.store), "put", full)
        world.pass_time(70)
    told = [line for line in capsys.readouterr().err.splitlines() if "waiting for the store" in line]
    assert len(told) == 2 and f"cannot write {key}: No space left on device" in told[0]
    world.pass_time(5)
    assert world.supervisor.lease.trouble == "" and not capsys.readouterr().err
