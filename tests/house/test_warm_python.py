"""Pythons that are forked from one with the imports done (tests/support/warm_python.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.process.processes import is_alive, start_ticks
from tests.support.warm_python import WarmPython

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers' Pythons are ordinary ones elsewhere")
TELL = (
    "import json, os, sys; at = os.getcwd(), os.environ.get('MARK'), 'wave' in sys.modules; "
    "print(json.dumps(at)); sys.stdout.flush(); "
)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    python = WarmPython(str(tmp_path_factory.mktemp("warm")), ["no_such_module", "wave"])
    yield python
    python.close()


def run(python: WarmPython, code: str, folder: Path, **options: object) -> subprocess.CompletedProcess[str]:
    command = [python.path, "-u", "-c", TELL + code]
    environ = {**os.environ, "MARK": "ü"}
    return subprocess.run(command, env=environ, cwd=folder, text=True, capture_output=True, **options)  # type: ignore[call-overload]


def test_code_has_the_clients_folder_environment_and_files_and_its_end(warm: WarmPython, tmp_path: Path) -> None:
    done = run(warm, "print(input()); sys.exit(7)", tmp_path, input="typed\n")
    said, typed = done.stdout.splitlines()
    assert json.loads(said) == [str(tmp_path), "ü", True] and typed == "typed"
    assert (done.returncode, done.stderr) == (7, "")
    assert run(warm, "os.kill(os.getpid(), 9)", tmp_path).returncode == 128 + signal.SIGKILL


def test_files_keep_their_numbers(warm: WarmPython, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader) as pipe:
        done = run(warm, f"os.write({writer}, b'here')", tmp_path, pass_fds=[writer])
        os.close(writer)
        assert (done.returncode, pipe.read()) == (0, "here")


def test_code_ends_with_its_client(warm: WarmPython) -> None:
    command = [warm.path, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        started = start_ticks(pid)
        client.kill()
        assert client.stdout.read() == b"", "its end of the pipe is closed"
    assert started is not None
    until = time.monotonic() + 60.0
    while is_alive(pid, started):  # a process closes its files a moment before its end
        assert time.monotonic() < until
        time.sleep(0.01)


def test_without_the_warm_process_it_is_an_ordinary_python(tmp_path: Path) -> None:
    python = WarmPython(str(tmp_path), [])
    python.close()
    done = run(python, "sys.exit(3)", tmp_path)
    assert json.loads(done.stdout) == [str(tmp_path), "ü", False] and done.returncode == 3
