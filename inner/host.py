"""Defines how an inner loop reports failures of the user's code, and its waits, to the replica that drives it.

    inner loop ── note("reward failed: 429 (64 of 64 completions, try 2 of 4)") ──▶ heartbeat ──▶ `diloco status`
               ── emit("reward_failed", …) ──▶ log                └ shows the watchdog that the process does not hang
               ◀─ owner: (run, slot, generation)   the label of boxes that this loop rents
               ── pause(4.0) ──▶ a wait that ends early if this replica is asked to leave

Not promised: that a replica listens. In a loop that belongs to no run, `emit` only warns, and `pause` only sleeps
(inner/usercode/reward_calls.py StandaloneHost).
"""

from typing import Any, Protocol


class Host(Protocol):
    @property
    def owner(self) -> tuple[str, str, int]: ...

    def note(self, text: str) -> None:
        """Show in `diloco status` why this inner step waits; "" when it continues.  Any thread may call this."""

    def emit(self, event: str, text: str, **fields: Any) -> None:
        """Write an event to the log.   fields: numbers."""

    def rented(self, seconds: float, usd_per_hour: float | None) -> None:
        """Add a box to the run's costs.   usd_per_hour: its provider's price.   One thread at a time calls this."""

    def pause(self, seconds: float) -> None:
        """Wait this long, or less if this replica is asked to leave."""
