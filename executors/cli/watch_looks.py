"""The looks of `diloco watch` at a run, one after the other, each of which gives a Picture.

    bucket ──LiveReader──▶ report ──▶ Picture ──▶ a terminal: executors/cli/watch_app.py
       └─ an error: the next look goes on, after 5, 10, 20 … 60 s

A Picture is whole and never changes, so that the thread that reads and the one that draws share nothing else.
Reads the run only; killing and starting it again changes nothing there.

Not promised: a picture that is newer than its bucket; what is stale says since when.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from diloco.runlog.live import LiveReader
from diloco.runlog.opening import View
from diloco.runlog.overview import Overview, overview
from diloco.runlog.report import Report
from executors.cli.status import remark_lines
from executors.cli.watch_words import event_lines
from executors.supervision.costs import Costs, costs
from executors.supervision.health import describe_supervisor
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError
from rendezvous.membership import Wanted

LONGEST_PAUSE_S = 60.0  # between two looks at a bucket that does not answer


@dataclass(frozen=True)
class Picture:
    """Everything that is shown.   at: when it was read, Unix time.   partial: the curves are still to come.

    supervision: who looks after the run.   remarks: what it waits for, and troubles.   events: the newest first.
    """

    at: float
    seen: Overview
    spent: Costs
    wanted: Wanted
    supervision: str
    remarks: tuple[str, ...]
    events: tuple[str, ...]
    partial: bool = False


class RunLooks:
    """The looks at one run, one after the other.   failures: in a row."""

    def __init__(self, view: View, clock: Clock) -> None:
        self.run = view.run
        self.clock = clock
        self._live = LiveReader(view, clock)
        self._glanced = False
        self._begun: Future[Report] | None = None
        self.failures = 0
        self.report: Report | None = None

    @property
    def pause_s(self) -> float:
        """Seconds until the next look; none between the first two."""
        if self.failures:
            return min(LONGEST_PAUSE_S, self._live.pause_s * 2 ** (self.failures - 1))
        return self._live.pause_s if self._live.is_whole else 0.0

    def begin(self) -> None:
        """Begin the first look, beside the import of what will draw it."""
        self._begun = ThreadPoolExecutor(1, "first look").submit(self._live.glance)

    def next_picture(self) -> Picture | None:
        """None: nothing new was asked for.   Raises what the store raises; the next call goes on."""
        self.failures += 1
        report = self._live.look() if self._glanced else self._glance()
        self._glanced = True
        self.failures = 0
        if report is None:
            return None
        self.report = report
        return self._picture_of(report)

    def _glance(self) -> Report:
        begun = self._begun
        self._begun = None
        return self._live.glance() if begun is None else begun.result()

    def _picture_of(self, report: Report) -> Picture:
        now = self.clock.wall()
        return Picture(
            at=now,
            seen=overview(report, now, read_at=self._live.read_at),
            spent=costs(report, now),
            wanted=report.wanted,
            supervision=describe_supervisor(self._live.supervisor_beat, self.clock, report)[0],
            remarks=tuple(line.strip() for line in remark_lines(report, now)),
            events=tuple(event_lines(report)),
            partial=not self._live.is_whole,
        )


def error_words(error: BaseException) -> str:
    """A line for people; an error that nobody expects says its kind."""
    expected = isinstance(error, RendezvousError | OSError)
    words = " ".join(str(error).split())
    return words if expected and words else f"{type(error).__name__}: {words}"
