"""Runs the trackers of a supervised run (log.to): a child process of the supervisor runs `diloco track RUN --follow`.

    tick ─▶ no child, and a start is due ─▶ start it      it ended: 0  all rows are written
                                                                    2  a package or a login is missing: never again
                                                                    …  again after 15, 30, 60, … s, at most 15 minutes
    end  ─▶ run done: FINISH_S for its last rows ─▶ SIGTERM ─▶ LEAVE_S ─▶ SIGKILL

No function here raises: a tracker that hangs, crashes or fills a disk only causes a warning in the run's log.  The
child ends within one look after its supervisor.  The next supervisor's child continues after the tracker's last row.

Not promised: rows that a tracker refused until the run's end; `diloco track` can write them later.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from diloco.process import exitcodes, processes
from diloco.process.own_files import appended, open_own
from diloco.run.config import LogConfig
from diloco.run.record import Run
from diloco.views.trackers.feed import RETRY_MOST_S, RETRY_S
from executors.platforms.on_host.executor import make_folder, process_folder
from rendezvous.clock import Clock

FINISH_S, LEAVE_S = 60.0, 20.0
LOOK_S = 0.1
LOG = "track.log"
COMMAND = "import sys; from executors.cli.main import main; sys.exit(main(sys.argv[1:]))"


def pause_after(code: int, failures: int) -> float | None:
    """Return seconds until the next start; None: never.   failures: consecutive failures, including this one."""
    if code in (exitcodes.DONE, exitcodes.USER_ERROR):
        return None
    return min(RETRY_MOST_S, RETRY_S * 2 ** (failures - 1))


class TrackerChild:
    """The child process that writes to trackers.   file: gets its output.   warn(text): writes to the run's log."""

    def __init__(self, command: Sequence[str], file: Path, clock: Clock, warn: Callable[[str], None]) -> None:
        self._command = command
        self._file = file
        self._clock = clock
        self._warn = warn
        self._child: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._over = False
        self._start_at: float | None = clock.now()  # None: never

    def tick(self) -> None:
        """Start the child if a start is due, or handle its end.  Return at once."""
        if self._child is not None and (code := self._child.poll()) is not None:
            self._child = None
            self._note_end(code)
        if self._child is None and self._start_at is not None and self._clock.now() >= self._start_at:
            self._start()

    def end(self, done: bool) -> None:
        """End the child with the supervisor.   done: the run has all its steps, so the child ends by itself."""
        self._over = True
        self._start_at = None
        if self._child is None:
            return
        if not (done and self._has_ended_in(FINISH_S)):
            self._send(signal.SIGTERM)
            if not self._has_ended_in(LEAVE_S):
                self._send(signal.SIGKILL)
                self._has_ended_in(LEAVE_S)
        self.tick()

    def _start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        try:
            make_folder(self._file.parent)
            with appended(self._file) as out:
                self._child = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=environ
                )
        except OSError as error:
            self._fail(f"could not be started: {error}", 1)

    def _note_end(self, code: int) -> None:
        if code == exitcodes.DONE:
            self._start_at = None
            return
        self._fail(f"{processes.describe_exit(code)}; {_last_line(self._file)}", code)

    def _fail(self, why: str, code: int) -> None:
        self._failures += 1
        pause_s = pause_after(code, self._failures)
        self._start_at = None if pause_s is None or self._over else self._clock.now() + pause_s
        then = "not tried again; repair it, then `diloco track`" if pause_s is None else f"again in {pause_s:.0f} s"
        self._warn(f"the run's trackers (log.to): {why} ({then}; the run continues)")

    def _has_ended_in(self, seconds: float) -> bool:
        until = self._clock.now() + seconds
        while self._child is not None and self._child.poll() is None:
            if self._clock.now() >= until:
                return False
            self._clock.sleep(LOOK_S)
        return True

    def _send(self, number: int) -> None:
        """Send a signal to the child's process group, because a tracker may have helper processes."""
        assert self._child is not None
        with suppress(OSError):
            os.killpg(self._child.pid, number)


def tracker_child(run: Run, clock: Clock, warn: Callable[[str], None]) -> TrackerChild:
    """Make the child for a run with trackers (asked_for.py)."""
    log = run.config.log
    return TrackerChild(track_command(run.url, log), process_folder(run.url) / LOG, clock, warn)


def track_command(url: str, log: LogConfig) -> list[str]:
    to = [word for name in log.to for word in ("--to", name)]
    project = ["--project", log.project] if log.project else []
    more = ["--follow", "--samples", str(log.samples), "--folder", log.folder, *project]
    parent = ["--parent", processes.process_name(os.getpid())]
    return [sys.executable, "-P", "-c", COMMAND, "track", url, *to, *more, *parent]


def _last_line(file: Path) -> str:
    with suppress(OSError):
        with open(open_own(file), "rb") as words:
            lines = words.read()[-4096:].decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
