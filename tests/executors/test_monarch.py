"""Why there is no MonarchExecutor (decision 062): what the executors' contract asks for, as torchmonarch 0.7 has it.

A test that turns red here is news: Monarch has learned something, and the decision wants another look.
`make test-backends`.
"""

import ast
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.inner.test_monarch import descendants, wait_for

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch is not installed: make test-backends"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]

ACTORS = """
import asyncio, os, sys, time
from monarch.actor import Actor, attach_to_workers, enable_transport, endpoint, this_host

class Beats(Actor):
    @endpoint
    async def start(self, path):
        self.task = asyncio.create_task(self.beat(path))
        return os.getpid()
    async def beat(self, path):
        while True:
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            await asyncio.sleep(0.1)

class Leaves(Actor):
    @endpoint
    def now(self, code):
        os._exit(code)

class Owner(Actor):
    def __init__(self):
        self.seen = []
    @endpoint
    async def run(self, code):
        child = this_host().spawn_procs(name="child").spawn("child", Leaves)
        try:
            await child.now.call_one(code)
        except Exception as error:
            return str(error)
    @endpoint
    async def failures(self):
        return self.seen
    def __supervise__(self, failure):
        self.seen.append(str(failure))
        return True
"""


def python(code: str) -> subprocess.Popen[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def script(folder: Path, body: str) -> subprocess.Popen[str]:
    """A process whose actors' classes lie in a module that its workers find, too."""
    path = folder / "script.py"
    path.write_text(f"{ACTORS}\nif __name__ == '__main__':\n" + "\n".join(f"    {line}" for line in body.splitlines()))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A host that serves clients: its address, and its pid."""
    address = f"ipc://{tmp_path}/worker"
    process = python(
        "from monarch.actor import run_worker_loop_forever\n"
        f"run_worker_loop_forever(ca='trust_all_connections', address={address!r})"
    )
    yield address, process.pid
    for pid in [*descendants(process.pid), process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def test_processes_outlive_their_client_though_the_documentation_ends_them(
    worker: tuple[str, int], tmp_path: Path
) -> None:
    from monarch.actor import start_worker_loop_forever  # pyright: ignore[reportMissingImports]

    assert "kills all the current work" in " ".join(str(start_worker_loop_forever.__doc__).split())
    beat = tmp_path / "beat"
    client = script(
        tmp_path,
        "enable_transport('ipc')\n"
        f"host = attach_to_workers(ca='trust_all_connections', workers=[{worker[0]!r}])\n"
        "actor = host.spawn_procs(per_host={'r': 1}).spawn('beats', Beats)\n"
        f"actor.start.call({str(beat)!r}).get()\n"
        "time.sleep(1000)",
    )
    wait_for(lambda: beat.exists() and beat.read_text(), "it never beat")
    client.kill()
    client.wait()
    time.sleep(10)
    gone = beat.stat().st_mtime
    wait_for(lambda: beat.stat().st_mtime > gone, "it ended with its client")


def test_a_host_lists_nothing_that_runs_on_it() -> None:
    from monarch.actor import HostMesh, ProcMesh  # pyright: ignore[reportMissingImports]

    names = {name for mesh in (HostMesh, ProcMesh) for name in dir(mesh) if not name.startswith("_")}
    assert not names & {"procs", "actors", "find", "list", "processes", "proc_meshes"}


def test_an_exit_code_is_words_and_an_exit_with_0_is_no_news(tmp_path: Path) -> None:
    client = script(
        tmp_path,
        "owner = this_host().spawn_procs(name='owner').spawn('owner', Owner)\n"
        "said = [owner.run.call_one(code).get() for code in (75, 0)]\n"
        "time.sleep(5)\n"
        "seen = owner.failures.call_one().get()\n"
        "print(repr((said, seen)))",
    )
    out, _ = client.communicate(timeout=200)
    said, seen = ast.literal_eval(out.strip().splitlines()[-1])
    assert "non-zero code 75" in said[0] and "exited cleanly" in said[1]
    assert seen and all("75" in failure for failure in seen)  # of the other one the owner hears nothing


def test_a_worker_has_no_lock_on_its_door() -> None:
    """A client that reaches its port runs pickled code there."""
    from monarch.actor import run_worker_loop_forever  # pyright: ignore[reportMissingImports]

    serve: Any = run_worker_loop_forever
    with pytest.raises(NotImplementedError, match="TLS"):
        serve(private_key=b"key", ca="trust_all_connections", address="ipc:///never-used")
