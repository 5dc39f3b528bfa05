"""Reads the status and the log of a call on Modal, and finds duplicate calls of a launch.

    get(timeout=0) ─┬─ a value: the replica's end        ─▶ SUCCEEDED, FAILED, LOST (a signal, or no exit code)
                    ├─ TimeoutError, the builtin one      ─▶ PENDING until its container began, then RUNNING
                    ├─ FunctionTimeoutError               ─▶ FAILED          NotFound, OutputExpired ─▶ LOST
                    ├─ InternalFailure                    ─▶ LOST
                    └─ RemoteError                        ─▶ CANCELLED if an executor asked, else LOST
                       (if the error says that memory ran out: FAILED, the replica's fault)
    logs.fetch(since) ─▶ lines, each once

If a launch's reply was lost, the client or another launcher calls again:

    register: launch/r00.1 ─▶ the only call that runs it
              duplicate/r00.1/CALL ◀── a container that finds another call there writes this entry and ends
    Function.get_current_stats ─▶ (inputs that wait or run) minus (registered calls) = number of unregistered calls

Modal has no public list of an app's calls.  So a duplicate call that still waits for a machine can be counted, and
ended with its app, but its id is unknown.  It costs nothing until a container starts it, reads one key and ends.

Not promised: a log line that Modal shows more than half a minute late, or that Modal's count is up to date.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

from executors.platforms.base import Handle, State, Status, Unavailable
from executors.platforms.container import ended_as
from executors.platforms.machine import oom
from executors.platforms.on_modal.app import SUPERVISE, Register, app_name, handle_of
from executors.platforms.on_modal.client import no_answer, sdk
from rendezvous.clock import Clock

OVERLAP = timedelta(seconds=30)  # part of the log that is fetched again: lines may appear late and out of order
FOLLOW_S = 1.0
MOST_S = 15.0
TRIES = 3
MOST_ENTRIES = 20_000
LOOK_S = 10.0  # seconds between two looks at the register


def look_up_call(handle: Handle, register: Register, began: bool) -> tuple[Status, Mapping[str, Any]]:
    """Return the status of a call, and its end if it has one.  Raise Modal's error if Modal does not answer.

    began: whether we know that the call's container has begun.
    """
    modal = sdk()
    e = modal.exception
    try:
        end = modal.FunctionCall.from_id(handle.native).get(timeout=0)
        return ended_as(handle, end), end
    except TimeoutError:  # the builtin one: the call has not ended
        running = began or register.began(handle.slot, handle.attempt)
        return Status(handle, State.RUNNING if running else State.PENDING), {}
    except e.FunctionTimeoutError as error:
        return Status(handle, State.FAILED, f"ended by Modal at its time limit: {error}"), {}
    except (e.InternalFailure, e.OutputExpiredError, e.NotFoundError) as error:
        state = State.FAILED if oom.says_out_of_memory(str(error)) else State.LOST
        return Status(handle, state, f"{type(error).__name__}: {error}"), {}
    except e.RemoteError as error:
        if oom.says_out_of_memory(str(error)):
            return Status(handle, State.FAILED, f"ended by Modal: {error}"), {}
        asked = not str(error) or register.asked(handle.slot, handle.attempt)
        text = f"cancelled {error}".strip() if asked else f"ended by Modal: {error}"
        return Status(handle, State.CANCELLED if asked else State.LOST, text), {}
    except Exception as error:
        if no_answer(error):
            raise
        return Status(handle, State.FAILED, f"{type(error).__name__}: {error}", 1), {}  # e.g. its import failed


# ---------------------------------------------------------------------- logs


def log_entries(
    handle: Handle, clock: Clock, since: datetime | None = None, tail: int | None = None, tries: int = TRIES
) -> list[Any]:
    """Return Modal's log entries from `since` on, or enough for `tail` lines.  Raise Unavailable for each error."""
    for attempt in range(1, tries + 1):
        try:
            logs = sdk().FunctionCall.from_id(handle.native).logs
            return list(logs.fetch(since=since) if tail is None else logs.tail(min(MOST_ENTRIES, 2 * tail + 20)))
        except Exception as error:
            if not no_answer(error) or attempt == tries:
                raise Unavailable(f"no log of {handle.slot} from Modal: {error}") from None
            clock.sleep(0.2 * 2**attempt)
    return []


class Follower:
    """Reads new log lines, each once, also after a broken connection."""

    def __init__(self, handle: Handle, clock: Clock) -> None:
        self._handle = handle
        self._clock = clock
        self._shown = Counter[tuple[datetime, str]]()
        self._since: datetime | None = None
        self._part = ""

    def follow(self, over: Callable[[], bool], tail: int | None = None) -> Iterator[str]:
        """Yield lines until `over()`.   tail: how many of the existing lines to yield, at most."""
        pause = FOLLOW_S
        first = True
        while True:
            last = over()  # before the log is read, so that no line is missed
            try:
                lines = self.new(tail if first else None)
            except Unavailable:
                pause = min(MOST_S, 2 * pause)
            else:
                yield from lines[max(0, len(lines) - tail) :] if first and tail is not None else lines
                pause = FOLLOW_S
                first = False
                if last:
                    break
            self._clock.sleep(pause)
        if self._part:
            yield self._part

    def new(self, tail: int | None = None) -> list[str]:
        """Return the new whole lines.   Raises Unavailable."""
        found = log_entries(self._handle, self._clock, self._since, tail, tries=1)
        seen = Counter[tuple[datetime, str]]()
        text = self._part
        for entry in found:
            key = (entry.timestamp, entry.message)
            seen[key] += 1
            if seen[key] > self._shown[key]:
                self._shown[key] += 1
                text += entry.message
        if found:
            before = found[0].timestamp if tail is not None else self._since  # older lines were not requested
            since = found[-1].timestamp - OVERLAP
            self._since = since = since if before is None else max(before, since)
            self._shown = Counter({k: n for k, n in self._shown.items() if k[0] >= since})
        *lines, self._part = text.split("\n")
        return lines


# ---------------------------------------------------------------------- duplicate calls of a launch


class Duplicates:
    """The duplicate calls that one executor has reported."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked: dict[str, float] = {}
        self._said: set[str] = set()

    def new(self, run: str, register: Register) -> list[Handle]:
        """Return the duplicate calls that are new since the last look, [] within LOOK_S.  Return each call once."""
        now = self._clock.now()
        if now - self._looked.get(run, float("-inf")) < LOOK_S:
            return []
        self._looked[run] = now
        fresh = [(slot, n, e) for slot, n, e in register.duplicates() if e["call"] not in self._said]
        self._said |= {entry["call"] for _, _, entry in fresh}
        return [handle_of(run, slot, attempt, entry) for slot, attempt, entry in fresh]


def count_inputs(run: str, register: Register) -> int:
    """Return the number of calls of the run's app that wait or run, of all launchers."""
    functions = [*(kind.function for kind in register.kinds()), SUPERVISE]
    count = 0
    for name in functions:
        with suppress(sdk().exception.NotFoundError):
            stats = sdk().Function.from_name(app_name(run), name).get_current_stats()
            count += stats.backlog + stats.num_running_inputs
    return count
