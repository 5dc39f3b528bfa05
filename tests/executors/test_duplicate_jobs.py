"""Two processes of one launch: the answer to it was lost while the platform's list lagged behind.

The poll ends all but the oldest, `costs` bills each, `stop` looks at the run's label until nothing lives.  The Hub is
tests/support/hf_server.py, Modal tests/support/modal_server.py, both with the real client; jobs are real processes.
"""

import time
from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.runlog.reader import SUPERVISOR, Report, read_report
from executors.cli import main as cli
from executors.platforms.base import Handle, State
from executors.platforms.on_hf_jobs.client import HubJob
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from executors.platforms.on_hf_jobs.jobs import LISTED_S, JobLists, job_that_counts, second_jobs
from executors.supervision.lease import Lease
from executors.supervision.money.bills import costs
from executors.supervision.slots.slot_state import begin_fields, past
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.clock import SystemClock
from tests.executors.test_hf_jobs import JOBS, RUN, made, only, started, waiting
from tests.executors.test_hf_jobs import wait_for as until
from tests.executors.test_hf_jobs_run import URL, founded, hub, idle, outputs, s3
from tests.support.fakes import ManualClock
from tests.support.hf_server import HFServer

__all__ = ["hub", "s3"]  # fixtures


def lose(hub: HFServer, lists: int = 3) -> None:
    """The next launch is done and its answer lost; so many lists are from before it."""
    hub.fault("lost", method="POST", path=JOBS)
    hub.fault("behind", method="GET", path=JOBS, times=lists)


def alive(hub: HFServer, slot: str = "r00") -> list[str]:
    """Jobs of a slot that have not ended, the oldest first."""
    found = [j for j in hub.jobs.values() if j.asked["labels"]["slot"] == slot and j.stage in ("SCHEDULING", "RUNNING")]
    return [j.id for j in sorted(found, key=lambda j: j.created)]


# -------------------------------------------------------------------- which one stays


def job(id: str, created: float, stage: str = "RUNNING", attempt: int = 1) -> HubJob:
    return HubJob(id, "r00", attempt, stage, created=created)


@pytest.mark.parametrize(
    ("jobs", "stays"),
    [
        ([job("b", 2), job("a", 1)], "a"),
        ([job("b", 2), job("a", 1, "ERROR")], "b"),  # the older one has ended: the younger one runs the launch
        ([job("b", 2, "CANCELED"), job("a", 1, "ERROR")], "a"),
        (
            [job("b", 2, "COMPLETED"), job("a", 1, "CANCELED")],
            "b",
        ),  # its duplicate's end is not its own
        ([job("b", 2), job("a", 2)], "a"),  # created in the same second: the same one for every process that looks
    ],
)
def test_of_the_jobs_of_one_launch_one_counts(jobs: list[HubJob], stays: str) -> None:
    found = job_that_counts(jobs)
    assert found is not None and found.id == stays
    living = [(RUN, j) for j in jobs if not j.ended]
    assert {j.id for _, j in second_jobs(living)} == {j.id for _, j in living} - {stays}


def test_other_attempts_and_runs_are_no_duplicates() -> None:
    assert second_jobs([(RUN, job("a", 1)), (RUN, job("b", 2, attempt=2)), (RUN + "x", job("c", 3))]) == []


class Listed:
    """A Hub whose list of jobs a test writes."""

    def __init__(self, *jobs: HubJob) -> None:
        self.listed, self.asked = list(jobs), 0

    def jobs(self, run: str, *, alive: bool = False) -> list[HubJob]:
        self.asked += 1
        if not self.listed:
            raise ConnectionError("gone")
        return self.listed


def test_an_old_list_calls_no_job_alive() -> None:
    """Two places on Hugging Face: only one of them is polled, and the other's list got old for good."""
    hub, clock = Listed(job("a", 1)), ManualClock()
    lists = JobLists(hub, clock)  # type: ignore[arg-type]
    assert lists.alive_now(RUN) == [] and hub.asked == 0, "nothing was launched there"
    assert lists.list_once(RUN) == lists.alive_now(RUN) == [job("a", 1)] and hub.asked == 1
    clock.sleep(LISTED_S + 1)
    hub.listed = [job("a", 1, "COMPLETED")]
    assert lists.alive_now(RUN) == [] and hub.asked == 2
    clock.sleep(LISTED_S + 1)
    hub.listed = []
    assert lists.alive_now(RUN) == lists.alive_now(RUN) == [] and hub.asked == 3, "one try for one age"


# -------------------------------------------------------------------- on the Hub


@pytest.mark.slow
def test_the_next_poll_ends_all_but_the_oldest_and_the_handle_goes_on_to_it(hub, tmp_path: Path) -> None:
    executor = made()
    lose(hub)
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    assert len(hub.jobs) == 2 and handle.native == alive(hub)[1], "the answer that came named the younger one"
    oldest = alive(hub)[0]
    until(lambda: only(executor.poll([handle])).state is State.RUNNING)
    until(lambda: alive(hub) == [oldest])
    status = only(executor.poll([handle]))
    assert (status.state, status.handle.native) == (State.RUNNING, oldest), "and it is not said to be cancelled"
    assert only(made().poll([handle])).handle.native == oldest, "nor by a process that never saw two"
    (tmp_path / "go").touch()
    result = only(executor.collect([handle], timeout=120))
    assert (result.state, result.value) == (State.SUCCEEDED, "went"), result


@pytest.mark.slow
def test_a_cancel_means_the_launch_with_all_its_jobs(hub, tmp_path: Path) -> None:
    executor = made()
    lose(hub)
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    started(hub, handle)
    executor.find(RUN)
    executor.cancel([handle])
    until(lambda: alive(hub) == [])


def test_a_younger_twin_that_fences_the_older_one_runs_the_launch(hub, tmp_path: Path) -> None:
    """Both may claim the slot before the first poll: the older one ends as fenced."""
    executor = made()
    lose(hub)
    handle = only(executor.launch_replicas(waiting(tmp_path, "r00")))
    older, younger = alive(hub)
    until(lambda: hub.jobs[older].stage == "RUNNING")
    hub.kill(older)
    until(lambda: alive(hub) == [younger])
    status = only(executor.poll([handle]))
    assert status.state in (State.RUNNING, State.PENDING) and status.handle.native == younger


# -------------------------------------------------------------------- the supervisor and the bill


def test_a_supervisor_ends_duplicates_and_bills_each_of_them(tmp_path: Path, hub, s3, capsys) -> None:
    run = founded(tmp_path, s3, n=1)
    run.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    lose(hub, lists=4)
    seen = dict[str, object]()

    def look(supervisor: Supervisor, report: Report) -> None:
        if len(hub.jobs) == 2 and "both" not in seen and len(report.of_kind("found")) == 1:
            assert cli.main(["costs", URL]) == 0
            seen["both"] = capsys.readouterr().out
        if "both" in seen and len(alive(hub)) == 1 and report.of_kind("ended"):
            supervisor.leave()

    outcome = idle(URL, each_tick=look).supervise()
    assert outcome.code == exitcodes.LEFT, (outcome.text, outputs(hub))
    assert len(hub.jobs) == 2 and alive(hub) == [] and hub.live() == []
    report = read_report(run.store)
    (launched,), (found,) = report.of_kind("launched"), report.of_kind("found")
    assert {launched["handle"]["native"], found["handle"]["native"]} == set(hub.jobs)
    bills = costs(report).bills
    assert len(bills) == 2 and all(b.ended is not None and b.seconds > 0 and b.usd > 0 for b in bills)
    assert "r00        hf-jobs         2" in str(seen["both"]), seen["both"]
    assert not report.of_kind("lost") and [e["state"] for e in report.of_kind("ended")].count("CANCELLED") >= 1


@pytest.mark.slow
def test_a_twin_of_a_launch_that_was_given_up_is_billed_and_ends(tmp_path: Path, hub, s3) -> None:
    """Attempt 1 is long over when a list first shows another job of it."""
    run = founded(tmp_path, s3, n=1)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    stranger = list[str]()

    def look(supervisor: Supervisor, report: Report) -> None:
        handle = supervisor.handle("r00")
        if handle and not stranger and hub.jobs[handle.native].stage == "RUNNING":
            hub.kill(handle.native)
            until(lambda: hub.jobs[handle.native].stage == "ERROR")
            stranger.append("")
        elif handle and stranger == [""] and handle.attempt == 2:
            first = next(j for j in hub.jobs.values() if j.asked["labels"]["attempt"] == "1")
            stranger[0] = hub.create("tester", first.asked).id
        elif stranger and stranger[0] and hub.jobs[stranger[0]].stage == "CANCELED" and report.of_kind("ended"):
            supervisor.leave()

    outcome = idle(URL, each_tick=look).supervise()
    assert outcome.code == exitcodes.LEFT, outcome.text
    report = read_report(run.store)
    assert [e["handle"]["native"] for e in report.of_kind("found")] == stranger
    assert {b.attempt for b in costs(report).bills} == {1, 2} and len(costs(report).bills) == 3


def event(kind: str, native: str | None, **more: object) -> dict:
    about = {"who": "supervisor-1", "event": kind, "slot": "r00", "generation": 0, "at": 10.0, "attempt": 1}
    handle = {"handle": Handle("s3://b/r", "r00", 1, "hf-jobs", native=native or "").to_dict()}
    return {**about, **(handle if kind in ("launched", "found") else {"native": native} if native else {}), **more}


def test_each_process_of_a_launch_is_open_until_its_own_end() -> None:
    both = [event("launched", "b"), event("found", "a")]
    assert {h.native for h in past(both)["r00"].open} == {"a", "b"}
    assert [h.native for h in past([*both, event("ended", "b", duplicate=True)])["r00"].open] == ["a"]
    assert past([*both, event("ended", None)])["r00"].open == (), "an older release named no process"
    counted = past([*both, event("lost", "a", useful=False, own_fault=True), event("ended", "b", duplicate=True)])[
        "r00"
    ]
    assert (counted.strikes.losses, counted.strikes.failures) == (1, 1), "a duplicate's end is no end of the launch"


# -------------------------------------------------------------------- stop


@pytest.mark.slow
def test_stop_ends_what_no_log_names_and_no_list_showed_at_first(tmp_path: Path, hub, s3, capsys, monkeypatch) -> None:
    """The launcher died before it wrote down anything but that it launches; no replica has claimed; the lists lag."""
    monkeypatch.setattr("executors.supervision.slots.launches.LAG_S", 8.0)
    run = founded(tmp_path, s3, n=1)
    hub.grace_s = 1.0
    lose(hub)
    journal = Journal(run.store, SystemClock(), SUPERVISOR, Lease.seize(run.store, SystemClock()).generation)
    journal.emit("launching", launches=["r00.1"])
    journal.flush()
    specs = waiting(tmp_path, "r00")
    made().launch_replicas([type(s).from_dict({**s.to_dict(), "run": URL}) for s in specs])
    assert len(alive(hub)) == 2
    hub.fault("behind", method="GET", path=JOBS, times=4)
    assert cli.main(["stop", URL, "--grace", "0.2"]) == 0
    told = capsys.readouterr().out
    assert alive(hub) == [] and "no replica ever ran here" not in told, told
    assert all(id in told for id in hub.jobs), told
    assert {b.slot for b in costs(read_report(run.store)).bills} == {"r00"}
    assert len(costs(read_report(run.store)).bills) == 2, "both were paid for"


@pytest.mark.slow
def test_stop_with_launches_in_the_log_never_says_that_nobody_ran(tmp_path: Path, hub, s3, capsys, monkeypatch) -> None:
    monkeypatch.setattr("executors.supervision.slots.launches.LAG_S", 2.0)
    run = founded(tmp_path, s3, n=1)
    lease = Lease.seize(run.store, SystemClock())
    journal = Journal(run.store, SystemClock(), SUPERVISOR, lease.generation)
    journal.emit("launching", launches=["r00.1"])
    journal.flush()
    lease.beat("left")
    began = time.monotonic()
    assert cli.main(["stop", URL, "--grace", "0.2"]) == 0
    told = capsys.readouterr().out
    assert time.monotonic() - began >= 1.0, "a list may lag behind the launch"
    assert "the log has launches, and none of them runs" in told and "no replica ever ran here" not in told


@pytest.mark.slow
def test_stop_says_so_if_the_platform_keeps_something_alive(tmp_path: Path, hub, s3, capsys, monkeypatch) -> None:
    monkeypatch.setattr("executors.supervision.shutdown.CANCELLED_S", 3.0)
    run = founded(tmp_path, s3, n=1)
    made().launch_replicas([type(s).from_dict({**s.to_dict(), "run": run.url}) for s in waiting(tmp_path, "r00")])
    until(lambda: hub.jobs[alive(hub)[0]].stage == "RUNNING")
    hub.fault("503", path="/cancel$", times=10**6)
    assert cli.main(["stop", URL, "--grace", "0.2"]) == 1
    assert "may still run" in capsys.readouterr().err and len(alive(hub)) == 1


def test_a_launch_is_written_down_before_it_is_asked_for(tmp_path: Path, hub, s3) -> None:
    """A supervisor that is killed inside the request leaves a word for `stop`."""
    run = founded(tmp_path, s3, n=2)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    supervisor = idle(URL)

    def launch(specs: object) -> list[Handle]:
        raise SystemExit("killed here")

    supervisor.executor.launch_replicas = launch  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        supervisor.tick()
    (event,) = read_report(run.store).of_kind("launching")
    assert event["launches"] == ["r00.1", "r01.1"]


def test_a_hub_without_a_word_of_the_run_sweeps_nothing(hub) -> None:
    executor = HFJobsExecutor(packages=("tests",))
    assert executor.sweep(RUN) == [] and executor.orphans(RUN, []) == []
    assert begin_fields(Handle(RUN, "r00", 1, "hf-jobs", native="x"))["handle"]["native"] == "x"
