"""Shows a run that another process supervises.

Not promised: that a viewer sees a supervisor's death at once.  The supervisor's heartbeat stops changing, and `show`
reports it.
"""

from diloco.process import exitcodes
from diloco.run.founding import refuse_lost_run
from diloco.run.record import Run
from diloco.runlog.reader import Reader
from diloco.runlog.scope import STATUS
from diloco.runlog.sessions import end_words
from executors.cli.looking.lines import StatusView
from executors.supervision.holder import supervisor_of
from executors.supervision.supervisor import Outcome
from rendezvous.clock import Clock


def look_on(run: Run, clock: Clock, view: StatusView) -> Outcome:
    """Show a run that another process supervises, until the run or that supervisor ends."""
    reader = Reader(run.store, STATUS)
    while True:
        supervisor = supervisor_of(run.store)
        report = reader.refresh()
        view.show(report)
        if report.done:
            refuse_lost_run(run, records=report.wanted.records, head=report.head)
            return Outcome(exitcodes.DONE, end_words(report))
        if supervisor is None:
            return Outcome(exitcodes.LEFT, f"its supervisor ended at outer step {report.progress}")
        clock.sleep(0.5)
