"""Clocks that callers pass to the engine as arguments.

Safety never depends on a clock: clocks only decide when a replica *tries* something.  Durations come from `now()`,
which never runs backward on one machine.  `wall()` goes into records, for people to read.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since an arbitrary point; never runs backward."""
        ...

    def wall(self) -> float:
        """Seconds since 1970, for people; may be wrong."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        ...


class SystemClock:
    """This machine's clock."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
