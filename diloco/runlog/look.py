"""One look at a run: request all records that the reader will read, in a few rounds of parallel requests.

    round 1   control, commits ○●, claims of the first slots, heartbeats     ○●: how many are there?
    round 2   claims of further slots, logs ○●, leave records
    …         commits, newest logs

    A second look takes the run's extent from the cache, so its round 1 requests all of these records. If the run has
    not changed, round 1 is the only one, and `likely_keys` lets it start before run.json is read (cached_look.py).

How many records a series has:   key(0) ● key(1) ● … key(n−1) ●  key(n) ○

    no end known yet        low … low+3, low+7, low+15, …      the next few, then galloping, all in one round
    all of these are there  the same from there on, twice as far
    between low and high    FAN keys, evenly spaced            until no key is left between them

Commits, claims, control records and logs are numbered without gaps, and none of them is ever deleted. So a few rounds
of GETs find their number. A LIST may lag, and returns only 1,000 keys at a time.

Not promised: complete answers (the reader gets missing records one by one); the number in a series with a gap, which
only an edit of the bucket makes. A reader that reads from the first record on finds the gap.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from diloco.runlog.scope import WHOLE, Focus, Scope
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, read_control
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.layout import SUPERVISOR
from rendezvous.stores.ahead import Ahead

FIRST_SLOTS = 4  # slots whose claims and heartbeats are requested before the number of slots is known
CONTROLS = 8  # requested at once
FAR, NEAR = 10, 3  # `reach` in the first round of a search, without and with a known length
NEW_CLAIMS = 2  # like FAR, for a slot with known claims: few slots are claimed twice between two looks
GROWING = 2  # newest generations whose logs may still grow
FAN = 16  # keys requested at once between two bounds
CLOSE = 4  # successive keys; if a series grew by fewer, one round finds its length
FURTHEST = 10  # the farthest key of the galloping: low + 1,023
Owner = tuple[str, int]  # slot and generation
Numbered = Callable[[int], str]  # n -> key


@dataclass
class Series:
    """A series of numbered records.   low: at least this many exist.   high: no record has this number.
    reach: galloping keys.   then(n): called when the length n is known."""

    key: Numbered
    low: int
    reach: int
    then: Callable[[int], None]
    high: int | None = None

    @property
    def probes(self) -> list[int]:
        if self.high is None:
            galloping = {self.low + (1 << j) - 1 for j in range(self.reach)}
            return sorted(galloping | set(range(self.low, self.low + CLOSE)) if self.reach > 2 else galloping)
        return sorted({self.low + (self.high - self.low) * i // (FAN + 1) for i in range(FAN + 1)})

    @property
    def is_over(self) -> bool:
        return self.low == self.high

    def learn_from_probes(self, ahead: Ahead) -> None:
        """Narrow the bounds by the answers to the probes."""
        galloping = self.high is None
        ahead.refuse_silence(self.key(n) for n in self.probes)
        for n in self.probes:
            if not ahead.is_there(self.key(n)):
                self.high = n
                return
            self.low = n + 1
        if galloping:
            self.reach = min(FURTHEST, 2 * self.reach)


@dataclass
class Rounds:
    """Requests for series and keys; each round sends all requests that are known to be needed."""

    ahead: Ahead
    _series: list[Series] = field(default_factory=list[Series])
    _keys: list[str] = field(default_factory=list[str])
    _after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def count(self, key: Numbered, low: int, reach: int, then: Callable[[int], None]) -> None:
        self._series.append(Series(key, low, reach, then))

    def want(self, keys: list[str], then: Callable[[], None] = lambda: None) -> None:
        """Request these keys.   then: called when all of them were requested."""
        self._keys += keys
        self._after.append(then)

    @property
    def next_keys(self) -> list[str]:
        """The keys that the next round requests."""
        return [*self._keys, *(s.key(n) for s in self._series for n in s.probes)]

    def run(self) -> None:
        while self._series or self._keys or self._after:
            asked = self.next_keys
            series = self._series
            after = self._after
            self._series = []
            self._keys = []
            self._after = []
            self.ahead.ask(asked)
            for s in series:
                s.learn_from_probes(self.ahead)
            for then in after:
                then()
            for s in series:
                if s.is_over:
                    s.then(s.low)
                else:
                    self._series.append(s)


@dataclass(frozen=True)
class ReadSoFar:
    """The known part of a run.   read: commits that the reader has.   commits, claims, logs: known numbers of records.

    ended: sessions whose leave record is known or no longer needed.   first: nothing was read yet.
    """

    wanted: Wanted = field(default_factory=Wanted)
    read: int = 0
    commits: int = 0
    claims: Mapping[str, int] = field(default_factory=dict[str, int])
    logs: Mapping[Owner, int] = field(default_factory=dict[Owner, int])
    ended: frozenset[Owner] = frozenset()
    first: bool = True


@dataclass
class Found:
    """The findings of one look.   lost: text about missing control records, or "".

    claims: slot -> number of claims.   logs: session -> range of objects to read.
    """

    wanted: Wanted
    lost: str = ""
    commits: int = 0
    claims: dict[str, int] = field(default_factory=dict[str, int])
    logs: dict[Owner, tuple[int, int]] = field(default_factory=dict[Owner, tuple[int, int]])


def take_look(ahead: Ahead, scope: Scope, known: ReadSoFar, focus: Focus = WHOLE) -> Found:
    """Request the records that `scope` and `focus` need beyond `known`.

    If control records were lost, the remaining ones are shown.
    """
    return Look(ahead, scope, known, focus).run()


class Look:
    def __init__(self, ahead: Ahead, scope: Scope, known: ReadSoFar, focus: Focus = WHOLE) -> None:
        self._ahead = ahead
        self._scope = scope
        self._known = known
        self._focus = focus
        self._rounds = Rounds(ahead)
        self.found = Found(known.wanted)
        self._slots: set[str] = set()
        self._logs: set[Owner] = set()  # sessions whose logs are already requested
        if known.first or focus.control:
            self._ask_control(CONTROLS if known.first else 1)
        if known.first:
            self._rounds.want([layout.RUN, layout.beat_key(SUPERVISOR), layout.CONTROLS])
            self._rounds.want([] if scope.newest is not None else [layout.LOGS])
        self._rounds.count(layout.commit_key, known.commits, self._gallop_reach(known.commits), self._hear_commits)
        if focus.supervisor:
            self._claims_of(SUPERVISOR)
        kept = [slot for slot in known.claims if slot != SUPERVISOR]
        self._ask_slots(known.wanted.member_names or kept or [layout.slot_name(i) for i in range(FIRST_SLOTS)])

    @property
    def first_keys(self) -> list[str]:
        """The keys that round 1 requests."""
        return self._rounds.next_keys

    def run(self) -> Found:
        self._rounds.run()
        return self.found

    def _gallop_reach(self, known: int) -> int:
        """Return the reach of a gallop: large in the first look, which may come long after the cached look."""
        return 1 if not self._known.first else NEAR if known else FAR

    def _ask_control(self, count: int) -> None:
        start = self.found.wanted.records
        keys = [layout.control_key(n) for n in range(start, start + count)]
        self._rounds.want(keys, lambda: self._hear_control(count))

    def _hear_control(self, count: int) -> None:
        start = self.found.wanted.records
        self._ahead.refuse_silence(layout.control_key(n) for n in range(start, start + count))
        all_there = all(self._ahead.is_there(layout.control_key(n)) for n in range(start, start + count))
        if all_there:  # there may be more: request them, then continue
            more = max(2 * count, self._controls_listed() - start + 1)
            self._rounds.want([layout.control_key(start + n) for n in range(count, more)])
            self._rounds.want([], lambda: self._hear_control(more))
            return
        if start:
            self.found.wanted = read_control(self._ahead, self.found.wanted)
        else:
            self.found.wanted, self.found.lost = read_standing_control(self._ahead)
        self._ask_slots(self.found.wanted.member_names)

    def _controls_listed(self) -> int:
        """Count the control records in a LIST up to the first gap; the LIST may lag.  Each lease adds a record.

        The highest number is not used: a stray `control/999999.json` would cost a million GETs in every first look.
        """
        numbers = {layout.control_number(key) for key in self._ahead.listed(layout.CONTROLS)}
        return next(n for n in itertools.count() if n not in numbers)

    def _ask_slots(self, slots: Iterable[str]) -> None:
        for slot in slots:
            if slot not in self._slots:
                self._slots.add(slot)
                self._rounds.want([layout.beat_key(slot)] if self._focus.reads_beat(slot) else [])
                if self._focus.reads_sessions(slot):
                    self._claims_of(slot)
                elif slot in self._focus.logs:
                    self._follow_logs(self._sessions_of(slot, self._known.claims.get(slot, 0)))

    def _claims_of(self, slot: str) -> None:
        key = lambda n: layout.claim_key(slot, n + 1)  # noqa: E731
        low = self._known.claims.get(slot, 0)
        self._follow_slot(slot, low)
        reach = 1 if not self._known.first else NEW_CLAIMS if low else NEAR
        self._rounds.count(key, low, reach, lambda n: self._hear_claims(slot, n))

    def _hear_claims(self, slot: str, generations: int) -> None:
        self.found.claims[slot] = generations
        self._follow_slot(slot, generations)

    def _follow_slot(self, slot: str, generations: int) -> None:
        """Request the claims, logs and leave records of each session of a slot."""
        sessions = self._sessions_of(slot, generations)
        self._rounds.want([layout.claim_key(s, g) for s, g in sessions if g > self._read_claims(s)])
        if slot != SUPERVISOR:
            self._rounds.want([layout.leave_key(s, g) for s, g in sessions if (s, g) not in self._known.ended])
        self._follow_logs(sessions)

    def _sessions_of(self, slot: str, generations: int) -> list[Owner]:
        return [(slot, g) for g in range(1, generations + 1)]

    def _follow_logs(self, sessions: list[Owner]) -> None:
        for owner in self._with_logs(sessions):
            if owner not in self._logs:
                self._logs.add(owner)
                self._logs_of(owner)

    def _read_claims(self, slot: str) -> int:
        """Return the newest generation that the reader has read."""
        return 0 if self._known.first else self._known.claims.get(slot, 0)

    def _with_logs(self, sessions: list[Owner]) -> list[Owner]:
        """Return the sessions whose logs this view requests; [] if it lists all logs."""
        if self._scope.newest is None:
            return []
        if sessions and sessions[0][0] == SUPERVISOR:
            return sessions if self._known.first else sessions[-GROWING:]
        if not self._scope.newest:
            return []
        return sessions[-(self._scope.generations if self._known.first else GROWING) :]

    def _logs_of(self, owner: Owner) -> None:
        key = lambda n: layout.log_key(*owner, n)  # noqa: E731
        low = self._known.logs.get(owner, 0)
        self._rounds.count(key, low, self._gallop_reach(low), lambda n: self._hear_logs(owner, n))

    def _hear_logs(self, owner: Owner, count: int) -> None:
        start = 0 if self._known.first else self._known.logs.get(owner, 0)
        most = (self._scope.newest or 0) if self._known.first else self._focus.most
        if owner[0] != SUPERVISOR and most is not None:
            start = max(start, count - most)
        self.found.logs[owner] = (start, count)
        self._rounds.want([layout.log_key(*owner, n) for n in range(start, count)])

    def _hear_commits(self, count: int) -> None:
        self.found.commits = count
        if self._scope.commits:
            self._rounds.want([layout.commit_key(t) for t in range(self._known.read, count)])
