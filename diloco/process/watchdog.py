"""Find an inner loop that hangs: in a reward, at a lost tool server, in a deadlock.  Its replica still writes
heartbeats and costs as much as before, but does not train.

    OuterLoop: resume() ── inner step ──▶ rest() ── sync ──▶ resume() ── inner step ──▶ …
                    └────────── Watchdog ───────────┘
    heartbeat thread:  look(seconds) ──▶ None, or the duration of the current inner step if it is too long

    limit = max(least_s, 10 · median inner step, 3 · longest inner step)     until one step has ended: 3 · least_s

The longest step counts because a step that generates rollouts may last a hundred times as long as steps that reuse
them. Time inside a sync does not count: waits for the store and for other replicas have another limit (Timing.give_up).

A request that never returns also stops the heartbeat and the check of the lease: for example, a mount without its
server holds the thread in the kernel.  A second thread detects that:

    heartbeat thread:  with TurnWatch: tick, flush, lease          second thread:  has_overstayed(seconds) ──▶ the end

Not promised: the inner steps since the last sync, which are lost; code that holds the GIL for ever. Such code stops
the heartbeat too, and for that reason the replica is replaced.
"""

import re
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterable
from statistics import median

from rendezvous.clock import Clock

MEDIANS, LONGEST, FIRST = 10.0, 3.0, 3.0  # the factors of the limit
REMEMBERED = 64  # inner steps in the median
TURN_S = 600.0  # limit for a heartbeat's turn; a cloud's client gives up after 180 s
FRAMES = 4  # innermost calls in the report of a hang


class Watchdog:
    """A detector of hanging inner steps.   least_s: the lowest limit in seconds; 0: no limit.

    The training thread calls `rest` and `resume`; the heartbeat's thread calls `look`.
    """

    def __init__(self, clock: Clock, least_s: float = 0.0) -> None:
        self._clock, self._least_s = clock, least_s
        self._durations: deque[float] = deque(maxlen=REMEMBERED)
        self.longest_s = 0.0  # duration of the longest ended inner step
        self._began: float | None = None  # begin of the current inner step; None during a sync
        self._turn, self._seen_turn, self._stood = 0, -1, 0.0

    def resume(self) -> None:
        """Note that the inner loop continues."""
        self._began = self._clock.now()
        self._turn += 1

    def rest(self) -> None:
        """Note that an inner step or the loop has ended."""
        if self._began is not None:
            lasted = self._clock.now() - self._began
            self._durations.append(lasted)
            self.longest_s = max(self.longest_s, lasted)
        self._began = None

    @property
    def limit_s(self) -> float:
        """Seconds after which an inner step counts as hanging."""
        if not self._durations:
            return FIRST * self._least_s
        return max(self._least_s, MEDIANS * median(self._durations), LONGEST * self.longest_s)

    def look(self, elapsed: float) -> float | None:
        """Return the seconds that the current inner step has lasted if it hangs, else None.

        elapsed: seconds since the last call, without the time in which the machine slept.
        """
        turn = self._turn
        if self._least_s <= 0 or self._began is None or turn != self._seen_turn:
            self._seen_turn = turn
            self._stood = 0.0
            return None
        self._stood += elapsed
        return self._stood if self._stood > self.limit_s else None


class TurnWatch:
    """A check that a heartbeat's turn ends.   limit_s: seconds that it may last; stores have shorter limits."""

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
        """Whether the turn has lasted too long.   elapsed: the same as for `Watchdog.look`."""
        self._stood = self._stood + elapsed if self._busy else 0.0
        return self._stood > self.limit_s


def where_it_stands() -> str:
    """Return the main thread's innermost calls, outermost first: "rewards.py:12 judge > ssl.py:1104 read"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    calls = traceback.extract_stack(frame)[-FRAMES:] if frame else []
    return _in_words((c.filename, c.lineno, c.name) for c in calls)


def where_it_stood(dump: str) -> str:
    """Return the innermost calls in the same form.   dump: faulthandler's; of several threads, the last counts."""
    last = re.split("(?m)^Stack|[Tt]hread 0x", dump)[-1]
    return _in_words(re.findall(r'File "(.*)", line (\d+) in (.*)', last)[FRAMES - 1 :: -1])


def _in_words(calls: Iterable[tuple[str, object, str]]) -> str:
    return " > ".join(f"{file.rpartition('/')[2]}:{line} {name}" for file, line, name in calls) or "nowhere"
