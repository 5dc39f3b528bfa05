"""`diloco train` in a terminal: this process supervises (with --detach another one does, detached.py).

    Ctrl-C asks the replicas to leave, a second Ctrl-C kills them
    if another process supervises the run already, this process only shows it

Not promised: that a viewer sees a supervisor's death at once.  The supervisor's heartbeat
stops changing, and `show` reports it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco.process import exitcodes, processes
from diloco.process.signals import asking_signals
from diloco.run.founding import refuse_lost_run
from diloco.run.record import Run
from diloco.runlog.reader import Reader, Report
from diloco.runlog.scope import STATUS
from diloco.runlog.sessions import end_words
from diloco.units import duration
from executors.cli.answers import say
from executors.cli.looking.lines import StatusView, view_for
from executors.platforms.places import build_executor
from executors.preflight.run_url import UsageError
from executors.supervision.lease import Supervised, supervisor_of
from executors.supervision.notices import VARIABLE as ALERT
from executors.supervision.supervisor import Outcome, Supervisor
from rendezvous.agreement.membership import read_control
from rendezvous.clock import Clock, SystemClock

Tick = Callable[[Supervisor, Report], None]


def supervise_here(
    run: Run, each_tick: Tick = lambda supervisor, report: None, view: StatusView | None = None
) -> Outcome:
    """Supervise the run to its end in this process.  If another process supervises it, only show it."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a run is supervised in the main thread, which hears Ctrl-C; use --detach in another thread")
    view = view or view_for(sys.stdout)
    wanted = read_control(run.store)
    executor = build_executor(wanted.places, wanted.former)  # replicas at former places of the run are supervised, too
    try:
        supervisor = Supervisor(
            run, executor, SystemClock(), parent=processes.process_name(os.getpid()), alert=os.environ.get(ALERT, ""),
            show=view.show, each_tick=each_tick,
        )  # fmt: skip
        with _handled_signals(supervisor, view):
            return supervisor.supervise()
    except Supervised as other:
        say(f"{other}; watching it (Ctrl-C ends the watching only)")
        return look_on(run, SystemClock(), view)
    finally:
        executor.close()


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


@contextmanager
def _handled_signals(supervisor: Supervisor, view: StatusView) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM, SIGHUP.

    The first signal asks replicas to leave, the second kills them, the third ends this process.
    """
    asked = 0

    def asked_again(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            view.say(
                "asking the replicas to leave; each first ends its inner step and offers its work, within "
                f"{duration(max(1.0, supervisor.grace_s))} (Ctrl-C again: kill, and lose that work)"
            )
            supervisor.leave()
        elif asked == 2:
            supervisor.kill()
        else:
            raise KeyboardInterrupt

    before = {n: signal.signal(n, asked_again) for n in asking_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
