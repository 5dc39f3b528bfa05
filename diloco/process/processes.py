"""Processes of this machine, with names that a reused pid does not match.

    pid 4711 started 123456 ticks after boot  ──▶  "4711:123456"

Not promised: anything about processes of other machines.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from diloco.process import exitcodes, run_marks
from rendezvous.machine import is_alive, start_ticks


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; [] if there is no such process, or reading is not allowed."""
    with suppress(OSError):
        if sys.platform.startswith("linux"):
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return []


def process_name(pid: int) -> str:
    """Return "PID:START", the form of a replica's --parent."""
    return f"{pid}:{start_ticks(pid) or 0}"


def is_named_alive(name: str) -> bool:
    """Whether the process "PID:START" is alive.  Without a known start, any process with that pid counts."""
    pid, _, started = name.partition(":")
    ticks = int(started or 0)
    return is_alive(int(pid), ticks) if ticks else start_ticks(int(pid)) is not None


def send_signal(pid: int, started: int, sig: int, *, run: str | None, group: bool = False) -> bool:
    """Signal a process (or the group that it leads). Return False if it has ended, or if its run is not proved.

    run: the URL that the process's mark must name; None for a child of this process, which needs no proof.
    """
    if not is_alive(pid, started) or not (run is None or run_marks.works_for(pid, run)):
        return False
    with suppress(ProcessLookupError):
        leads = group and pid > 1 and os.getpgid(pid) == pid != os.getpgrp()  # kill(-1) would signal every process
        (os.killpg if leads else os.kill)(pid, sig)
        return True
    return False


def describe_exit(exit_code: int | None, ours: bool = True) -> str:
    """Describe -9 as "killed by SIGKILL", 3 as "exit code 3 (fenced)".   ours: a replica's, whose codes have names."""
    if exit_code is None:
        return "gone; its exit code was not seen"
    if exit_code >= 0:
        word = exitcodes.NAMES.get(exit_code) if ours or not exit_code else None
        return f"exit code {exit_code}" + (f" ({word})" if word else "")
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
