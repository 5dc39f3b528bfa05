"""What a replica prints, wherever it runs.

    run, slot ──find──▶ handle ──▶ lines · follow         "supervisor": the detached one's own log

Not promised: the log of a launch before the newest one of its slot, nor of one whose platform keeps none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diloco.report import SUPERVISOR
from executors.address import UsageError
from executors.base import Handle, ServerlessExecutor
from executors.intent import slots_of
from executors.lease import supervisor_of
from executors.local import process_folder
from executors.logfile import LogFile
from executors.mixed import build
from rendezvous.clock import Clock, SystemClock
from rendezvous.membership import Wanted
from rendezvous.store import open_store

PAUSE_S = 0.2


@dataclass(frozen=True)
class ReplicaLog:
    executor: ServerlessExecutor
    found: Handle

    @property
    def handle(self) -> dict[str, Any]:
        return self.found.to_dict()

    def lines(self, tail: int | None) -> list[str]:
        return self.executor.logs(self.found, tail)

    def follow(self, tail: int | None) -> Iterator[str]:
        return self.executor.follow(self.found, tail)


@dataclass(frozen=True)
class SupervisorLog:
    """Of a supervisor that is a process of this machine."""

    url: str
    file: LogFile
    clock: Clock

    handle = None

    def lines(self, tail: int | None) -> list[str]:
        return self.file.lines(tail)

    def follow(self, tail: int | None) -> Iterator[str]:
        return self.file.follow(tail, lambda: supervisor_of(open_store(self.url)) is None, self.clock, PAUSE_S)


@contextmanager
def log_of(url: str, wanted: Wanted, slot: str) -> Iterator[ReplicaLog | SupervisorLog]:
    executor = build(wanted.places)
    try:
        found = {h.slot: h for h in executor.find(url)}
        own = process_folder(url) / "supervisor.log"
        if slot in found:
            yield ReplicaLog(executor, found[slot])
        elif slot == SUPERVISOR and own.exists():
            yield SupervisorLog(url, LogFile(own), SystemClock())
        else:
            raise UsageError(_nowhere(slot, wanted, found))
    finally:
        executor.close()


def _nowhere(slot: str, wanted: Wanted, found: dict[str, Handle]) -> str:
    there = sorted({*slots_of(wanted.replicas), *found})
    if slot in there:
        return f"{slot} has not been launched yet; `diloco status` says what the run waits for"
    if slot == SUPERVISOR:
        return "no detached supervisor of this run has written a log on this machine"
    return f"there is no slot {slot!r} in this run; there are {', '.join(there)}"
