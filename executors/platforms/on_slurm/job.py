"""One Slurm job: the function that runs on its node, and the job's files.

    r00.1/  submit.1   made by one process, which alone may submit the job
            card.json  the handle
            cancelled  an executor asked the job to leave
            until.json  Unix time at which the launcher's lease ends, in the short form
            end.json   its end: {"exit_code", "reason", "value", "tail"}, written on the node

Not promised: end.json for a job whose node failed; its state then comes from Slurm.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from diloco.process import exitcodes, processes
from diloco.process.own_files import read_json, write_json
from executors.platforms.base import Handle
from executors.platforms.container import run_replica
from executors.platforms.platform import read_card

NAME = "slurm"
CARD = "card.json"
END = "end.json"
CANCELLED = "cancelled"
UNTIL = "until.json"
LOCAL_JOB = "submitit.local._local"  # the module that submitit's local mode runs for a job


class Asked(BaseException):
    """Raised by the signal handler: Slurm or a user has asked this job to leave."""


def run_job(raw: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Run the replica on the node, for submitit, and write its end into the folder."""
    why: list[int] = []

    def asked(number: int, _: object) -> NoReturn:
        why.append(number)
        raise Asked

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # submitit would ignore SIGTERM
        signal.signal(number, asked)
    try:
        end = run_replica(raw, NAME, until=lambda: read_json(Path(folder) / UNTIL) or 0.0)
    except Asked:
        code = exitcodes.LEFT if why[-1] == signal.SIGTERM else exitcodes.RESUME  # USR1, USR2: the time limit is near
        end = {"exit_code": code, "reason": processes.describe_exit(code), "value": None, "tail": []}
    write_json(str(Path(folder) / END), end)
    return end


def written_end(folder: Path) -> Any:
    """Return the end that the job wrote on its node, or None."""
    return read_json(folder / END)


def was_cancelled(folder: Path) -> bool:
    return (folder / CANCELLED).exists()


def create_exclusively(path: Path) -> bool:
    """Create the file; False if it exists."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def submitted(folder: Path, known: Handle) -> Handle | None:
    """Return the handle that a launch's submitter wrote; None without a handle of this launch."""
    return read_card(folder / CARD, known, str(folder))


def runs_here(handle: Handle, folder: Path) -> bool:
    """Whether the handle's process runs on this machine, and by its command line runs submitit for this folder."""
    words = command_line(handle.pid)
    return LOCAL_JOB in words and str(folder) in words and processes.is_alive(handle.pid, handle.started)


def stop_here(handle: Handle, folder: Path, kill: bool) -> None:
    """Kill a job of submitit's local mode, or ask it to leave."""
    if not runs_here(handle, folder):
        return
    if kill:
        kill_tree(handle.pid, handle.started)
    else:
        processes.send_signal(handle.pid, handle.started, signal.SIGTERM, run=None)


def kill_tree(pid: int, started: int) -> None:
    """Kill a process of this machine and all its descendants (submitit's local jobs share our process group)."""
    if not processes.is_alive(pid, started):
        return
    family = [pid]
    for parent in family:  # the list grows in this loop
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                family += map(int, task.read_text().split())
    for member in family:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; [] if the process has ended, or this user may not read its words."""
    with suppress(OSError):
        if sys.platform.startswith("linux"):
            return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return []
