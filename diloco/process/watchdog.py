"""Find an inner loop that has stopped moving.  A reward that hangs, a tool server that is gone, a deadlock: the replica
still beats, trains nothing, and costs as much as before.

    OuterLoop: resume() ── inner step ──▶ rest() ── sync ──▶ resume() ── inner step ──▶ …
                    └────────── Watchdog ───────────┘
    heartbeat thread:  look(seconds) ──▶ None, or how long the present inner step has lasted, once that is too long

    limit = max(least_s, 10 · median inner step, 3 · longest inner step)     before the first has ended: 3 · least_s

The longest counts because a step that generates rollouts may last a hundred times as long as those that reuse them.
Time inside a sync does not count: waiting for the store and for others has limits of its own (Timing.give_up).

A request that never comes back stops the heartbeat, too, and with it the watch over the lease: a mount whose server is
gone holds the thread in the kernel.  A second thread looks for that:

    heartbeat thread:  with TurnWatch: tick, flush, lease          second thread:  has_overstayed(seconds) ──▶ the end

Not promised: the inner steps since the last sync, which are lost; code that holds the GIL for ever, which stops the
heartbeat too and is replaced for that.
"""

import sys
import threading
import traceback
from collections import deque
from statistics import median

from rendezvous.clock import Clock

MEDIANS, LONGEST, FIRST = 10.0, 3.0, 3.0  # how many times as long as usual is "hung"
REMEMBERED = 64  # inner steps whose durations the median is of
TURN_S = 600.0  # of a heartbeat: a cloud's client gives up after 180 s
FRAMES = 4  # innermost calls that the report of a standstill names


class Watchdog:
    """least_s: seconds without an inner step that mean nothing; 0: nothing ever does.

    `rest` and `resume` belong to the training thread, `look` to the heartbeat's.
    """

    def __init__(self, clock: Clock, least_s: float = 0.0) -> None:
        self._clock = clock
        self._least_s = least_s
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self._longest = 0.0
        self._began: float | None = None  # of the present inner step; None during a sync
        self._turn = 0
        self._seen_turn = -1
        self._stood = 0.0

    def resume(self) -> None:
        """The inner loop has the thread again."""
        self._began = self._clock.now()
        self._turn += 1

    def rest(self) -> None:
        """An inner step has ended, or the loop has."""
        if self._began is not None:
            lasted = self._clock.now() - self._began
            self._durations.append(lasted)
            self._longest = max(self._longest, lasted)
        self._began = None

    @property
    def longest_s(self) -> float:
        """Longest of the inner steps that have ended, in seconds; 0.0 before the first."""
        return self._longest

    @property
    def limit_s(self) -> float:
        """Seconds after which an inner step counts as hung."""
        if not self._durations:
            return FIRST * self._least_s
        return max(self._least_s, MEDIANS * median(self._durations), LONGEST * self._longest)

    def look(self, elapsed: float) -> float | None:
        """Return the seconds that the present inner step has lasted if it hangs, else None.

        elapsed: seconds since the last look, counted while the observer was awake, so that a laptop may sleep.
        """
        turn = self._turn
        if self._least_s <= 0 or self._began is None or turn != self._seen_turn:
            self._seen_turn = turn
            self._stood = 0.0
            return None
        self._stood += elapsed
        return self._stood if self._stood > self.limit_s else None


class TurnWatch:
    """Whether a turn of the heartbeat comes back.   limit_s: seconds that it may last; stores have shorter limits."""

    def __init__(self, limit_s: float = TURN_S) -> None:
        self.limit_s = limit_s
        self._busy = False
        self._stood = 0.0

    def __enter__(self) -> None:
        self._stood = 0.0
        self._busy = True

    def __exit__(self, *_: object) -> None:
        self._busy = False

    def has_overstayed(self, elapsed: float) -> bool:
        """Whether the turn has lasted too long.   elapsed: seconds since the last look, awake as above."""
        self._stood = self._stood + elapsed if self._busy else 0.0
        return self._stood > self.limit_s


def where_it_stands() -> str:
    """The innermost calls of the main thread, outermost first: "rewards.py:12 judge > ssl.py:1104 read"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame)[-FRAMES:] if frame else []
    return " > ".join(f"{c.filename.rpartition('/')[2]}:{c.lineno} {c.name}" for c in calls) or "nowhere"
