"""The reads of a run for `diloco watch`, one after the other; each returns a Picture.

    bucket ──LiveReader──▶ report ──▶ Picture ──▶ a terminal: executors/cli/watch/app.py
       └─ an error: the next look is after 5, 10, 20 … 60 s

A Picture is complete and immutable, and the reading and the drawing thread share nothing else.
These reads change nothing, so the command may be killed and started again.

Not promised: a picture that is newer than its bucket; stale data are marked with their age.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

from diloco.runlog.opening import View
from diloco.runlog.reader import Report
from diloco.views.live import LiveReader
from diloco.views.overview import Overview, overview
from diloco.views.trouble import Spending, Trouble
from diloco.views.troubles import find_troubles
from executors.cli.looking.status import describe_supervisor
from executors.cli.watch.words import event_lines
from executors.supervision.costs import Costs
from executors.supervision.money.bills import costs
from executors.supervision.notices.messages import message_lines
from rendezvous.agreement.membership import Wanted
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError


@dataclass(frozen=True)
class Picture:
    """Everything that is shown.   at: Unix time of the read.   partial: the curves are not read yet.

    supervision: a text on the run's supervisor.   messages: waits and warnings.   events: the newest first.
    """

    at: float
    seen: Overview
    spent: Costs
    wanted: Wanted
    supervision: str
    troubles: tuple[Trouble, ...]
    messages: tuple[str, ...]
    events: tuple[str, ...]
    partial: bool = False


class RunLooks:
    """The reads of one run, one after the other."""

    def __init__(self, view: View, clock: Clock) -> None:
        self.run = view.run
        self.clock = clock
        self._live = LiveReader(view, clock)
        self._begun: Future[Report | None] | None = None
        self.report: Report | None = None

    @property
    def pause_s(self) -> float:
        return self._live.pause_s

    def begin(self) -> None:
        """Begin the first look in a thread, during the import of the code that draws it."""
        self._begun = ThreadPoolExecutor(1, "first look").submit(self._live.next_look)

    def next_picture(self) -> Picture | None:
        """Look once; return None if nothing new was read.   Raises the store's errors; the next call continues."""
        begun = self._begun
        self._begun = None
        while begun and not wait([begun], timeout=1.0).done:
            pass  # short turns: a Ctrl-C that arrives just before a turn takes effect only after the turn
        report = self._live.next_look() if begun is None else begun.result()
        if report is None:
            return None
        self.report = report
        return self._picture_of(report)

    def _picture_of(self, report: Report) -> Picture:
        now = self.clock.wall()
        spent = costs(report, now)
        spending = Spending(spent.usd, spent.hours, spent.rate)
        as_read = with_beats_as_read(report, self._live.read_at, now)
        troubles = find_troubles(as_read, now, spending) if self._live.is_whole else []
        told = {found.line for found in troubles}
        return Picture(
            at=now,
            seen=overview(report, now, read_at=self._live.read_at),
            spent=spent,
            wanted=report.wanted,
            supervision=describe_supervisor(self._live.supervisor_beat, self.clock, report)[0],
            troubles=tuple(troubles),
            messages=tuple(line.strip() for line in message_lines(as_read, now) if line.lstrip("! ") not in told),
            events=tuple(event_lines(report)),
            partial=not self._live.is_whole,
        )


def with_beats_as_read(report: Report, read_at: Mapping[str, float], now: float) -> Report:
    """Return the report with each heartbeat's age at its read: a heartbeat not read again must not look silent."""
    beats = {slot: replace(beat, at=beat.at + now - read_at.get(slot, now)) for slot, beat in report.beats.items()}
    return replace(report, beats=beats)


def error_words(error: BaseException) -> str:
    """Return a line for the user, with the error's type if the error is unexpected."""
    expected = isinstance(error, RendezvousError | OSError)
    words = " ".join(str(error).split())
    return words if expected and words else f"{type(error).__name__}: {words}"
