"""Call the user's hint in a replica: an error in it costs only that hint.

    hint(row, error) ── raises, or returns neither text nor None ──▶ None, and an event for the host, once a minute

Not promised: to end a hint that hangs; the watchdog ends that session.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from inner.channels.hints import Hint
from inner.host import Host

EMIT_EVERY_S = 60.0


class ForgivingHint:
    """A Hint that wraps the user's, and its `prepare` if there is one. It never raises."""

    def __init__(self, hint: Hint, host: Host, clock: Callable[[], float]) -> None:
        self._hint = hint
        self._host = host
        self._clock = clock
        self._last_emit_at = -math.inf
        self._failures = 0

    def prepare(self, asked: Any) -> None:
        ask: Callable[[Any], None] | None = getattr(self._hint, "prepare", None)
        if ask is None:
            return
        try:
            ask(asked)
        except Exception as error:
            self._emit_failure(error)

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None:
        try:
            found = self._hint(row, error)
            if found is not None and not isinstance(found, str):
                raise TypeError(f"a hint is text or None, found {found!r}")
            return found
        except Exception as failure:
            self._emit_failure(failure)
            return None

    def _emit_failure(self, error: Exception) -> None:
        now = self._clock()
        self._failures = self._failures + 1
        if now - self._last_emit_at >= EMIT_EVERY_S:
            name = getattr(self._hint, "__name__", type(self._hint).__name__)
            text = f"the hint {name} failed: {type(error).__name__}: {error} ({self._failures} since the last report)"
            self._host.emit("hint_failed", f"{text}; those turns have no hint", failures=self._failures)
            self._last_emit_at = now
            self._failures = 0
