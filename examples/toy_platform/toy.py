"""A platform for replicas on one page: a folder, in which every process has a card and a log.

    submit ─▶ FOLDER/r00.1.card   the handle, which another process finds again
              FOLDER/r00.1.log    what `python -m executors.platforms.container SPEC toy` prints; the end comes last
              FOLDER/r00.1.asked  a user cancelled it

The container module runs the replica as its child, passes signals on, and reports the end as data, on every platform
that starts a command.  A platform only has to start, observe, stop and find a command.

Not promised: anything about a launcher that dies between the start of a process and its card.
"""

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco.process import processes
from executors.platforms.base import Handle, ReplicaSpec, State, Status
from executors.platforms.container import ENDED, STARTED, read_end
from executors.platforms.executor import Executor
from executors.platforms.machine import oom
from executors.platforms.machine.logfile import LogFile
from executors.platforms.platform import NotStarted, missing_secret
from rendezvous.clock import Clock

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # replicas that share cores wait for each other's threads


class ToyExecutor(Executor):
    """The platform.   folder: has the cards and logs."""

    name = "toy"
    pause_s = 0.1

    def __init__(self, *, folder: str | Path, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self._folder = Path(folder)

    # ------------------------------------------------------------------ starting

    def plan_line(self, spec: ReplicaSpec) -> str:
        return f"a process of this machine, log {self._file(self.new_handle(spec), '.log')}"

    def fault_of(self, spec: ReplicaSpec) -> str:
        return f"a toy has no GPU {spec.gpu[0]!r}; ask for none" if spec.gpu else missing_secret(spec)

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle | NotStarted]:
        return [self._start(spec) for spec in specs]

    def _start(self, spec: ReplicaSpec) -> Handle | NotStarted:
        handle = self.new_handle(spec)
        card = self._file(handle, ".card")
        try:
            card.parent.mkdir(parents=True, exist_ok=True)
            with card.open("a+") as file:  # one launcher at a time, and the second finds the card of the first
                fcntl.flock(file, fcntl.LOCK_EX)
                if (known := _read_card(card)) is not None:
                    return known
                started = self._run(spec, handle)
                file.write(json.dumps(started.to_dict()))
        except OSError as error:
            return NotStarted(str(error))
        return started

    def _run(self, spec: ReplicaSpec, handle: Handle) -> Handle:
        command = [sys.executable, "-m", "executors.platforms.container", json.dumps(spec.to_dict()), self.name]
        env = {**ONE_THREAD, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        with self._file(handle, ".log").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        process.returncode = 0  # it may live longer than this process: no warning about that
        ticks = processes.start_ticks(process.pid) or 0
        about = {"native": processes.process_name(process.pid), "pid": process.pid, "started": ticks}
        return replace(handle, launched_at=self._clock.wall(), **about)

    # ------------------------------------------------------------------ watching

    def observe(self, handles: Sequence[Handle]) -> list[Status]:
        return [self._look_at(handle) for handle in handles]

    def _look_at(self, handle: Handle) -> Status:
        if processes.is_alive(handle.pid, handle.started):
            return Status(handle, State.RUNNING)
        end = self._read_end(handle)
        if end.get("exit_code") == 0:
            return Status(handle, State.SUCCEEDED, end["reason"], 0)
        if self._file(handle, ".asked").exists():
            return Status(handle, State.CANCELLED, "cancelled", end.get("exit_code"))
        if not end:
            return Status(handle, State.LOST, "gone without a word")
        outside = oom.from_outside(end["exit_code"], end["reason"])
        return Status(handle, State.LOST if outside else State.FAILED, end["reason"], end["exit_code"])

    def log_file(self, handle: Handle) -> LogFile:
        return LogFile(self._file(handle, ".log"), lambda line: not line.startswith((STARTED, ENDED)))

    def read_value(self, handle: Handle) -> Any:
        return self._read_end(handle).get("value")

    def _read_end(self, handle: Handle) -> dict[str, Any]:
        return read_end(LogFile(self._file(handle, ".log")).lines()) or {}

    # ------------------------------------------------------------------ ending

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        for handle in handles:
            self._file(handle, ".asked").touch()
            number = signal.SIGKILL if kill else signal.SIGTERM
            processes.send_signal(handle.pid, handle.started, number, run=handle.run, group=kill)

    def discover(self, run: str) -> list[Handle]:
        cards = [_read_card(path) for path in self._run_folder(run).glob("*.card")]
        return sorted((card for card in cards if card is not None), key=lambda card: card.attempt)

    def _file(self, handle: Handle, end: str) -> Path:
        return self._run_folder(handle.run) / f"{handle.slot}.{handle.attempt}{end}"

    def _run_folder(self, run: str) -> Path:
        return self._folder / hashlib.sha256(run.encode()).hexdigest()[:16]


def _read_card(path: Path) -> Handle | None:
    with suppress(OSError, ValueError):
        return Handle.from_dict(json.loads(path.read_text()))
    return None
