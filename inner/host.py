"""The messages and requests of an inner loop to its driver when the user's own code fails.

    inner loop ── note("reward failed: 429 (64 of 64 completions, try 2 of 4)") ──▶ heartbeat ──▶ `diloco status`
               ── emit("reward_failed", …) ──▶ log                └ and the watchdog hears that nothing hangs
               ── pause(4.0) ──▶ a wait that ends early if this replica is asked to leave

Not promised: that a driver listens. In a loop that belongs to no run, `emit` only warns, and `pause` only sleeps.
"""

import time
import warnings
from typing import Any, Protocol


class Host(Protocol):
    def note(self, text: str) -> None:
        """Show why the present inner step waits (in `diloco status`); "" once it goes on.  From any thread."""
        ...

    def emit(self, event: str, text: str, **fields: Any) -> None:
        """Write an event to the log.   fields: numbers."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait, and return early if this replica is asked to leave."""
        ...


class StandaloneHost:
    """Host of a loop that belongs to no run."""

    def note(self, text: str) -> None: ...

    def emit(self, event: str, text: str, **fields: Any) -> None:
        warnings.warn(text, stacklevel=2)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
