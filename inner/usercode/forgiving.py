"""Call the user's hint and process reward in a replica: an error costs only that hint, or the scores of one batch.

    hint(row, error)   raises, or returns neither text nor None ──▶ None, and an event for the host, once a minute
    score(rollouts)    raises, or returns invalid values  ──▶ no scores, and an event for the host, once a minute
                       └ in all of a session's first TRIES batches ──▶ InnerError: this session ends

Not promised: to end a hint or a process reward that hangs; the watchdog ends that session.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inner.channels.hints import Hint
from inner.channels.lessons import Rollout
from inner.channels.process_reward import ProcessReward, ScoredSpan, score_steps
from inner.errors import InnerError
from inner.host import Host
from inner.usercode.deadline import is_end
from inner.usercode.reward_calls import EMIT_EVERY_S

TRIES = 3  # a session ends if its first TRIES batches all fail


class _Failures:
    """Reports failures to a host, once a minute.   event: its name.   what: the failed part.   cost: the effect."""

    def __init__(self, event: str, what: str, cost: str, host: Host, clock: Callable[[], float]) -> None:
        self._event = event
        self._what = what
        self._cost = cost
        self._host = host
        self._clock = clock
        self._last_emit_at = -math.inf
        self._count = 0

    def note(self, error: BaseException) -> None:
        now = self._clock()
        self._count += 1
        if now - self._last_emit_at >= EMIT_EVERY_S:
            text = f"{self._what} failed: {type(error).__name__}: {error} ({self._count} since the last report)"
            self._host.emit(self._event, f"{text}; {self._cost}", failures=self._count)
            self._last_emit_at = now
            self._count = 0


class ForgivingHint:
    """A Hint that wraps the user's hint, and its `prepare` if it has one. It never raises."""

    def __init__(self, hint: Hint, host: Host, clock: Callable[[], float]) -> None:
        self._hint = hint
        name = getattr(hint, "__name__", type(hint).__name__)
        self._failures = _Failures("hint_failed", f"the hint {name}", "those turns have no hint", host, clock)

    def prepare(self, asked: Any) -> None:
        ask: Callable[[Any], None] | None = getattr(self._hint, "prepare", None)
        try:
            if ask is not None:
                ask(asked)
        except BaseException as error:
            if is_end(error):
                raise
            self._failures.note(error)

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None:
        try:
            found = self._hint(row, error)
            if found is not None and not isinstance(found, str):
                raise TypeError(f"a hint must be text or None, found {found!r}")
            return found
        except BaseException as failure:
            if is_end(failure):
                raise
            self._failures.note(failure)
            return None


class ForgivingProcess:
    """Scores rollouts like `score_steps`; returns [] if the user's code fails.

    Raises InnerError at a session's third failed batch if no batch worked: the run would cost money for no scores."""

    def __init__(self, process: ProcessReward, host: Host, clock: Callable[[], float]) -> None:
        self._process = process
        what, cost = f"the process reward {process.name}", "those batches learn from their rewards alone"
        self._failures = _Failures("process_failed", what, cost, host, clock)
        self._failed_first = 0
        self._worked = False

    def __call__(self, rollouts: Sequence[Rollout]) -> list[ScoredSpan]:
        try:
            steps = score_steps(self._process, rollouts)
        except BaseException as error:
            if is_end(error):
                raise
            self._failures.note(error)
            self._failed_first += not self._worked
            if self._failed_first == TRIES:
                raise InnerError(
                    f"the process reward {self._process.name} failed for the first {TRIES} batches of this session: "
                    f"{type(error).__name__}: {error}\n  next: correct it and start another --run, or leave "
                    "[inner.process] out."
                ) from error
            return []
        self._worked = True
        return steps
