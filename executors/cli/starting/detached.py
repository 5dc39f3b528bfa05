"""Starts a supervisor that outlives this process, and waits until it works before the command returns.

    all replicas on one platform that can   its own small CPU function or job      (supervision/hosted.py)
    else                                    a process of this machine, in its own session

    is one alive? ──yes──▶ nothing is started             its heartbeat changes, or its process runs on this machine
         └─no─▶ detach ─▶ wait ─┬─▶ its first look at the run is over: it supervises
                                ├─▶ it ended: its last lines and exit code, also in the run's log
                                └─▶ it is silent for SILENT_MOST_S: exit code 75

Not promised: that a detached process works while this machine sleeps; replicas elsewhere continue meanwhile.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.process.own_files import appended
from diloco.process.processes import host_words
from diloco.run.record import Run
from diloco.runlog.reader import SUPERVISOR
from executors.cli import answers
from executors.cli.answers import Answer
from executors.platforms.base import FleetExecutor, Handle
from executors.platforms.machine.logfile import LogFile
from executors.platforms.on_host.executor import make_process_folder
from executors.platforms.places import build_executor
from executors.supervision.holder import living_supervisor
from executors.supervision.hosted import start_hosted
from executors.supervision.lease import FRESH_S, WATCHING, Lease, Supervised
from executors.supervision.supervisor import Outcome
from rendezvous.agreement.membership import newest_claim, read_beat, read_control
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import Fenced
from rendezvous.records.records import Beat
from rendezvous.store import Readable, Store

START = "import sys; from executors.supervision.supervisor import main; sys.exit(main())"
TAIL = 12
LOOK_S, SAY_S = 0.5, 30.0  # seconds between two looks at a new supervisor; between two messages about the wait
SILENT_MOST_S = 600.0  # an earlier supervisor that stays silent for this time is cancelled, and a new one starts
NOT_HEARD = (
    "it runs, but has sent no heartbeat for {:.0f} s; `diloco status {}` shows whether one comes, `diloco logs {} "
    "supervisor` its messages"
)


@dataclass(frozen=True)
class Detached:
    """A detached supervisor.   where: the place, in words.   native: the platform's id; "" for a local process.

    found: whether it ran before this command.   ended(): its outcome; None while it runs.   cancel(): ends it.
    """

    where: str
    pid: int = 0
    native: str = ""
    log: str = ""
    found: bool = False
    ended: Callable[[], Outcome | None] = field(default=lambda: None, repr=False)
    cancel: Callable[[], None] = field(default=lambda: None, repr=False)


@dataclass(frozen=True)
class Handover:
    """Result of `hand_over`.   text: shown to you.   code: exit code.   started: None if a supervisor ran already."""

    text: str
    code: int
    started: Detached | None = None


def detach_answer(run: Run, url: str) -> Answer:
    """Start a supervisor elsewhere; return the answer of the command.   url: the run's URL, as you typed it."""
    found = hand_over(run, SystemClock(), answers.say)
    begun = found.started
    data = {"run": run.url, "started": begun is not None and found.code == 0, "code": found.code, "text": found.text}
    if begun is not None:
        data |= {"pid": begun.pid, "native": begun.native, "log": begun.log}
    next_ones = (f"  diloco status {shlex.quote(url)}", f"  diloco stop {shlex.quote(url)}")
    return Answer(data, [found.text, *next_ones], found.code)


def hand_over(run: Run, clock: Clock, say: Callable[[str], None]) -> Handover:
    """Start a supervisor unless one is alive; return when it supervises, has ended, or is silent for too long."""
    before = read_beat(run.store, SUPERVISOR)
    if (other := living_supervisor(run.store, clock, FRESH_S)) is not None:
        who = f"process {other.pid} on {host_words(other.host)}"
        return Handover(f"{who} supervises this run already; it follows your changes", 0)
    executor = build_executor(read_control(run.store).places)
    try:
        started = detach(run, executor)
        outcome = _wait_until_watching(run, clock, started, before, say)
        if outcome is not None and started.found:  # the earlier supervisor on the platform has ended: start a new one
            started = detach(run, executor)
            outcome = _wait_until_watching(run, clock, started, before, say)
    finally:
        executor.close()
    if outcome is None:
        word = "resumed" if run.resumed else "started"
        return Handover(f"{word} {run.url}, supervised by {started.where}", 0, started)
    if outcome.code != exitcodes.DONE and not _left_since(run.store, before):
        write_end(run.store, clock, outcome)
    state = "is silent" if started.ended() is None else "has ended"
    return Handover(f"its supervisor, {started.where}, {state}: {outcome.text}", outcome.code, started)


def detach(run: Run, executor: FleetExecutor) -> Detached:
    """Start a supervisor that outlives this process and its terminal, or return the one that runs on the platform."""
    if not executor.hosts_supervisor:
        return _start_process(run)
    there = {h.native for h in executor.find(run.store.url) if h.slot == SUPERVISOR}
    handle = start_hosted(executor, run.store.url)
    return Detached(
        f"{handle.executor} ({handle.native or 'not started'})",
        native=handle.native,
        found=handle.native in there,
        ended=lambda: _end_of(executor, handle),
        cancel=lambda: executor.cancel([handle], 0.0),
    )


def _start_process(run: Run) -> Detached:
    log = make_process_folder(run.url) / "supervisor.log"
    command = [sys.executable, "-P", "-c", START, run.url]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    began = log.stat().st_size if log.exists() else 0
    with appended(log) as out:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env
        )

    child.returncode = 0  # the supervisor may outlive us; Popen must not warn about that

    def ended() -> Outcome | None:
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid == 0:
            return None
        code = os.waitstatus_to_exitcode(status)
        said = LogFile(log).lines_from(began)
        return Outcome(code if code >= 0 else 128 - code, "\n".join(said[-TAIL:]) or f"exit code {code}")

    return Detached(f"pid {child.pid}, log {log}", child.pid, log=str(log), ended=ended, cancel=child.kill)


def _end_of(executor: FleetExecutor, handle: Handle) -> Outcome | None:
    """Return the outcome of a platform's supervisor, with its last log lines; None while it may still run."""
    status = executor.poll([handle])[0]
    if status.stale or not status.state.ended:
        return None
    with suppress(Exception):  # the log is optional: the end is known anyway
        tail = [line for line in executor.logs(handle, TAIL) if line.strip()]
        if status.reason not in "\n".join(tail):
            tail.append(status.reason)
        return Outcome(_shell_code(status.exit_code), "\n".join(tail))
    return Outcome(_shell_code(status.exit_code), status.reason)


def _shell_code(code: int | None) -> int:
    return exitcodes.CRASHED if code is None else code if code >= 0 else 128 - code


def _wait_until_watching(
    run: Run, clock: Clock, started: Detached, before: Beat | None, say: Callable[[str], None]
) -> Outcome | None:
    """Wait until the supervisor supervises, and return None; or return its outcome if it ends first or stays silent."""
    began = said_at = clock.now()
    while (outcome := started.ended()) is None:
        if _has_looked_since(run.store, before):
            return None
        waited = clock.now() - began
        if clock.now() - said_at >= SAY_S:
            said_at = clock.now()
            say(f"has waited {waited:.0f} s for the supervisor ({started.where}); Ctrl-C ends the waiting only")
        if waited >= SILENT_MOST_S:
            if not started.found:
                return Outcome(exitcodes.GAVE_UP, NOT_HEARD.format(waited, shlex.quote(run.url), shlex.quote(run.url)))
            started.cancel()
        clock.sleep(LOOK_S)
    return outcome


def _has_looked_since(store: Readable, before: Beat | None) -> bool:
    """Whether a supervisor has looked at the run since the latest heartbeat was `before`."""
    holder, beat = newest_claim(store, SUPERVISOR), read_beat(store, SUPERVISOR)
    if holder is None or beat is None or beat == before:
        return False
    return beat.generation == holder.generation and beat.phase == WATCHING


def _left_since(store: Readable, before: Beat | None) -> bool:
    """Whether a supervisor has left since the latest heartbeat was `before`.  Then the log has its last events."""
    beat = read_beat(store, SUPERVISOR)
    return beat is not None and beat != before and beat.phase == "left"


def write_end(store: Store, clock: Clock, outcome: Outcome) -> None:
    """Log the end of a supervisor that could not log it itself, for `diloco status`."""
    with suppress(Supervised, Fenced):  # another supervisor has started meanwhile
        mine = Lease.take(store, clock)
        journal = Journal(store, clock, SUPERVISOR, mine.generation)
        journal.emit("stopped", code=outcome.code, text=outcome.text)
        journal.flush()
        mine.beat("left")
