"""Read a run for a live view: first an overview, then everything once, then new records at RATE requests a second.

    glance   step, desired state, sessions, heartbeats, supervisor's log, newest steps          a few hundred requests
    look 1   the rest of `watch_scope`: every commit, curves, the newest logs                   once; kept (cache.py)
    look k   the part that is most overdue (pace.py)                                            1 request per second
             for a run in a folder: everything, as it costs nothing

After an error, the reader keeps all earlier records, and the next look continues.  This file has no thread or timer.

Not promised: the state of a single moment; `read_at` has the time at which each heartbeat was read.
"""

from dataclasses import replace
from threading import Lock

from diloco.runlog.opening import View
from diloco.runlog.reader import SUPERVISOR, Reader, Report
from diloco.runlog.scope import COSTS, SAMPLED, WHOLE, Focus, watch_scope
from diloco.runlog.steps import Decision, Step, read_commit
from diloco.views.overview import PACE_STEPS
from diloco.views.pace import BURST_S, LOOK_S, RATE, AskedSoFar, items_of, next_focus
from rendezvous import layout
from rendezvous.agreement.membership import read_beat
from rendezvous.clock import Clock
from rendezvous.records.records import Beat, Offer, WireError, decode_or_none
from rendezvous.store import Readable
from rendezvous.stores.ahead import Ahead

NEAR_LOOK_S = 1.0  # seconds between two looks at a folder
LONGEST_PAUSE_S = 60.0  # longest pause between two looks at a bucket that does not answer
KEPT_STEPS = 100  # outer steps whose events stay in memory during a live view


class CountingStore:
    """A readable store that counts its requests."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._lock = Lock()  # requests are parallel
        self.url = store.url
        self.requests = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)  # attributes that some stores have: near, cheap

    def get(self, key: str) -> bytes | None:
        self._count()
        return self._store.get(key)

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        self._count()
        return self._store.get_into(key, out, start)

    def list(self, prefix: str) -> "list[str]":
        self._count()
        return self._store.list(prefix)

    def _count(self) -> None:
        with self._lock:
            self.requests += 1


class LiveReader:
    """A reader for a live view.   supervisor_beat: as last read.   read_at: slot -> last read of its heartbeat (Unix).

    failures: successive looks that ended in an error.
    """

    def __init__(self, view: View, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self.store = CountingStore(view.run.store)
        self._is_near = bool(getattr(view.run.store, "cheap", False))
        self._reader: Reader | None = None
        self._report: Report | None = None
        self._asked_at: dict[tuple[str, str], float] = {}
        self._log_steps: dict[str, int] = {}
        self._budget = 0.0
        self._paid_at = clock.now()
        self._glanced = False
        self.failures = 0
        self.supervisor_beat: Beat | None = None

    @property
    def read_at(self) -> dict[str, float]:
        return {slot: at for (kind, slot), at in self._asked_at.items() if kind == "beat"}

    @property
    def is_whole(self) -> bool:
        """Whether all records have been read."""
        return self._reader is not None

    @property
    def pause_s(self) -> float:
        """Seconds until the next useful look; 0 between the glance and the first whole look."""
        usual_s = NEAR_LOOK_S if self._is_near else LOOK_S
        if self.failures:
            return min(LONGEST_PAUSE_S, usual_s * 2 ** (self.failures - 1))
        return usual_s if self.is_whole else 0.0

    def next_look(self) -> Report | None:
        """Take the glance at the first call, then one look per call.   Raises the store's errors; then call again."""
        self.failures += 1
        report = self.look() if self._glanced else self.glance()
        self._glanced = True
        self.failures = 0
        return report

    def glance(self) -> Report:
        """Read enough for an overview. The report has only the newest steps."""
        reader = Reader(self.store, COSTS, self._view.cache, self._view.answers)
        report = reader.refresh()
        self._note_look(reader, report, WHOLE)
        return replace(report, steps=newest_steps(self.store, report.head))

    def look(self) -> Report | None:
        """Return the report after one look; None if no request is due yet."""
        if self._reader is None or self._report is None:
            return self._first_look()
        self._earn()
        asked = AskedSoFar(self._asked_at, self._log_steps)
        now = self._clock.wall()
        focus = WHOLE if self._is_near else next_focus(self._report, asked, now=now, budget=self._budget)
        return None if focus is None else self._refresh(self._reader, focus)

    def charge(self, requests: int) -> None:
        """Count another reader's requests for this view against the budget; the next looks are later."""
        self._budget -= requests

    def _first_look(self) -> Report:
        cache = self._view.cache
        head = 0 if self._report is None else self._report.head
        replicas = 0 if self._report is None else self._report.wanted.replicas
        reader = Reader(self.store, watch_scope(head, replicas), cache)
        report = self._refresh(reader, WHOLE)
        self._reader = reader
        self._view = replace(self._view, cache=None, answers={})
        self._budget = 0.0  # the first look's requests do not delay the next looks
        self._paid_at = self._clock.now()
        return report

    def _refresh(self, reader: Reader, focus: Focus) -> Report:
        before = self.store.requests
        try:
            self._report = reader.refresh(focus)
            self._note_look(reader, self._report, focus)
        finally:
            self._budget -= self.store.requests - before
        reader.forget_events_before(self._report.head - KEPT_STEPS)
        return self._report

    def _note_look(self, reader: Reader, report: Report, focus: Focus) -> None:
        self._report = report
        now = self._clock.wall()
        for item in items_of(focus, report):
            self._asked_at[item] = now
            if item[0] == "log" and (beat := report.beats.get(item[1])) is not None:
                self._log_steps[item[1]] = beat.step
        if focus.control:
            self.supervisor_beat = read_beat(reader.ahead, SUPERVISOR)

    def _earn(self) -> None:
        now = self._clock.now()
        self._budget = min(BURST_S * RATE, self._budget + RATE * (now - self._paid_at))
        self._paid_at = now


# -------------------------------------------------------------------- only the newest steps


def newest_steps(store: Readable, head: int) -> list[Step]:
    """Read the steps that the pace needs, with the numbers of a few replicas; [] if a commit cannot be read."""
    ahead = Ahead(store)
    steps = range(max(0, head - PACE_STEPS - 1), head)
    ahead.ask(layout.commit_key(t) for t in steps)
    try:
        bodies = [ahead.get(layout.commit_key(t)) for t in steps]
        commits = [read_commit(body) for body in bodies if body is not None]
    except WireError:  # the whole look reports the fault
        return []
    ahead.ask(layout.offer_key(o.step, o.slot, 0) for c in commits for o in c.fresh[:SAMPLED])
    return [_step_with_numbers(ahead, c) for c in commits]


def _step_with_numbers(ahead: Ahead, c: Decision) -> Step:
    step = replace(Step.of_commit(c, linked=True), carried=(), gated=(), empty=False)  # the whole look reads these
    for o in c.fresh[:SAMPLED]:
        body = ahead.get(layout.offer_key(o.step, o.slot, 0))
        offer = None if body is None else decode_or_none(Offer, body)
        if offer is not None and offer.nonce == o.nonce:
            step.add_offer(o.slot, offer)
    return step
