"""Modal for tests: a server here (support/modal_server.py), an executor, a run's URL, a bucket and its secret.

    from tests.support.modal_fixtures import executor, platform, run …       pytest takes them as that file's own

Not promised: two tests of one file with a server each; what a test leaves running is ended before the next one.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import modal
import pytest

from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from executors.platforms.base import Handle, ReplicaSpec, State
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.places import Place
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from tests.support.entrypoints import marks
from tests.support.modal_server import ModalPlatform
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[2]
ENTRY = "tests.support.entrypoints"
KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
WAIT_S = 120.0  # only a hang takes so long
HOME = "/root"  # in a container of theirs


@pytest.fixture(scope="module")
def platform() -> Iterator[ModalPlatform]:
    with ModalPlatform() as started:
        yield started


@pytest.fixture
def executor(platform: ModalPlatform) -> Iterator[ModalExecutor]:
    made = platform.executor()
    yield made
    made.close()


@pytest.fixture
def run(platform: ModalPlatform, executor: ModalExecutor, tmp_path: Path) -> Iterator[str]:
    """A run's URL.  All processes that were started for it have ended after the test."""
    url = platform.url(f"{tmp_path.parent.name}/{tmp_path.name}")
    yield url
    (tmp_path / "go").touch()
    platform.hold(False)
    platform.server.turnstiles.clear()
    executor.shutdown(url)
    until(lambda: platform.live() == 0, "containers outlived their app")


def spec(run: str, folder: Path, function: str, slot: str = "r00", attempt: int = 1, **more: Any) -> ReplicaSpec:
    kwargs = {"folder": str(folder), "who": f"{slot}.{attempt}", **more.pop("kwargs", {})}
    return ReplicaSpec(run, slot, attempt, f"{ENTRY}:{function}", kwargs=kwargs, **more)


def until(happens: Any, otherwise: str | Callable[[], str], seconds: float = WAIT_S) -> None:
    """Returns once it happens.   otherwise: the complaint, or a function that words it at the end of the wait."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.02)


def started(folder: Path, who: str = "r00.1", times: int = 1) -> None:
    until(lambda: len(marks(folder, "start", who)) >= times, f"{who} did not start {times} times")


def state(executor: ModalExecutor, handle: Handle) -> State:
    return executor.poll([handle])[0].state


@pytest.fixture
def bucket(platform: ModalPlatform, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Keys here, and in a secret there."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with S3Server(access_key="AKIDTEST") as server:
        values = {**KEYS, "AWS_ENDPOINT_URL": server.endpoint}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        secret = f"store-{server.endpoint.rpartition(':')[2]}"
        modal.Secret.objects.create(secret, values, allow_existing=True)
        server.secret = secret  # type: ignore[attr-defined]
        yield server


def founded(run: str, bucket: Any, folder: Path, **changes: Any) -> Run:
    """A run whose replicas live on Modal, and wait for each other."""
    (folder / "text.txt").write_text("".join(f"{i} plus {i + 1} is {2 * i + 1}. " for i in range(300)))
    base: dict[str, dict[str, Any]] = {
        "outer": {"sync_every": 2, "snapshot_every": 2},
        "inner": {
            "loop": "supervised",
            "model": "tiny",
            "data": {"text": "text.txt", "context_length": 16},
            "batch_size": 4,
        },
        "fleet": {"replicas": 3, "min_replicas": 3, "steps": 4, "give_up_s": 300.0},
    }
    raw = {"name": "test", **{s: {**v, **changes.get(s, {})} for s, v in base.items()}}
    if "model" in changes.get("inner", {}):
        raw["inner"] = changes["inner"]
    made = open_run(RunConfig.from_dict(raw, folder), run, SystemClock())
    write_control(made.store, SystemClock(), places=[Place("modal", secrets=(bucket.secret,)).to_dict()])
    return made


TOOLWORLD = {
    "loop": "grpo",
    "model": "toolworld",
    "batch_size": 8,
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 60},
}
