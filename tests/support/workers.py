"""Processes of this machine that live until their input ends, and say for which runs they work."""

import subprocess
import sys

from diloco.process import processes
from rendezvous.machine import machine_name

WORKS = (
    "import sys; from diloco.process.processes import mark_run; [mark_run(u) for u in sys.argv[1:]]; "
    "print('.', flush=True); input()"
)


def worker(*urls: str) -> subprocess.Popen:
    """It works for these runs, in a group of its own."""
    child = subprocess.Popen(
        [sys.executable, "-c", WORKS, *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert child.stdout is not None and child.stdout.readline() == b".\n"
    return child


def identity(pid: int) -> dict:
    """How its claim names it."""
    return {"host": machine_name(), "pid": pid, "started": processes.start_ticks(pid)}
