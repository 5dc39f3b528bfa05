"""`diloco train` in a terminal, and what it takes to leave it to itself.

    foreground    this process supervises; Ctrl-C asks the replicas to leave, a second one kills them
    --detach      somebody else does, and this process returns at once:
                  all replicas on one platform that can   its own small CPU function or job
                  else                                    a process of this machine, in a session of its own

Not promised: that a detached process survives this machine's sleep; replicas elsewhere go on, and the run resumes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diloco import exitcodes
from diloco.launch import Run
from diloco.report import Reader, Report
from diloco.runlog.scope import STATUS
from executors import processes
from executors.lease import Supervised, supervisor_of
from executors.local import process_folder
from executors.mixed import build
from executors.supervisor import Outcome, Supervisor
from executors.watch import View, view_for
from rendezvous.clock import Clock, SystemClock
from rendezvous.membership import read_control

Tick = Callable[[Supervisor, Report], None]


def nothing(supervisor: Supervisor, report: Report) -> None:
    """A hook that does nothing."""


def supervise_here(run: Run, each_tick: Tick = nothing, view: View | None = None) -> Outcome:
    """Run it to its end in this process.  If somebody else supervises it, look on."""
    view = view or view_for(sys.stdout)
    executor = build(read_control(run.store).places)
    try:
        supervisor = Supervisor(
            run, executor, SystemClock(), parent=processes.name(os.getpid()), show=view.show, each_tick=each_tick
        )
        with _signals(supervisor, view):
            return supervisor.supervise()
    except Supervised as other:
        say(f"{other}; watching it (Ctrl-C ends the watching only)")
        return look_on(run, SystemClock(), view)
    finally:
        executor.close()


def look_on(run: Run, clock: Clock, view: View) -> Outcome:
    """Show a run that somebody else supervises, until that ends."""
    reader = Reader(run.store, STATUS)
    while True:
        supervisor, report = supervisor_of(run.store), reader.refresh()
        view.show(report)
        if report.done:
            return Outcome(exitcodes.DONE, f"all {report.head} outer steps are committed")
        if supervisor is None:
            return Outcome(exitcodes.LEFT, f"its supervisor ended at outer step {report.head} of {report.wanted.steps}")
        clock.sleep(0.5)


@contextmanager
def _signals(supervisor: Supervisor, view: View) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks, the second kills."""
    asked = 0

    def asked_again(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            view.say("asking the replicas to leave; what they have done is offered first (Ctrl-C again: kill)")
            supervisor.leave()
        else:
            supervisor.kill()

    before = {n: signal.signal(n, asked_again) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Detached:
    """The new supervisor.   where: in words.   native: its id on a platform, "" for a process of this machine."""

    where: str
    pid: int = 0
    native: str = ""
    log: str = ""


def detach(run: Run) -> Detached:
    """Start a supervisor that outlives this process and its terminal."""
    executor = build(read_control(run.store).places)
    try:
        supervise = getattr(executor, "supervise", None)
        if supervise is None:
            return _detached_process(run)
        handle = supervise(run.url)
    finally:
        executor.close()
    return Detached(f"{handle.executor} ({handle.native})", native=handle.native)


def _detached_process(run: Run) -> Detached:
    log = process_folder(run.url) / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "import sys; from executors.supervisor import main; sys.exit(main())", run.url]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    with open(log, "ab") as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env
        )
    child.returncode = 0  # it goes on without us: no warning about that
    return Detached(f"pid {child.pid}, log {log}", child.pid, log=str(log))


def say(text: str) -> None:
    """A word to the person, beside the data."""
    print(text, file=sys.stderr, flush=True)
