"""Whether the supervised run still stands in its store.

    every RECORDS_S, and before a run is called done:   run.json · newest control record · newest commit
                                                             └─ one is gone ──▶ the replicas are ended, with words

Replicas compare the chain themselves when they close a step (agreement/closing.py); one whose step lasts an hour would
cost for an hour.

Not promised: that a record which was changed is noticed; the run key is for that.
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
        """Return which record is gone, and what to do; "" while all stand, and between two looks.

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
