"""How often a supervisor reads its run: all of it when something has happened, else each part as rarely as it may.

    every beat      wishes, commits             a stop, the last step
    every 4 beats   heartbeats                  silence is judged in minutes
    every 8 beats   claims, goodbyes, logs      what sessions say of themselves
    at once, all    after a word of our own, and when a platform tells of an end

Seven requests per replica and outer step of 25 s, where a look at everything each second needs 123 (N = 8).  A store of
this machine is read whole each time.

Not promised: that a report is of this moment; its parts are as old as the table says.
"""

from collections.abc import Callable

from diloco.runlog.reader import Report
from diloco.runlog.scope import WHOLE, Focus
from rendezvous.clock import Clock

BEATS, SESSIONS = 4, 8
JITTER = 0.95  # of a period: due although a sleep was a little short
NONE = frozenset[str]()


class Looks:
    """read(focus): a reader's refresh.   beat_s: between two heartbeats there; 0 where looking costs nothing."""

    def __init__(self, read: Callable[[Focus], Report], clock: Clock, beat_s: float) -> None:
        self._read = read
        self._clock = clock
        self._beat_s = beat_s
        self._done_at: dict[str, float] = {}
        self._report: Report | None = None

    def due(self, what: str, beats: float = 1.0) -> bool:
        """Whether it is time.  Then it counts as done."""
        now = self._clock.now()
        if now - self._done_at.get(what, float("-inf")) < JITTER * beats * self._beat_s:
            return False
        self._done_at[what] = now
        return True

    def forget(self) -> None:
        """Forget the report, since something has changed: the next look is at everything."""
        self._report = None

    def report(self) -> Report:
        """The run as it is known now."""
        if self._report is None:
            self._done_at |= dict.fromkeys(("wishes", "beats", "sessions"), self._clock.now())
            self._report = self._read(WHOLE)
        elif self.due("wishes"):
            beats = None if self.due("beats", BEATS) else NONE
            sessions = None if self.due("sessions", SESSIONS) else NONE
            self._report = self._read(Focus(supervisor=sessions is None, beats=beats, sessions=sessions))
        return self._report
