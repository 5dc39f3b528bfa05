"""SkyExecutor's requests to SkyPilot, and its reading of the answers; a stand-in for its client, whose calls give
request ids, as the real one's do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executors.platforms import on_sky
from executors.platforms.base import ExecutorError, Handle, Refused, ReplicaSpec, State, Unavailable
from executors.platforms.on_sky import LISTED_S, NoController, SkyExecutor, job_name
from tests.support.fakes import ManualClock


class Sky:
    """jobs: rows of the queue.   fails: what the server answers to a request, when it is waited for."""

    def __init__(self) -> None:
        self.rows: list[SimpleNamespace] = []
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.awaited: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.jobs = self

    def _request(self, name: str, **more: Any) -> str:
        self.asked.append((name, more))
        return name

    def queue_v2(self, **more: Any) -> str:
        return self._request("queue", **more)

    def cancel(self, **more: Any) -> str:
        return self._request("cancel", **more)

    def tail_logs(self, **more: Any) -> list[str]:
        self._request("logs", **more)
        if "logs" in self.fails:
            raise self.fails["logs"]
        return []

    def Task(self, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(**more, set_resources=lambda kinds: None)

    def Resources(self, **more: Any) -> SimpleNamespace:
        return SimpleNamespace(**more)

    def get(self, request: str) -> Any:
        self.awaited.append(request)
        if request in self.fails:
            raise self.fails[request]
        return (self.rows, len(self.rows), {}, 0) if request == "queue" else None


def row(id: int, word: str, name: str = "x", **more: Any) -> SimpleNamespace:
    about = {"failure_reason": None, "details": None, **more}
    return SimpleNamespace(job_id=id, job_name=name, status=SimpleNamespace(value=word), **about)


def error(name: str) -> Exception:
    return type(name, (Exception,), {})("its words")


@pytest.fixture
def sky(monkeypatch: pytest.MonkeyPatch) -> Sky:
    made = Sky()
    monkeypatch.setattr(on_sky, "sky", lambda: made)
    return made


def handle(native: str = "7", slot: str = "r00", attempt: int = 1) -> Handle:
    return Handle("s3://bucket/run", slot, attempt, "sky", native=native)


def test_a_machine_gets_the_packages_that_pip_names(sky: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    task = SkyExecutor(pip=["judge<2"], setup="apt-get install -y git").task(ReplicaSpec("s3://b/run", "r00"))
    install, own = task.setup.splitlines()
    assert install.startswith("pip install -q -r ") and install.endswith(" 'judge<2'"), "quoted for the shell"
    assert own == "apt-get install -y git"


def test_the_reasons_are_asked_for_and_shown(sky: Sky) -> None:
    """The client's own default leaves failure_reason and details out (DEFAULT_MANAGED_JOB_FIELDS of 0.14.1)."""
    sky.rows = [row(7, "FAILED_NO_RESOURCE", failure_reason="no H100 anywhere"), row(8, "PENDING", details="in queue")]
    failed, waits = SkyExecutor().poll([handle("7"), handle("8", "r01")])
    assert (failed.state, failed.reason) == (State.LOST, "no H100 anywhere")
    assert (waits.state, waits.reason) == (State.PENDING, "in queue")
    ((_, asked),) = sky.asked
    assert {"failure_reason", "details", "job_id", "job_name", "status"} <= set(asked["fields"])


def test_a_cancellation_waits_for_its_answer(sky: Sky) -> None:
    executor, name = SkyExecutor(), job_name(handle())
    sky.rows = [row(7, "RUNNING", name), row(8, "RUNNING", "diloco-of-another-run-r01-1")]
    executor.cancel([handle("7"), handle("8", "r01")])
    assert sky.asked[-1] == ("cancel", {"job_ids": [7]}) and sky.awaited[-1] == "cancel", "8 is not this run's"
    sky.fails["cancel"] = error("RuntimeError")
    with pytest.raises(ExecutorError, match=r"SkyPilot refused \(RuntimeError\): its words"):
        executor.cancel([handle("7")])
    sky.fails["cancel"] = error("ClusterNotUpError")
    executor.cancel([handle("7")])  # its controller is gone, and its jobs with it


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ApiServerConnectionError", Unavailable),
        ("ServerTemporarilyUnavailableError", Unavailable),
        ("ApiServerAuthenticationError", Refused),
        ("PermissionDeniedError", Refused),
        ("NoCloudAccessError", Refused),
        ("ResourcesMismatchError", ExecutorError),
    ],
)
def test_its_errors_are_ours(sky: Sky, name: str, kind: type[ExecutorError]) -> None:
    sky.fails["queue"] = sky.fails["logs"] = error(name)
    with pytest.raises(kind, match=rf"\({name}\).*its words.*Next: "):
        SkyExecutor().find("s3://bucket/run")
    with pytest.raises(kind, match=name):
        SkyExecutor().logs(handle())
    (status,) = SkyExecutor().poll([handle()])
    assert status.stale and status.refused == (kind is Refused) and name in status.trouble


def test_without_a_controller_there_are_no_jobs(sky: Sky) -> None:
    sky.fails["queue"] = error("ClusterNotUpError")
    assert SkyExecutor().find("s3://bucket/run") == [] and SkyExecutor().sweep("s3://bucket/run") == []
    with pytest.raises(NoController), on_sky.translated_errors():
        raise sky.fails["queue"]


def test_jobs_of_one_name_are_twins_and_a_sweep_ends_all_of_a_run(sky: Sky) -> None:
    from executors.platforms.base import ReplicaSpec

    name = job_name(ReplicaSpec("s3://bucket/run", "r00", 1))
    sky.rows = [row(8, "RUNNING", name), row(7, "RUNNING", name), row(9, "SUCCEEDED", name), row(5, "RUNNING", "other")]
    executor = SkyExecutor()
    (found,) = executor.find("s3://bucket/run")
    assert found.native == "7", "of two of one name the older"
    assert [h.native for h in executor.orphans("s3://bucket/run", [found])] == ["8"]
    assert len(executor.sweep("s3://bucket/run")) == 2
    assert sky.asked[-1] == ("cancel", {"job_ids": [8, 7]})


def test_a_job_whose_end_was_seen_is_no_orphan(sky: Sky) -> None:
    """Before: the list of the last launch called it alive for ever, and the run ended ten minutes late."""
    clock = ManualClock()
    ours, other = job_name(handle()), job_name(handle("8", "r01"))
    sky.rows = [row(7, "RUNNING", ours), row(8, "RUNNING", other), row(9, "RUNNING", other)]
    executor = SkyExecutor(clock=clock)
    first, second = executor.find("s3://bucket/run")
    sky.rows = [row(7, "SUCCEEDED", ours), *sky.rows[1:]]
    assert executor.poll([first])[0].state is State.SUCCEEDED
    assert [h.native for h in executor.orphans("s3://bucket/run", [second])] == ["9"]
    sky.rows = [row(7, "SUCCEEDED", ours), row(8, "RUNNING", other), row(9, "CANCELLED", other)]
    clock.sleep(LISTED_S + 1)
    assert executor.orphans("s3://bucket/run", [second]) == []
    sky.fails["queue"] = error("NetworkError")
    clock.sleep(LISTED_S + 1)
    assert executor.orphans("s3://bucket/run", [second]) == [], "no answer is no news"
