"""`diloco train` in a terminal: this process supervises (with --detach, another process does: detached.py).

    Ctrl-C asks the replicas to leave, a second Ctrl-C kills them
    if another process supervises the run already, this process only shows it (look_on.py)

Not promised: that replicas of this machine outlive this process; with `--detach`, the supervisor outlives it.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diloco.process import processes
from diloco.process.signals import asking_signals
from diloco.run.record import Run
from diloco.runlog.reader import Report
from diloco.units import duration
from executors.cli.answers import say
from executors.cli.looking.lines import StatusView, view_for
from executors.platforms.places import build_executor
from executors.preflight.run_url import UsageError
from executors.supervision.lease import Supervised
from executors.supervision.notices import VARIABLE as ALERT
from executors.supervision.supervisor import Outcome, Supervisor
from rendezvous.agreement.membership import read_control
from rendezvous.clock import SystemClock

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
        from executors.cli.starting.look_on import look_on

        say(f"{other}; watching it (Ctrl-C ends the watching only)")
        return look_on(run, SystemClock(), view)
    finally:
        executor.close()


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
