"""How many requests are in flight together: a count in the place of a stopwatch, for the servers of tests.

    turnstile = server.gather("FunctionMap", 32)     requests of this kind get no answer before 32 of them wait for one
    …                                                then these go on, and so do all that come later
    assert turnstile.most >= 32                      who asks one after the other is let go by PATIENCE_S, and seen here

A machine under load makes such a test slow and never red.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 60.0  # only a client that never asks for the rest at the same time waits for so long


class Turnstile:
    """most: how many were in flight at the same time, at most."""

    def __init__(self, together: int) -> None:
        self.together, self.most = together, 0
        self._inside = 0
        self._until: float | None = None
        self._lock = threading.Lock()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request is in flight."""
        with self._lock:
            self._until = self._until or time.monotonic() + PATIENCE_S
            self._inside += 1
            self.most = max(self.most, self._inside)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1

    @property
    def is_open(self) -> bool:
        return self.most >= self.together or time.monotonic() > (self._until or float("inf"))
