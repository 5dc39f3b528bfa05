"""Work that nobody waits for, and work that goes together.

    submit(job) ──▶ [ job job ] ──▶ one thread, in order          snapshots, announced means, garbage;
    drain()     ──▶ all that was submitted is done                a third job waits until there is room

    at_once(job, job, …) ──▶ a thread each, back when all are     requests that each take long
    in_turn(job, job, …) ──▶ one after the other                  requests that cost no more than a copy

The engine takes a `Background` and a `Together` as arguments and starts no thread itself: whoever builds it decides
(`together_on`), and the simulator gives it greenlets.

A job that fails is told and forgotten: everything here can be done again by somebody else.

Not promised: that a job is done when its process ends without `drain`; a killed one leaves nothing half-visible.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]
Together = Callable[..., None]  # of jobs


class Background(Protocol):
    def submit(self, job: Job) -> None: ...
    def drain(self) -> None: ...


class Inline:
    """At once, in the caller's own time."""

    def submit(self, job: Job) -> None:
        job()

    def drain(self) -> None: ...


def in_turn(*jobs: Job) -> None:
    """One after the other: where a request costs nothing but CPU time."""
    for job in jobs:
        job()


def at_once(*jobs: Job) -> None:
    """All at the same time.   Raises the first error when all have ended."""
    errors: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs[1:]]
    for thread in threads:
        thread.start()
    for job in jobs[:1]:
        run(job)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def together_on(store: object) -> Together:
    """How a replica makes requests that go together on this store: at once, unless each costs no more than a copy."""
    return in_turn if getattr(store, "cheap", False) else at_once


class Worker:
    """One thread, started with the first job."""

    def __init__(self) -> None:
        self._jobs: queue.Queue[Job] = queue.Queue(maxsize=2)
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="background", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def drain(self) -> None:
        self._jobs.join()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                job()
            finally:
                self._jobs.task_done()
