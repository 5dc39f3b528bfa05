"""One look at a run: everything that its reader is about to read is asked for, in a few rounds.

    round 1   control, commits ○●, claims of the first slots, beats          ○●: how many are there?  (extent.py)
    round 2   claims of further slots, logs ○●, goodbyes
    …         commits, newest logs

Not promised: that the reader finds the answers complete.  What is missing it gets one by one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from diloco.runlog.ahead import Ahead
from diloco.runlog.cache import Cache
from diloco.runlog.extent import Rounds
from diloco.runlog.scope import GENERATIONS, Scope
from rendezvous import layout
from rendezvous.membership import Wanted, read_control
from rendezvous.salvage import readable

SUPERVISOR = "supervisor"  # the supervisor's name where replicas have their slot
FIRST_SLOTS = 4  # whose claims and beats are asked for before it is known how many there are
CONTROLS = 8  # asked for at once
FAR, NEAR = 10, 3  # reach of the galloping where nothing is known, and where something is
Owner = tuple[str, int]  # slot and generation


@dataclass(frozen=True)
class Known:
    """How far a run is known.   read: commits that the reader has.   commits, claims, logs: that many are there.

    ended: lives whose goodbye is known or not waited for.   first: nothing was read yet.
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
    """What one look has found.   lost: what is missing of the control records, "" for nothing.

    claims: of each slot.   logs: per life, the objects to read: from, to.
    """

    wanted: Wanted
    lost: str = ""
    commits: int = 0
    claims: dict[str, int] = field(default_factory=dict[str, int])
    logs: dict[Owner, tuple[int, int]] = field(default_factory=dict[Owner, tuple[int, int]])


def look(ahead: Ahead, scope: Scope, known: Known) -> Found:
    """Ask for what `scope` needs beyond `known`.   Where control records were lost, those that stand are shown."""
    return _Look(ahead, scope, known).found


class _Look:
    def __init__(self, ahead: Ahead, scope: Scope, known: Known) -> None:
        self._ahead, self._scope, self._known, self._rounds = ahead, scope, known, Rounds(ahead)
        self.found = Found(known.wanted)
        self._slots: set[str] = set()
        self._logs: set[Owner] = set()  # that are followed by now
        self._ask_control(CONTROLS if known.first else 1)
        if known.first:
            self._rounds.want([layout.RUN, layout.beat(SUPERVISOR), layout.CONTROLS])
        self._rounds.count(layout.commit, known.commits, self._reach(known.commits), self._committed)
        self._claims_of(SUPERVISOR)
        self._meet(known.wanted.slots or self._likely_slots())
        self._rounds.run()

    def _likely_slots(self) -> list[str]:
        kept = [slot for slot in self._known.claims if slot != SUPERVISOR]
        return kept or [layout.slot_name(i) for i in range(FIRST_SLOTS)]

    def _reach(self, known: int) -> int:
        """How far to gallop: the first look may be long after what is kept, the next ones follow at once."""
        return 1 if not self._known.first else NEAR if known else FAR

    def _ask_control(self, count: int) -> None:
        start = self.found.wanted.records
        keys = [layout.control(n) for n in range(start, start + count)]
        self._rounds.want(keys, lambda: self._hear_control(count))

    def _hear_control(self, count: int) -> None:
        start = self.found.wanted.records
        all_there = all(self._ahead.is_there(layout.control(n)) for n in range(start, start + count))
        if all_there:  # there may be more: read on when those have been asked for, too
            self._rounds.want([layout.control(start + count + n) for n in range(count)])
            self._rounds.want([], lambda: self._hear_control(2 * count))
            return
        if start:
            self.found.wanted = read_control(self._ahead, self.found.wanted)
        else:
            self.found.wanted, self.found.lost = readable(self._ahead)
        self._meet(self.found.wanted.slots)

    def _meet(self, slots: Iterable[str]) -> None:
        for slot in slots:
            if slot not in self._slots:
                self._slots.add(slot)
                self._rounds.want([layout.beat(slot)])
                self._claims_of(slot)

    def _claims_of(self, slot: str) -> None:
        key = lambda n: layout.claim(slot, n + 1)  # noqa: E731
        low = self._known.claims.get(slot, 0)
        self._follow(slot, low)
        self._rounds.count(key, low, 1 if not self._known.first else NEAR, lambda n: self._claimed(slot, n))

    def _claimed(self, slot: str, generations: int) -> None:
        self.found.claims[slot] = generations
        self._follow(slot, generations)

    def _follow(self, slot: str, generations: int) -> None:
        """What there is to know of each life of a slot."""
        lives = [(slot, g) for g in range(1, generations + 1)]
        self._rounds.want([layout.claim(s, g) for s, g in lives if g > self._read_claims(s)])
        if slot != SUPERVISOR:
            self._rounds.want([layout.leave(s, g) for s, g in lives if (s, g) not in self._known.ended])
        for owner in self._with_logs(lives):
            if owner not in self._logs:
                self._logs.add(owner)
                self._logs_of(owner)

    def _read_claims(self, slot: str) -> int:
        """The newest generation that the reader has read already."""
        return 0 if self._known.first else self._known.claims.get(slot, 0)

    def _with_logs(self, lives: list[Owner]) -> list[Owner]:
        """Whose logs this view follows, where it does not list all."""
        if self._scope.newest is None:
            return []
        if lives and lives[0][0] == SUPERVISOR:
            return lives if self._known.first else lives[-GENERATIONS:]
        return lives[-GENERATIONS:] if self._scope.newest else []

    def _logs_of(self, owner: Owner) -> None:
        key = lambda n: layout.log(*owner, n)  # noqa: E731
        low = self._known.logs.get(owner, 0)
        self._rounds.count(key, low, self._reach(low), lambda n: self._logged(owner, n))

    def _logged(self, owner: Owner, count: int) -> None:
        start = 0 if self._known.first else self._known.logs.get(owner, 0)
        if owner[0] != SUPERVISOR and self._known.first:
            start = max(0, count - (self._scope.newest or 0))
        self.found.logs[owner] = (start, count)
        self._rounds.want([layout.log(*owner, n) for n in range(start, count)])

    def _committed(self, count: int) -> None:
        self.found.commits = count
        if self._scope.commits:
            self._rounds.want([layout.commit(t) for t in range(self._known.read, count)])


# -------------------------------------------------------------------- what is kept


def first_look(ahead: Ahead, scope: Scope) -> Found:
    """The same for who knows nothing, with what the cache has, if that is of this run."""
    cache = ahead.cache
    known = Known() if cache is None else kept(cache)
    if cache is None or known.commits == 0:
        return look(ahead, scope, known)
    newest = layout.commit(known.commits - 1)
    body = cache.take(newest)
    found = look(ahead, scope, replace(known, commits=known.commits - 1))
    if body is not None and ahead.get(newest) == body:
        cache.put_back(newest, body)
        return found
    cache.clear()
    ahead.forget()
    return look(ahead, scope, Known())


def kept(cache: Cache) -> Known:
    """How far the run in the cache goes; nothing, if no commit proves that it is this one."""
    commits = max((layout.commit_step(key) for key in cache.keys("commit")), default=-1) + 1
    if commits == 0:
        return Known()
    claims, logs = dict[str, int](), dict[Owner, int]()
    for key in cache.keys("claim"):
        slot, generation = layout.claim_owner(key)
        claims[slot] = max(generation, claims.get(slot, 0))
    for key in cache.keys("log"):
        if owner := layout.log_owner(key):
            logs[owner] = max(layout.log_number(key) + 1, logs.get(owner, 0))
    return Known(commits=commits, claims=claims, logs=logs)
