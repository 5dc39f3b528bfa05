"""How often a supervisor reads its run: all of it after a change, else each part in its own interval.

    every beat      desired state, commits      to see a stop, and the last step
    every 4 beats   heartbeats                  silence counts only after minutes
    every 8 beats   claims, leave records, logs the sessions' own reports
    at once, all    after our change, and after an end on a platform

This needs seven requests per replica and outer step of 25 s; all of it each second would need 123 (N = 8).  A store of
this machine is read completely each time.

Not promised: that a report is up to date; its parts are as old as the table says.
"""

from collections.abc import Callable

from diloco.runlog.reader import Report
from diloco.runlog.scope import WHOLE, Focus
from rendezvous.clock import Clock

BEATS, SESSIONS = 4, 8
JITTER = 0.95  # part of a period after which a read is due: a sleep may be a little short
NONE = frozenset[str]()


class Looks:
    """The reads of a run.   read(focus): a reader's refresh.   beat_s: heartbeat period; 0 if reads are free."""

    def __init__(self, read: Callable[[Focus], Report], clock: Clock, beat_s: float) -> None:
        self._read = read
        self._clock = clock
        self._beat_s = beat_s
        self._done_at: dict[str, float] = {}
        self._report: Report | None = None

    def due(self, what: str, beats: float = 1.0) -> bool:
        """Whether `what` is due, after `beats` heartbeat periods; if so, note it as done now."""
        now = self._clock.now()
        if now - self._done_at.get(what, float("-inf")) < JITTER * beats * self._beat_s:
            return False
        self._done_at[what] = now
        return True

    def forget(self) -> None:
        """Forget the report after a change: the next `report` reads everything."""
        self._report = None

    def report(self) -> Report:
        """Read the parts that are due, and return the report on the run."""
        if self._report is None:
            self._done_at |= dict.fromkeys(("wishes", "beats", "sessions"), self._clock.now())
            self._report = self._read(WHOLE)
        elif self.due("wishes"):
            beats = None if self.due("beats", BEATS) else NONE
            sessions = None if self.due("sessions", SESSIONS) else NONE
            self._report = self._read(Focus(supervisor=sessions is None, beats=beats, sessions=sessions))
        return self._report
