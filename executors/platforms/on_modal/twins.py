"""Duplicate calls of a launch on Modal: a reply was lost, and the client or another launcher called again.

    register: launch/r00.1 ─▶ the only call that runs it
              twin/r00.1/CALL ◀── a container that finds another call there writes this entry and ends
    Function.get_current_stats ─▶ inputs that wait or run ─ calls that we know ─▶ number of unregistered calls

Modal has no public list of an app's calls.  So a duplicate call that still waits for a machine can be counted, and
ended with its app, but its id is unknown.  It costs nothing until its container starts, reads one key and ends.

Not promised: that Modal's count is up to date.
"""

from collections.abc import Mapping
from typing import Any

from executors.platforms.base import Handle
from executors.platforms.on_modal.app import NAME, SUPERVISE, Register, app_name
from executors.platforms.on_modal.client import sdk
from rendezvous.clock import Clock

LOOK_S = 10.0  # between two looks at the register


class Twins:
    """The duplicate calls that one executor has reported."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked: dict[str, float] = {}
        self._said: set[str] = set()

    def new(self, run: str, register: Register) -> list[Handle]:
        """Return the duplicate calls that were noted since the last look; each only once, because it ends at once."""
        now = self._clock.now()
        if now - self._looked.get(run, float("-inf")) < LOOK_S:
            return []
        self._looked[run] = now
        fresh = [(slot, n, e) for slot, n, e in register.twins() if e["call"] not in self._said]
        self._said |= {entry["call"] for _, _, entry in fresh}
        return [_twin_handle(run, slot, attempt, entry) for slot, attempt, entry in fresh]


def _twin_handle(run: str, slot: str, attempt: int, entry: Mapping[str, Any]) -> Handle:
    about = {"native": entry["call"], "launched_at": entry["launched_at"], "usd_per_hour": entry["usd_per_hour"]}
    return Handle(run, slot, attempt, NAME, **about)


def count_inputs(run: str, register: Register) -> int:
    """Return the number of calls of the run's app that wait or run, of all launchers."""
    functions = [*(kind.function for kind in register.kinds()), SUPERVISE]
    return sum(_count_function_inputs(app_name(run), name) for name in functions)


def _count_function_inputs(app: str, function: str) -> int:
    try:
        stats = sdk().Function.from_name(app, function).get_current_stats()
    except sdk().exception.NotFoundError:
        return 0
    return stats.backlog + stats.num_running_inputs
