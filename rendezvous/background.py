"""Jobs in the background, concurrent jobs, and the parts of a loop's turn.

    submit(job) ──▶ [ job job ] ──▶ one thread, in order          snapshots, announced means, garbage;
    drain()     ──▶ returns when all submitted jobs are done      a third job waits until there is room

    at_once(job, job, …) ──▶ a thread for each, returns when      requests that take long
                             all have ended
    in_turn(job, job, …) ──▶ one after the other                  requests that cost no more than a copy

The engine takes a `Background` and a `Together` as arguments and starts no thread itself.  The engine's caller chooses
them (`together_on`); the simulator passes greenlets.

    Parts().run(part, part, …) ──▶ one after the other, by name   turns of a loop that must not end: the heartbeat

A background job that fails is reported and not repeated: another replica can do the same work.  A part that fails is
run again in the next turn.  If its error is not a RendezvousError, the error is reported, and after `TRIES` such turns
in a row the loop ends with an error, because a replica must not train without this part.

Not promised: that jobs are done if their process ends without `drain`.  A killed job leaves no half-written object.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

from rendezvous.errors import GaveUp, HeartbeatLost, RendezvousError

T = TypeVar("T")

Job = Callable[[], None]
Emit = Callable[..., None]  # (event, **fields): writes an event that people read
WAITING = 2  # maximal number of jobs in the queue beside the running job; each job may hold a copy of the model
TRIES = 20  # turns in a row in which a part may fail: at the slowest beat (5 s) the part is missing for 100 s
Together = Callable[..., None]  # runs its arguments, which are jobs, and returns when all have ended
AT_ONCE = 16  # maximal number of small requests at the same time; each has a thread


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
    """Run the job in the background.  A RendezvousError is only reported, because other replicas can do the job."""

    def run_and_report() -> None:
        try:
            job()
        except RendezvousError as error:
            emit("not_written", trouble=seen_words(error))

    background.submit(run_and_report)


def seen_words(error: Exception) -> str:
    """Return an error's words for a replica that goes on: without GaveUp's advice, which is for a replica that ends."""
    return str(error.__cause__ or error) if isinstance(error, GaveUp) else str(error)


def in_turn(*jobs: Job) -> None:
    """Run the jobs one after the other: for stores where a request costs only CPU time."""
    for job in jobs:
        job()


def at_once(*jobs: Job) -> None:
    """Run all jobs at the same time.   When all have ended, raise the first error."""
    errors: list[BaseException] = []

    def run(job: Job) -> None:
        try:
            job()
        except KeyboardInterrupt:  # you end the command: do not wait for the other requests
            raise
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


def fetch_together(
    together: Together, ask: Callable[[str], T], keys: Iterable[str], most: int = AT_ONCE
) -> dict[str, T]:
    """Return key -> ask(key), with at most `most` requests at the same time."""
    answers = dict[str, T]()

    def fetch_one(key: str) -> None:
        answers[key] = ask(key)

    keys = list(keys)
    for at in range(0, len(keys), most):
        together(*(partial(fetch_one, key) for key in keys[at : at + most]))
    return answers


def together_on(store: object) -> Together:
    """Return the function that makes several requests to `store`: `in_turn` if they are cheap, else `at_once`."""
    return in_turn if getattr(store, "cheap", False) else at_once


class Worker:
    """A `Background` with one thread, which starts with the first job.   emit: called when a job fails."""

    def __init__(self, emit: Emit = no_emit) -> None:
        self._emit = emit
        self._jobs: deque[Job] = deque()  # the first job is running
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._ended: BaseException | None = None

    def submit(self, job: Job) -> None:
        """Wait for room in the queue, and add the job.   Raise RendezvousError at once if the thread has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or len(self._jobs) <= WAITING)
            self._refuse_if_ended()
            self._jobs.append(job)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="background", daemon=True)
                self._thread.start()

    def drain(self) -> None:
        """Wait until all jobs are done.   Raise RendezvousError as `submit` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended is not None or not self._jobs)
            self._refuse_if_ended()

    def _refuse_if_ended(self) -> None:
        if self._ended is not None:
            raise RendezvousError(
                f"the thread that writes snapshots and announced means has ended ({_describe_error(self._ended)}). "
                "This replica ends; run the same command again to continue"
            ) from self._ended

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._jobs))
                    job = self._jobs[0]
                self._run_job(job)
                del job  # a job may hold a copy of the model
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
                "warning",
                kind="background",
                text=f"a background job failed: {_describe_error(error)}; others continue",
            )


class Parts:
    """Runner of the parts of a turn.  A part that fails does not stop the other parts, in this turn or a later turn.

    emit: called for an error that is not a RendezvousError, once for each part and type of error.
    """

    def __init__(self, emit: Emit = no_emit) -> None:
        self._emit = emit
        self._failures = Counter[str]()
        self._reported = set[tuple[str, str]]()

    def run(self, *parts: Job) -> None:
        """Run the parts.   Raise HeartbeatLost if a part has failed in `TRIES` turns in a row."""
        for part in parts:
            name = getattr(part, "__name__", repr(part)).strip("_").replace("_", " ")
            try:
                part()
            except HeartbeatLost:
                raise
            except RendezvousError:
                self._failures.pop(name, None)  # expected, mostly an error of the store: the next turn tries again
            except Exception as error:
                self._count_failure(name, error)
            else:
                self._failures.pop(name, None)

    def _count_failure(self, name: str, error: Exception) -> None:
        self._failures[name] += 1
        if self._failures[name] >= TRIES:
            raise HeartbeatLost(
                f"'{name}' of the heartbeat failed {TRIES} times in a row, last with {_describe_error(error)}. Without "
                "it a replica does not see its successor, a stop or the end of its budget, so this replica ends; "
                "run the same command again to continue"
            ) from error
        if (name, type(error).__name__) not in self._reported:
            self._reported.add((name, type(error).__name__))
            self._emit("warning", kind="heartbeat", text=f"'{name}' failed: {_describe_error(error)}; trying again")


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
