"""A start without an answer, or refused for a reason outside the job, is no failure of the replica, on any platform.

    no start is certain ──▶ Unavailable, Refused      the supervisor repeats the launch (supervision/outage.py)
    some are            ──▶ the others are LOST       one loss; the next launch has only these slots

The platforms' clients are stubs here.
"""

from pathlib import Path
from typing import Any

import pytest

from executors.platforms.base import ExecutorError, Handle, Refused, ReplicaSpec, State, Unavailable
from executors.platforms.on_hf_jobs import executor as hf
from executors.platforms.on_hf_jobs.client import PRICES_AGAIN_S, Hub, HubJob
from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
from executors.platforms.on_sky import SkyExecutor
from executors.platforms.on_slurm.executor import SlurmExecutor
from tests.executors.test_sky import Sky, error, row, sky
from tests.support.fakes import ManualClock

__all__ = ["sky"]  # a fixture

RUN = "s3://bucket/run"
FIRST, SECOND = ReplicaSpec(RUN, "r00", 2), ReplicaSpec(RUN, "r01", 2)
OTHER = HubJob("x", "r02", 1, "RUNNING", created=1.0)  # a job of the run that was started before


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> HFJobsExecutor:
    """An executor without a Hub: `answers` says what each start is answered."""
    made = HFJobsExecutor(namespace="tester")
    monkeypatch.setattr(made, "fault_of", lambda spec: "")
    monkeypatch.setattr(made._jobs, "list_patiently", lambda run: [OTHER])
    monkeypatch.setattr(made._hub, "known_price", lambda flavor: 1.0)
    return made


def answers(monkeypatch: pytest.MonkeyPatch, *found: HubJob | Exception) -> None:
    left = list(found)

    def start() -> HubJob:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(hf, "_start_request", lambda *_: start)
    monkeypatch.setattr(hf, "at_once", lambda requests: [_outcome(request) for request in requests])


def _outcome(request: Any) -> Any:
    try:
        return request()
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Unavailable("429 Too Many Requests"), Unavailable),
        (TimeoutError("no answer within 120 s"), Unavailable),
        (Refused("403: the token may not start jobs"), Refused),
        (ExecutorError("402: Jobs are paid in advance"), ExecutorError),
    ],
)
def test_hugging_face(hub: HFJobsExecutor, monkeypatch: pytest.MonkeyPatch, answer: Exception, kind: type) -> None:
    """Before: a FAILED handle, three of which end the run, since a job of another slot was there."""
    answers(monkeypatch, answer)
    with pytest.raises(kind, match=str(answer)[:3]) as raised:
        hub.launch_replicas([FIRST])
    assert type(raised.value) is kind


def test_one_start_of_two_without_an_answer_is_lost(hub: HFJobsExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, HubJob("y", "r00", 2, "SCHEDULING"), Unavailable("503"))
    first, second = hub.launch_replicas([FIRST, SECOND])
    assert first.native == "y" and not second.native
    assert hub.known.why_not_started(second) == hf.NotStarted("503", State.LOST)


@pytest.mark.parametrize(
    ("name", "state"),
    [("ApiServerConnectionError", None), ("NoCloudAccessError", None), ("ResourcesMismatchError", State.FAILED)],
)
def test_skypilot(sky: Sky, monkeypatch: pytest.MonkeyPatch, name: str, state: State | None) -> None:
    monkeypatch.setattr(SkyExecutor, "task", lambda self, spec: None)
    monkeypatch.setattr(sky, "launch", lambda task, name: "launch", raising=False)
    sky.fails["launch"] = error(name)
    sky.rows = [row(7, "RUNNING", "of-another-slot")]
    executor = SkyExecutor()
    if state is None:
        with pytest.raises(Unavailable, match=name):
            executor.launch_replicas([FIRST])
    else:
        assert executor.poll(executor.launch_replicas([FIRST]))[0].state is state


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", None),
        ("Batch job submission failed: Socket timed out on send/recv operation", None),
        ("QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates accounting", None),
        ("Batch job submission failed: Invalid account or account/partition combination", State.FAILED),
    ],
)
def test_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, state: State | None) -> None:
    def submit(*_: object) -> Handle:
        raise RuntimeError(f"sbatch: error: {said}")

    monkeypatch.setattr(SlurmExecutor, "fault_of", lambda self, spec: "")
    monkeypatch.setattr(SlurmExecutor, "_submit_job", submit)
    monkeypatch.setattr(
        "executors.platforms.on_slurm.executor._wait_for_card", lambda *_: pytest.fail("its own turn barred it")
    )
    executor = SlurmExecutor(folder=tmp_path)
    for _ in range(2):
        if state is None:
            with pytest.raises(Unavailable, match="sbatch: error"):
                executor.launch_replicas([FIRST])
        else:
            assert executor.poll(executor.launch_replicas([FIRST]))[0].state is state


def test_a_list_of_prices_that_does_not_come_hides_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: `diloco stop` found no job without it, and asked for it five times for each."""
    clock, asked = ManualClock(), list[float]()

    def prices(self: Hub) -> dict[str, float]:
        asked.append(clock.now())
        raise Unavailable("503")

    executor = HFJobsExecutor(namespace="tester", clock=clock)
    monkeypatch.setattr(Hub, "prices", prices)
    monkeypatch.setattr(executor._jobs, "list_patiently", lambda run: [OTHER])
    for _ in range(3):
        (found,) = executor.find(RUN)
        assert (found.native, found.usd_per_hour) == ("x", None)
    clock.sleep(PRICES_AGAIN_S)
    executor.find(RUN)
    assert asked == [0.0, PRICES_AGAIN_S]
