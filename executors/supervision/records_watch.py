"""Checks that the supervised run's records are still in its store.

    every RECORDS_S, and before a run is called done:   run.json · newest control record · newest commit
                                                             └─ one is gone ──▶ end the replicas, with the reason

Replicas check the chain themselves when they close a step (agreement/closing.py), but a step of an hour would cost
an hour.

Not promised: that a changed record is noticed; the run key serves for that.
"""

import sys

from diloco.run.founding import refuse_lost_run
from diloco.run.record import Run
from diloco.runlog.reader import Report
from rendezvous.clock import Clock
from rendezvous.errors import RecordsLost

RECORDS_S = 10.0


class RecordsWatch:
    def __init__(self, run: Run, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._looked_at = float("-inf")
        self.lost = ""

    def why_lost(self, report: Report, *, again: bool = False) -> str:
        """Return which record is gone, and what to do; "" if none is, or if no look is due.

        again: look now.
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
