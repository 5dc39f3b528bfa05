"""Processes of this machine, named so that a recycled pid is never taken for the old one.

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
    """The words that a process was started with; [] if there is none, or we may not look."""
    with suppress(OSError):
        if sys.platform.startswith("linux"):
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return []


def process_name(pid: int) -> str:
    """ "PID:START", as a replica's --parent wants it."""
    return f"{pid}:{start_ticks(pid) or 0}"


def is_named_alive(name: str) -> bool:
    """Whether the process of this "PID:START" is there.  Without a known start, any process of that pid counts."""
    pid, _, started = name.partition(":")
    ticks = int(started or 0)
    return is_alive(int(pid), ticks) if ticks else start_ticks(int(pid)) is not None


def send_signal(pid: int, started: int, sig: int, *, run: str | None, group: bool = False) -> bool:
    """Signal that process (or the whole group that it leads); False if it is gone, or nothing proves that it is ours.

    run: the URL that it must say it works for; None for a child of this process, which needs no proof.
    """
    if not is_alive(pid, started) or not (run is None or run_marks.works_for(pid, run)):
        return False
    with suppress(ProcessLookupError):
        leads = group and pid > 1 and os.getpgid(pid) == pid != os.getpgrp()  # kill(-1) would signal every process
        (os.killpg if leads else os.kill)(pid, sig)
        return True
    return False


def describe_exit(exit_code: int | None, ours: bool = True) -> str:
    """-9 -> "killed by SIGKILL", 3 -> "exit code 3 (fenced)".   ours: it is a replica's, whose codes have names."""
    if exit_code is None:
        return "gone; its exit code was not seen"
    if exit_code >= 0:
        word = exitcodes.NAMES.get(exit_code) if ours or not exit_code else None
        return f"exit code {exit_code}" + (f" ({word})" if word else "")
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
