"""Decides when a supervisor reads its run: all parts after a change, else each part in its own interval.

    every beat      desired state, commits      to see a stop, and the last step
    every 4 beats   heartbeats                  silence counts only after minutes
    every 8 beats   claims, leave records, logs the sessions' own reports
    all, at once    after our own change, and after the end of a process on a platform

This needs 7 requests per replica and outer step of 25 s; reading all parts each second would need 123 (8 replicas).  A
store on this machine is read completely each time.

A supervisor also checks that the run's records are still in the run's store:

    every RECORDS_S, and before a run is called done:   run.json · newest control record · newest commit
                                                             └─ a record is gone ──▶ end the replicas, with the reason

Replicas check the chain of commits themselves when they close a step (agreement/closing.py), but with outer steps of
an hour they would notice an hour late.

Not promised: that a report is up to date (its parts are as old as the table says); that a changed record is
noticed (only a run key detects such a change).
"""

import sys
from collections.abc import Callable

from diloco.run.founding import refuse_lost_run
from diloco.run.record import Run
from diloco.runlog.reader import Report
from diloco.runlog.scope import WHOLE, Focus
from rendezvous.clock import Clock
from rendezvous.errors import RecordsLost

BEATS, SESSIONS = 4, 8
JITTER = 0.95  # read again after this part of a period, and not after the whole period: a sleep may end a little early
NONE = frozenset[str]()
RECORDS_S = 10.0


class Looks:
    """The reads of a run.   read(focus): a reader's refresh.   beat_s: heartbeat period; 0 if reads are free."""

    def __init__(self, read: Callable[[Focus], Report], clock: Clock, beat_s: float) -> None:
        self._read = read
        self._clock = clock
        self._beat_s = beat_s
        self._done_at: dict[str, float] = {}
        self._report: Report | None = None

    def due(self, what: str, beats: float = 1.0) -> bool:
        """Whether `what` was last done `beats` heartbeat periods ago, or never; if so, record it as done now."""
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
            self._done_at |= dict.fromkeys(("control", "beats", "sessions"), self._clock.now())
            self._report = self._read(WHOLE)
        elif self.due("control"):
            beats = None if self.due("beats", BEATS) else NONE
            sessions = None if self.due("sessions", SESSIONS) else NONE
            self._report = self._read(Focus(supervisor=sessions is None, beats=beats, sessions=sessions))
        return self._report


class RecordsWatch:
    def __init__(self, run: Run, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._looked_at = float("-inf")
        self.lost = ""

    def why_lost(self, report: Report, *, again: bool = False) -> str:
        """Return a text that names the missing record and the next step; "" if no record is missing, or no check due.

        again: check now, even if no check is due.
        """
        now = self._clock.now()
        if self.lost or (now - self._looked_at < RECORDS_S and not report.done and not again):
            return self.lost
        self._looked_at = now
        try:
            refuse_lost_run(self._run, records=report.wanted.records, head=report.head)
        except RecordsLost as lost:
            print(f"! {lost}", file=sys.stderr, flush=True)
            self.lost = str(lost)
        return self.lost
