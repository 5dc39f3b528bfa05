"""Work in the background, and work that goes together.

    submit(job) ──▶ [ job job ] ──▶ one thread, in order          snapshots, announced means, garbage;
    drain()     ──▶ all that was submitted is done                a third job waits until there is room

    at_once(job, job, …) ──▶ a thread each, back when all are     requests that each take long
    in_turn(job, job, …) ──▶ one after the other                  requests that cost no more than a copy

The engine takes a `Background` and a `Together` as arguments and starts no thread itself: its caller decides
(`together_on`), and the simulator gives it greenlets.

    Parts().run(part, part, …) ──▶ one after the other, by name   turns of a loop that must not end: the heartbeat

A job that fails is reported and forgotten: another replica can do all of this work again.  So is a part of a turn; a
part that fails again and again ends the loop with words, because its owner must not go on without it.

Not promised: that a job is done when its process ends without `drain`; a killed one leaves nothing half-visible.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from rendezvous.errors import HeartbeatLost, RendezvousError

T = TypeVar("T")

Job = Callable[[], None]
Emit = Callable[..., None]  # (event, **fields): where remarks for people go
WAITING = 2  # jobs beside the one under way; each may hold a copy of the model
TRIES = 20  # turns in a row in which a part may fail: at the slowest beat (5 s) the part is missing for 100 s
Together = Callable[..., None]  # of jobs
AT_ONCE = 16  # small requests; a thread each


def no_emit(event: str, **fields: object) -> None:
    """Ignore the event."""


class Background(Protocol):
    def submit(self, job: Job) -> None: ...
    def drain(self) -> None: ...


class Inline:
    """A background that runs each job at once, in the caller's thread."""

    def submit(self, job: Job) -> None:
        job()

    def drain(self) -> None: ...


def submit_reported(background: Background, job: Job, emit: Emit) -> None:
    """Run the job in the background; a refusal by the store is reported, and the job is left to other replicas."""

    def run_and_report() -> None:
        try:
            job()
        except RendezvousError as error:
            emit("not_written", trouble=str(error))

    background.submit(run_and_report)


def in_turn(*jobs: Job) -> None:
    """Run the jobs one after the other: for stores where a request costs only CPU time."""
    for job in jobs:
        job()


def at_once(*jobs: Job) -> None:
    """Run all jobs at the same time.   Raises the first error when all have ended."""
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


def fetch_together(together: Together, ask: Callable[[str], T], keys: Iterable[str]) -> dict[str, T]:
    """Return key -> answer, with `AT_ONCE` requests at the same time."""
    answers = dict[str, T]()

    def fetch_one(key: str) -> None:
        answers[key] = ask(key)

    keys = list(keys)
    for at in range(0, len(keys), AT_ONCE):
        together(*(partial(fetch_one, key) for key in keys[at : at + AT_ONCE]))
    return answers


def together_on(store: object) -> Together:
    """The way to make requests together on this store: at once, unless each costs no more than a copy."""
    return in_turn if getattr(store, "cheap", False) else at_once


class Worker:
    """One thread, started with the first job.   emit: hears of a job that failed."""

    def __init__(self, emit: Emit = no_emit) -> None:
        self._emit = emit
        self._jobs: deque[Job] = deque()  # the first one is under way
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: BaseException | None = None

    def submit(self, job: Job) -> None:
        """Queue the job, after a wait for room.   Raises RendezvousError, without a wait, once the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or len(self._jobs) <= WAITING)
            self._refuse_if_ended()
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="background", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until all jobs are done.   Raises as `submit` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or not self._jobs)
            self._refuse_if_ended()

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise RendezvousError(
                f"the thread that writes snapshots and announced means has ended ({_describe_error(self._ended)}). "
                "This replica ends; run the same command again to go on"
            ) from self._ended

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._jobs))
                    job = self._jobs[0]
                self._run_job(job)
                del job  # it may hold a copy of the model
                with self._changed:
                    self._jobs.popleft()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._ended = error
                self._changed.notify_all()

    def _run_job(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._emit(
                "warning", kind="background", text=f"a background job failed: {_describe_error(error)}; others go on"
            )


class Parts:
    """Runner of the parts of a turn: no part hinders another one, now or in a later turn.

    emit: hears of a failure that is not a RendezvousError, once for each part and kind of error.
    """

    def __init__(self, emit: Emit = no_emit) -> None:
        self._emit = emit
        self._failures = Counter[str]()
        self._reported = set[tuple[str, str]]()

    def run(self, *parts: Job) -> None:
        """Run the parts.   Raises HeartbeatLost where one part has failed in `TRIES` turns in a row."""
        for part in parts:
            name = getattr(part, "__name__", repr(part)).strip("_").replace("_", " ")
            try:
                part()
            except HeartbeatLost:
                raise
            except RendezvousError:
                self._failures.pop(name, None)  # foreseen, the store's mostly: the next turn tries again
            except Exception as error:
                self._count_failure(name, error)
            else:
                self._failures.pop(name, None)

    def _count_failure(self, name: str, error: Exception) -> None:
        self._failures[name] += 1
        if self._failures[name] >= TRIES:
            raise HeartbeatLost(
                f"'{name}' of the heartbeat failed {TRIES} times in a row, last with {_describe_error(error)}. Without "
                "it a replica does not hear of its successor, of a stop or of its budget's end, so this replica ends; "
                "run the same command again to go on"
            ) from error
        if (name, type(error).__name__) not in self._reported:
            self._reported.add((name, type(error).__name__))
            self._emit("warning", kind="heartbeat", text=f"'{name}' failed: {_describe_error(error)}; trying again")


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
