"""The supervisor as a job whose host dies: the Hub starts it again, and it takes over; two launch no slot twice.

The real client and real processes against support/hf_server.py; replicas stay in the queue, as they are not the point.
"""

import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR, read_report
from executors.cli import main as cli
from executors.platforms.base import Handle, State
from executors.platforms.container import end_lines, read_end
from executors.platforms.on_hf_jobs.client import HubJob
from executors.platforms.on_hf_jobs.executor import WATCHES, HFJobsExecutor, ended
from executors.supervision.hosted import is_cut_off, start_hosted
from executors.supervision.lease import Lease
from executors.supervision.money.bills import costs
from executors.supervision.slots.slot_state import LOST_LEASE
from rendezvous import layout
from rendezvous.agreement.membership import newest_claim
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreError, StoreRefused
from tests.executors.test_hf_jobs_run import URL, founded, hub, idle, outputs, s3, wait_for

__all__ = ["hub", "s3"]  # fixtures


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_supervisor_whose_host_dies_again_and_again_takes_over_and_launches_nobody_twice(
    tmp_path: Path, hub, s3, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("executors.supervision.slots.launches.LAG_S", 2.0)
    run = founded(tmp_path, s3, n=2)
    run.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    hub.plain = {"HF_ENDPOINT": hub.endpoint}
    handle = start_hosted(HFJobsExecutor(packages=("tests",)), URL)
    job = hub.jobs[handle.native]
    assert job.asked["attempts"] == WATCHES
    wait_for(lambda: job.stage == "RUNNING", lambda: outputs(hub))
    hub.held = True  # replicas wait for machines
    for generation in (1, 2, 3):
        wait_for(lambda g=generation: len(read_report(run.store).of_kind("started")) >= g, lambda: outputs(hub))
        wait_for(lambda: len(hub.jobs) >= 3, lambda: outputs(hub))
        hub.kill(handle.native)
    wait_for(lambda: len(read_report(run.store).of_kind("started")) >= 4, lambda: outputs(hub))
    assert len(hub.jobs) == 3, "one supervisor and two replicas, however often it died"
    claim = newest_claim(run.store, SUPERVISOR)
    assert claim is not None and claim.generation == 4
    assert cli.main(["stop", URL, "--grace", "20"]) == 0, capsys.readouterr()
    wait_for(lambda: all(j.stage in ("COMPLETED", "CANCELED") for j in hub.jobs.values()), lambda: outputs(hub))
    assert hub.live() == [] and len(read_report(run.store).of_kind("started")) == 4, "after its goodbye it stays away"


def test_two_supervisors_at_once_launch_nobody_twice(tmp_path: Path, hub, s3) -> None:
    """The first one is inside its request when the second one takes over, and the lists lag."""
    run = founded(tmp_path, s3, n=2)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    hub.held = True
    first = idle(URL)
    launch, second = first.executor.launch_replicas, list[object]()

    def overtaken(specs: object) -> list[Handle]:
        first.lease.beat("left")  # else the second one would wait for its beat to stand still
        other = idle(URL)
        hub.fault("behind", method="GET", path="^/api/jobs/[^/]+$", times=6)
        assert other.tick() is None
        second.append(other)
        return launch(specs)  # type: ignore[arg-type]

    first.executor.launch_replicas = overtaken  # type: ignore[method-assign]
    first.tick()
    outcome, other = first.tick(), second[0]
    assert outcome is not None and outcome.code == LOST_LEASE
    hub.faults.clear()
    alive = lambda: [j for j in hub.jobs.values() if j.stage == "SCHEDULING"]  # noqa: E731
    wait_for(lambda: other.tick() is None and len(alive()) == 2, lambda: outputs(hub))  # type: ignore[attr-defined]
    assert {j.asked["labels"]["slot"] for j in alive()} == {"r00", "r01"}
    other.tick()  # type: ignore[attr-defined]
    booked = read_report(run.store).of_kind("launched", "found")
    assert {e["handle"]["native"] for e in booked} == set(hub.jobs), "and all of them are billed"


@pytest.mark.slow
def test_jobs_that_were_cancelled_on_the_hubs_page_are_replaced(tmp_path: Path, hub, s3) -> None:
    """A job that ran and one in the queue.  Before: CANCELLED for ever, without a word."""
    run = founded(tmp_path, s3, n=2)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    supervisor = idle(URL)
    wait_for(
        lambda: supervisor.tick() is None and "RUNNING" in {j.stage for j in hub.jobs.values()}, lambda: outputs(hub)
    )
    hub.held = True
    for job in list(hub.jobs.values()):
        hub.cancel(job)
    wait_for(lambda: supervisor.tick() is None and len(hub.jobs) >= 4, lambda: outputs(hub))
    newest = {j.asked["labels"]["slot"]: j.asked["labels"]["attempt"] for j in hub.jobs.values()}
    assert newest == {"r00": "2", "r01": "2"}
    assert {e["reason"] for e in read_report(run.store).of_kind("lost")} == {"cancelled, and not by this run"}


@pytest.mark.slow
def test_the_bill_of_a_night_is_the_hubs(tmp_path: Path, hub, s3) -> None:
    """Jobs end while no supervisor looks, and waited for machines before; the next supervisor bills as the Hub does."""
    run = founded(tmp_path, s3, n=2)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    first = idle(URL)
    running = lambda: [j.stage for j in hub.jobs.values()] == ["RUNNING"] * 2  # noqa: E731
    wait_for(lambda: first.tick() is None and running(), lambda: outputs(hub))
    first.lease.beat("left")
    for job, ran in zip(list(hub.jobs.values()), (1800.0, 5400.0), strict=True):
        hub.kill(job.id)
        wait_for(lambda job=job: job.stage == "ERROR", lambda: outputs(hub))
        job.created, job.finished = job.created - 50_000.0, time.time() - 36_000.0
        job.started = job.finished - ran
    hub.held = True
    second = idle(URL)
    wait_for(lambda: second.tick() is None and len(hub.jobs) == 4, lambda: outputs(hub))
    bills = [b for b in costs(read_report(run.store), time.time()).bills if b.attempt == 1]
    assert sorted(b.seconds for b in bills) == [pytest.approx(1800.0), pytest.approx(5400.0)]


def test_a_leave_record_is_final_and_a_crash_is_not(tmp_path: Path, s3) -> None:
    run = founded(tmp_path, s3, n=1)
    lease = Lease.seize(run.store, SystemClock())
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    for code in (exitcodes.DONE, exitcodes.USER_ERROR, LOST_LEASE):
        assert not is_cut_off(URL, code)
    assert is_cut_off(URL, 1) and is_cut_off(URL, 143), "no goodbye: the Hub is to start it again"
    lease.beat("left")
    for code in (1, exitcodes.LEFT, exitcodes.GAVE_UP):
        assert not is_cut_off(URL, code), "the run was given up or left: that is final"


@pytest.mark.parametrize(("error", "again"), [(StoreRefused("AccessDenied"), False), (StoreError("503"), True)])
def test_a_refused_key_is_final_and_a_silent_store_is_not(
    error: StoreError, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modal repeated a supervisor with another account's keys, and told "cut off" in place of "AccessDenied"."""
    monkeypatch.setattr("executors.supervision.hosted.open_signed", Mock(side_effect=error))
    assert is_cut_off(URL, 1) is again


def test_a_supervisors_job_that_ended_well_tells_how_the_supervisor_ended() -> None:
    handle = Handle(URL, SUPERVISOR, 1, "hf-jobs", native="7")
    job = HubJob("7", SUPERVISOR, 1, "COMPLETED")
    end = {"exit_code": exitcodes.LEFT, "reason": "left", "value": None, "tail": []}
    status = ended(handle, job, ["diloco-started: supervisor.1", *end_lines(end)])
    assert (status.state, status.exit_code) == (State.FAILED, exitcodes.LEFT)
    assert ended(handle, job, []).state is State.SUCCEEDED, "its log is gone"


def test_the_log_of_a_job_that_was_started_again_tells_its_last_end() -> None:
    first, last = {"exit_code": 1, "reason": "crash"}, {"exit_code": 0, "reason": "done"}
    lines = ["diloco-started: x", *end_lines(first), "diloco-started: x", "words", *end_lines(last)]
    assert read_end(lines) == last and read_end(lines[:-1]) is None
