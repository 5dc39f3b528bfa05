"""A run for a live view: a first picture at once, then all of it, then what is new, at RATE requests a second.

    glance   how far it is, wishes, sessions, beats, the supervisor's log, the newest steps     a few hundred requests
    look 1   the rest of `watch_scope`: every commit, curves, the newest logs                   once; kept (cache.py)
    look k   the part that is most overdue (pace.py)                                            1 request per second
             of a run in a folder: everything, as it costs nothing

A look that ends in an error changes nothing that was read; the next one goes on.  No thread and no timer is here.

Not promised: a picture of one moment; each beat was read when `read_at` says.
"""

from dataclasses import replace
from threading import Lock

from diloco.runlog.commits import Decision, read_commit
from diloco.runlog.opening import View
from diloco.runlog.reader import SUPERVISOR, Reader, Report, Step
from diloco.runlog.scope import COSTS, SAMPLED, WHOLE, Focus, watch_scope
from diloco.views.overview import PACE_STEPS
from diloco.views.pace import BURST_S, LOOK_S, RATE, AskedSoFar, items_of, next_focus
from rendezvous import layout
from rendezvous.agreement.membership import read_beat
from rendezvous.clock import Clock
from rendezvous.records.records import Beat, Offer, WireError, decode_or_none
from rendezvous.store import Readable
from rendezvous.stores.ahead import Ahead

NEAR_LOOK_S = 1.0  # a folder
LONGEST_PAUSE_S = 60.0  # between two looks at a bucket that does not answer
KEPT_STEPS = 100  # outer steps whose events stay in memory while a view goes on


class CountingStore:
    """A store to read from that counts its requests."""

    def __init__(self, store: Readable) -> None:
        self._store = store
        self._lock = Lock()  # many are asked at the same time
        self.url = store.url
        self.requests = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)  # what only some stores have: near, cheap

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
    """supervisor_beat: as it was last read.   read_at: slot -> when its beat was last read, Unix time.

    failures: looks in a row that ended in an error.
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
        """Whether everything has been read once."""
        return self._reader is not None

    @property
    def pause_s(self) -> float:
        """Seconds until the next look is worth while; none between the glance and the first whole look."""
        usual_s = NEAR_LOOK_S if self._is_near else LOOK_S
        if self.failures:
            return min(LONGEST_PAUSE_S, usual_s * 2 ** (self.failures - 1))
        return usual_s if self.is_whole else 0.0

    def next_look(self) -> Report | None:
        """A glance, and then one look after the other.   Raises the store's errors; the next call goes on."""
        self.failures += 1
        report = self.look() if self._glanced else self.glance()
        self._glanced = True
        self.failures = 0
        return report

    def glance(self) -> Report:
        """Enough for a first picture: its newest steps are the only ones that it has."""
        reader = Reader(self.store, COSTS, self._view.cache, self._view.answers)
        report = reader.refresh()
        self._note_look(reader, report, WHOLE)
        return replace(report, steps=newest_steps(self.store, report.head))

    def look(self) -> Report | None:
        """The run as far as it is known now; None if it is not worth while to ask for anything yet."""
        if self._reader is None or self._report is None:
            return self._first_look()
        self._earn()
        asked = AskedSoFar(self._asked_at, self._log_steps)
        now = self._clock.wall()
        focus = WHOLE if self._is_near else next_focus(self._report, asked, now=now, budget=self._budget)
        return None if focus is None else self._refresh(self._reader, focus)

    def charge(self, requests: int) -> None:
        """Count requests that another reader made for this view: the next looks wait for them."""
        self._budget -= requests

    def _first_look(self) -> Report:
        cache = self._view.cache
        head = 0 if self._report is None else self._report.head
        replicas = 0 if self._report is None else self._report.wanted.replicas
        reader = Reader(self.store, watch_scope(head, replicas), cache)
        report = self._refresh(reader, WHOLE)
        self._reader = reader
        self._view = replace(self._view, cache=None, answers={})
        self._budget = 0.0  # what was read at once is not paid back
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


# -------------------------------------------------------------------- the newest steps alone


def newest_steps(store: Readable, head: int) -> list[Step]:
    """Read as many steps as a pace needs, with the numbers of a few replicas; [] if a commit cannot be read."""
    ahead = Ahead(store)
    steps = range(max(0, head - PACE_STEPS - 1), head)
    ahead.ask(layout.commit_key(t) for t in steps)
    try:
        bodies = [ahead.get(layout.commit_key(t)) for t in steps]
        commits = [read_commit(body) for body in bodies if body is not None]
    except WireError:  # the whole look says what it is
        return []
    ahead.ask(layout.offer_key(o.step, o.slot, 0) for c in commits for o in c.fresh[:SAMPLED])
    return [_step_with_numbers(ahead, c) for c in commits]


def _step_with_numbers(ahead: Ahead, c: Decision) -> Step:
    step = replace(Step.of_commit(c, linked=True), carried=(), gated=(), empty=False)  # the whole look tells these
    for o in c.fresh[:SAMPLED]:
        body = ahead.get(layout.offer_key(o.step, o.slot, 0))
        offer = None if body is None else decode_or_none(Offer, body)
        if offer is not None and offer.nonce == o.nonce:
            step.add_offer(o.slot, offer)
    return step
