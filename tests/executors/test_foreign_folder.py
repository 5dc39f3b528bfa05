"""A folder whose files have names of our modules or the standard library's: our processes import none of them.

Before: the fork server of `diloco train` imported the project's inner.py, and the run ended with "Connection reset".
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from executors.platforms.base import ReplicaSpec
from executors.platforms.on_host import forkserver
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.supervision.boxes import _ask

NAMES = ("inner", "diloco", "executors", "rendezvous", "token", "random", "json", "socket")
DILOCO = "import sys\nfrom executors.cli.main import main\nsys.exit(main())"
CONFIG = """[inner]
model = "toolworld"
batch_size = 8
[outer]
sync_every = 1
[fleet]
replicas = 1
steps = 1
"""


@pytest.fixture
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"raise RuntimeError('the {name}.py of this folder')\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_replicas_start(shadowed: Path, method: str) -> None:
    executor = LocalProcessExecutor([], method=method)
    asked = ReplicaSpec(str(shadowed.parent / "run"), "r00", 1, entrypoint=f"{__name__}:does_nothing")
    (handle,) = executor.launch_replicas([asked])
    until = time.monotonic() + 60
    while not (status := executor.poll([handle])[0]).state.ended and time.monotonic() < until:
        time.sleep(0.05)
    executor.close()
    assert status.exit_code == 0, executor.logs(handle, 20)


def does_nothing(argv: list[str]) -> int:
    return 0


@pytest.mark.slow
def test_train(shadowed: Path) -> None:
    """The installed command stands in a folder of its own, and that folder is first on its path."""
    command = shadowed.parent / "bin" / "diloco"
    command.parent.mkdir()
    command.write_text(DILOCO)
    (shadowed / "t.toml").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, str(command), "train", "t.toml", "--run", "r"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_boxes_are_asked_for(shadowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.supervision.boxes.ANSWER_S", 60.0)
    found = _ask([sys.executable, "-P", "-m", "inner.extras.boxes.sweep", "local", "a-nonce"])
    assert found["left"] == 0


def test_a_dead_fork_server_shows_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that ends with unread bytes resets the connection, and recv raises."""
    monkeypatch.setattr(forkserver, "START", "import sys, time; time.sleep(1); sys.exit('what the child says')")
    server = forkserver.ForkServer((), {})
    (found,) = server.fork([{"entrypoint": "x"}])
    server.close()
    assert isinstance(found, OSError)
    assert "the fork server has died" in str(found) and "what the child says" in str(found)
