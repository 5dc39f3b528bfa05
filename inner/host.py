"""What an inner loop may say to whoever drives it, and ask of it, when the user's own code has a bad moment.

    inner loop ── note("reward failed: 429 (64 of 64 completions, try 2 of 4)") ──▶ heartbeat ──▶ `diloco status`
               ── tell("reward_failed", …) ──▶ log                └ and the watchdog hears that nothing hangs
               ── pause(4.0) ──▶ a wait that ends early if this replica is asked to leave

Not promised: that anybody listens. Without a run around it a loop warns, and sleeps.
"""

import time
import warnings
from typing import Any, Protocol


class Host(Protocol):
    def note(self, text: str) -> None:
        """What holds up the present inner step, for whoever looks; "" once it goes on.  From any thread."""
        ...

    def tell(self, event: str, text: str, **fields: Any) -> None:
        """Something to write down.   fields: numbers."""
        ...

    def pause(self, seconds: float) -> None:
        """Wait, but not longer than this life is wanted."""
        ...


class Nobody:
    """No run around the loop."""

    def note(self, text: str) -> None: ...

    def tell(self, event: str, text: str, **fields: Any) -> None:
        warnings.warn(text, stacklevel=2)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
