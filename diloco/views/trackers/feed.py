"""Write a run's new curve rows to its trackers: the loop around views/curves.py.

    bucket ──Reader──▶ report ──▶ which rows are complete? ──▶ for each tracker: the rows after its newest one
                                                                 └─ on an error: closed, opened again after a pause

The feed reads the bucket and never writes to it.  If one tracker fails, the others still get their rows.

Not promised: that a writer on another machine is refused, as the lock is only for this machine.
"""

import fcntl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from diloco.runlog.reader import Reader, Report
from diloco.views.curves import CurvePoint, LoggedSteps, complete_rows, curve_point, is_over, read_logged_steps
from diloco.views.samples import SampleReader
from diloco.views.trackers.tracker import CurveTracker, TrackedRun, TrackerBusy, TrackerError
from rendezvous.clock import Clock
from rendezvous.stores.cache import cache_root

RETRY_S, RETRY_MOST_S = 15.0, 900.0  # first and longest pause after a tracker failed


@dataclass
class TrackerState:
    """One tracker and its state.   next_row: None while it is closed.   written: number of rows by this process."""

    tracker: CurveTracker
    next_row: int | None = None
    written: int = 0
    trouble: str = ""
    failures: int = 0
    again_at: float = 0.0  # a time of the clock's now()


@dataclass
class Feed:
    """The loop's state.   reader, samples: the run's readers.   say: prints a message for the user."""

    run: TrackedRun
    reader: Reader
    samples: SampleReader
    trackers: Sequence[CurveTracker]
    clock: Clock
    say: Callable[[str], None]
    states: list[TrackerState] = field(init=False)
    waiting: int = 0  # number of committed rows with missing logs
    _over: frozenset[str] = frozenset()
    _newest: float = 0.0  # time of the run's newest step or heartbeat, by the run's clocks
    _heard_at: float = 0.0  # when this process first saw `_newest`, by its clock's now()

    def __post_init__(self) -> None:
        self.states = [TrackerState(tracker) for tracker in self.trackers]

    def open_all(self) -> None:
        """Open all trackers.   Raises the first TrackerError, which the user must fix, before a row is written."""
        for state in self.states:
            self._open(state, patient=False)

    def look(self) -> Report:
        """Look at the run once. Write every complete row to each tracker that lacks it."""
        report = self.reader.refresh()
        logged = read_logged_steps(report.events)
        for state in self.states:
            if state.next_row is None and self.clock.now() >= state.again_at:
                self._open(state)
        open_rows = [state.next_row for state in self.states if state.next_row is not None]
        if open_rows:
            first = min(open_rows)
            end = complete_rows(report, logged, start=first, now=self._time_of_run(report), over=self._over)
            self.waiting = len(report.steps) + 1 - end
            self._write_rows(report, logged, first, end)
            if len(open_rows) == len(self.states):
                self.reader.forget_events_before(first - 1)
        self._over = frozenset(s.name for s in report.sessions if s.how != "running")
        return report

    def _time_of_run(self, report: Report) -> float:
        """Return the time by the clocks of the run's machines: the newest record's time + the seconds since we read it.

        This machine's own wall clock may be an hour off.
        """
        newest = max([step.at for step in report.steps[-1:]] + [beat.at for beat in report.beats.values()], default=0.0)
        if newest != self._newest:
            self._newest, self._heard_at = newest, self.clock.now()
        return newest + self.clock.now() - self._heard_at

    def has_all(self, report: Report) -> bool:
        return all(s.next_row is not None and is_over(report, s.next_row) for s in self.states)

    def close(self) -> None:
        for state in self.states:
            self._close(state)

    def _write_rows(self, report: Report, logged: LoggedSteps, first: int, end: int) -> None:
        if first < end:
            self.samples.read_from(first)
        for row in range(first, end):
            point = curve_point(report, logged, row)
            for state in self.states:
                if state.next_row == row and (point is None or self._write(state, point)):
                    state.next_row = row + 1
        self.samples.forget_before(end)

    def _write(self, state: TrackerState, point: CurvePoint) -> bool:
        try:
            state.tracker.write(point, self.samples.samples_of(point.step))
        except Exception as error:  # any error of a tracker's library or of its server
            self._fail(state, error)
            return False
        state.written += 1
        state.failures = 0
        state.trouble = ""
        return True

    def _open(self, state: TrackerState, patient: bool = True) -> None:
        try:
            state.next_row = state.tracker.open(self.run) + 1
        except Exception as error:
            if isinstance(error, TrackerError) and not patient:
                raise
            self._fail(state, error)

    def _fail(self, state: TrackerState, error: Exception) -> None:
        state.failures += 1
        pause_s = min(RETRY_MOST_S, RETRY_S * 2 ** (state.failures - 1))
        state.again_at = self.clock.now() + pause_s
        state.trouble = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._close(state)
        self.say(f"{state.tracker.name}: {state.trouble}; again in {pause_s:.0f} s")

    def _close(self, state: TrackerState) -> None:
        state.next_row = None
        try:
            state.tracker.close()
        except Exception as error:
            self.say(f"{state.tracker.name}: {error}")


def hold_alone(run: TrackedRun, names: Sequence[str]) -> list[IO[str]]:
    """Take one lock per tracker until this process ends.   Raises TrackerBusy if another process here has a lock."""
    folder = cache_root().parent / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    held = list[IO[str]]()
    for name in names:
        lock = open(Path(folder / f"{run.label}-{name}.lock"), "a")  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TrackerBusy(
                f"another process of this machine writes this run to {name} already. End it first, or let it continue"
            ) from None
        held.append(lock)
    return held
