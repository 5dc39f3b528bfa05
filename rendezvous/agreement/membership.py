"""The holders of slots, the replicas that seem alive, and the desired state.

    claim     replicas/{slot}/{g}, g = 1, 2, …  by put_once: the holder of the highest g may act
    beat      alive/{slot}.json, overwritten; it shows a living replica only while its counter changes
    control   control/000000, 000001, …  read in order; each record overrides parts of the desired state

`Membership.tick` is one turn of a loop that runs beside the training, in a thread or in a simulated thread.  The parts
of a tick are independent.  A part that ends in an error of the store is skipped: beats are only hints.  A part with any
other error is reported and tried again.  If a part fails too often, `tick` raises HeartbeatLost and the replica ends.
Every tick writes a beat.  The other requests are rare, because a cloud store bills each one:

    control       every 2 beats: a stop may wait that long
    successor     every 4 beats, about `dead_after`: no supervisor launches a successor sooner
    commit        while training: often once the step may be decided (rules.may_be_decided), rarely before
    other beats   while starting, and in steps 0 and 1: all.  Later only the slots for which a step waits, and,
                  once per step, the slots that may still need this replica's last body (`owed`)

Not promised: that a slot with a beat makes progress, or that a silent slot is dead.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from typing import Any

from rendezvous import layout
from rendezvous.agreement.rules import LARGE_FLEET, STARTING, Peer, Timing, beat_age, may_be_decided
from rendezvous.background import Emit, Parts, fetch_together, in_turn, no_emit, together_on
from rendezvous.clock import Clock
from rendezvous.errors import Fenced, HeartbeatLost, RecordsLost, RendezvousError, StoreError
from rendezvous.records.records import Beat, Claim, Control, Leave, Offer, Spent, decode_or_none, new_nonce
from rendezvous.store import Readable, Store, put_once

CONTROL_BEATS = 2  # the number of beats within which a replica reads a stop, a drain or a new lease of the budget
SUCCESSOR_BEATS = 4  # no supervisor launches a successor before this slot has been silent for so many beats
MOST_AT_ONCE = 64  # numbered records in one round of requests
REQUESTS = 8  # requests that a process makes, one after the other, between two heartbeats
NOTE = 1000  # at most so many characters of a heartbeat's note
JITTER = 0.8  # look again after this part of a period, not after the whole period: a sleep may end a little early

# A control record may contain some of these settings, and overrides them.
FOLDED = (
    "replicas", "steps", "min_replicas", "places", "max_usd", "max_hours", "allow_unknown_price", "until", "keep",
    "spent", "actors",
)  # fmt: skip


@dataclass(frozen=True)
class Wanted:
    """The run's desired state.

    universe: the number of possible slots: the largest `replicas` of any record; more if a guest's slot is higher.
    guests: slots whose replicas you start yourself: they take part, and no supervisor restarts them.
    actors: the number of actors to keep (diloco/actor/).   most_actors: the largest `actors` of any record.
    former: places that earlier records named.   highest_quorum: the largest `min_replicas` of any record.
    places, max_usd, max_hours, allow_unknown_price, until, keep, spent: the same as in Control.
    """

    replicas: int = 0
    universe: int = 0
    actors: int = 0
    most_actors: int = 0
    steps: int = 0
    min_replicas: int = 1
    drains: frozenset[str] = frozenset()
    stop: bool = False
    records: int = 0
    places: tuple[dict[str, Any], ...] = ()
    max_usd: float = 0.0
    max_hours: float = 0.0
    allow_unknown_price: bool = False
    until: float = 0.0
    keep: str = ""
    spent: Spent = field(default_factory=Spent)
    former: tuple[dict[str, Any], ...] = ()
    highest_quorum: int = 1
    guests: frozenset[str] = frozenset()

    def with_control(self, control: Control) -> "Wanted":
        """Return the desired state after one more control record."""
        said = {name: value for name in FOLDED if (value := getattr(control, name)) is not None}
        guests = {control.guest} if control.guest else set[str]()
        beyond = {kind: [int(guest[1:]) + 1 for guest in guests if guest[0] == kind] for kind in "ra"}
        return replace(
            self,
            **said,
            universe=max(self.universe, said.get("replicas", self.replicas), *beyond["r"]),
            most_actors=max(self.most_actors, said.get("actors", 0), *beyond["a"]),
            guests=self.guests | guests,
            former=self._former_after(control),
            highest_quorum=max(self.highest_quorum, said.get("min_replicas", 1)),
            drains=self._drains_after(control),
            stop=(self.stop or control.stop) and not control.resume,
            records=control.n + 1,
        )

    def _drains_after(self, control: Control) -> frozenset[str]:
        if control.resume or control.replicas is not None:
            return frozenset()
        kept = self.drains if control.actors is None else frozenset(filter(layout.is_slot, self.drains))
        return kept | {control.drain} if control.drain else kept

    def _former_after(self, control: Control) -> tuple[dict[str, Any], ...]:
        if control.places is None:
            return self.former
        gone = [p for p in (*self.former, *self.places) if p not in control.places]
        return tuple(p for i, p in enumerate(gone) if p not in gone[:i])

    def is_to_leave(self, slot: str) -> bool:
        """Whether this slot's replica must leave."""
        return self.stop or slot in self.drains or (slot not in self.guests and self._is_beyond(slot))

    def is_kept(self, slot: str) -> bool:
        """Whether a supervisor keeps a replica in this slot."""
        return not self.is_to_leave(slot) and not self._is_beyond(slot)

    def _is_beyond(self, slot: str) -> bool:
        if not layout.is_slot(slot):
            return int(slot[1:]) >= self.actors
        return layout.slot_index(slot) >= self.replicas > 0

    @property
    def slot_names(self) -> list[str]:
        return [layout.slot_name(i) for i in range(self.universe)]

    @property
    def member_names(self) -> list[str]:
        """The names of all slots, and of all actors."""
        return [*self.slot_names, *(layout.actor_name(i) for i in range(self.most_actors))]


def read_control(store: Readable, wanted: Wanted | None = None) -> Wanted:
    """Apply all control records from number `wanted.records` on to the desired state, and return the result.

    An object that is not a control record is skipped, and uses up its number.   Raise RecordsLost if number 0 is such
    an object.
    """
    wanted = wanted or Wanted()
    for body in _numbered_objects(store, layout.control_key, wanted.records):
        control = decode_or_none(Control, body)
        if control is not None and control.n == wanted.records:
            wanted = wanted.with_control(control)
        else:
            if wanted.records == 0:
                raise RecordsLost(
                    f"{store.url}/{layout.control_key(0)} is not a control record: it was overwritten, or another "
                    f"program wrote it before the run began. {_WITHOUT_IT} {RESTORE}. If the run never had one, "
                    "delete the object"
                )
            wanted = replace(wanted, records=wanted.records + 1)
    return wanted


def _numbered_objects(store: Readable, key_of: Callable[[int], str], first: int) -> Iterator[bytes]:
    """Yield the objects under key_of(first), key_of(first + 1), …, up to the first missing object.

    A run of weeks has thousands of objects, so where requests are slow, each round asks for twice as many.
    """
    count, together = 1, together_on(store)
    while True:
        keys = [key_of(n) for n in range(first, first + count)]
        found = fetch_together(together, store.get, keys, MOST_AT_ONCE)
        for key in keys:
            if (body := found[key]) is None:  # later objects do not count: a gap means a lost record (refuse_lost)
                return
            yield body
        first, count = first + count, 1 if together is in_turn else min(2 * count, MOST_AT_ONCE)


_WITHOUT_IT = "Without it the run has another quorum and no budget, so no replica joins and no request is written."
RESTORE = (
    "Restore the object (from the bucket's versions, or a backup); remove every rule or program that expires, deletes "
    "or overwrites objects below this URL; then run the same command again"
)


def refuse_lost(store: Readable, wanted: Wanted) -> None:
    """Raise RecordsLost if a control record has vanished; without it the quorum and the budget may be wrong.

    A later control record proves a gap; a committed step proves that there was a first record.  Any other object proves
    nothing, because any writer may have put it there.  LIST may be out of date.  The later records may also have been
    written since `wanted` was read.  Records are written in order, so the missing record is read again, after the
    others. Records of `wanted` may have vanished since: records that LIST does not show are read again, too.
    """
    numbers = _control_numbers(store)
    later = controls_above(store, wanted.records, numbers)
    stepped = wanted.records == 0 and store.get(layout.commit_key(0)) is not None
    unlisted = sorted({*range(wanted.records)}.difference(numbers))[:MOST_AT_ONCE]
    for n in [*unlisted, *[wanted.records] * bool(later or stepped)]:
        if store.get(layout.control_key(n)) is None:
            seen = f"{layout.control_key(later[0].n)} is there" if later else "steps are committed"
            seen = "it was read before" if n < wanted.records else seen
            raise RecordsLost(
                f"{store.url}/{layout.control_key(n)} has vanished, though {seen}. {_WITHOUT_IT} {RESTORE}"
            )


def _control_numbers(store: Readable) -> list[int]:
    return sorted(n for key in store.list(layout.CONTROLS) if (n := layout.control_number(key)) is not None)


def controls_above(store: Readable, n: int, numbers: Iterable[int] | None = None) -> list[Control]:
    """Return the control records above n, in order, except records that LIST does not show.   numbers: LIST's answer"""
    above = [m for m in (_control_numbers(store) if numbers is None else numbers) if m > n]
    found = [(m, decode_or_none(Control, store.get(layout.control_key(m)))) for m in above]
    return [control for m, control in found if control is not None and control.n == m]


def write_control(store: Store, clock: Clock, known: Wanted | None = None, /, **changes: object) -> Wanted:
    """Append one control record.   Return the desired state after it.   known: an earlier state, to read on from."""
    if "places" in changes:
        changes["places"] = tuple(changes["places"])  # type: ignore[arg-type]
    while True:
        wanted = read_control(store, known)
        refuse_lost(store, wanted)
        record = Control(n=wanted.records, nonce=new_nonce(), at=clock.wall(), **changes)  # type: ignore[arg-type]
        _check_control(record)
        won, _ = put_once(store, clock, layout.control_key(record.n), record.encode())
        if won:
            return wanted.with_control(record)


def _check_control(record: Control) -> None:
    for name in ("replicas", "steps", "min_replicas"):
        count = getattr(record, name)
        if count is not None and count < 1:
            raise ValueError(f"{name} = {count} is not possible: the minimum is 1. To end a run, use stop")
        if count is not None and count > layout.MOST_SLOTS and name != "steps":
            raise ValueError(f"{name} = {count} is not possible: the maximum is {layout.MOST_SLOTS}")
    for name in ("max_usd", "max_hours", "until"):
        if (most := getattr(record, name)) is not None and not 0 <= most < math.inf:
            raise ValueError(f"{name} = {most} is not possible: give a number ≥ 0; 0 means no limit")
    if record.drain is not None and not layout.is_member(record.drain):
        raise ValueError(f"{record.drain!r} is neither a slot (r00, r01, …) nor an actor (a00, a01, …)")


def claims_above(store: Readable, slot: str, above: int = 0) -> Iterator[Claim]:
    """Yield the claims of the slot's generations after `above`, in order.

    An object that is not a claim of this slot and generation is skipped, and uses up its number.
    """
    bodies = _numbered_objects(store, partial(layout.claim_key, slot), above + 1)
    for generation, body in enumerate(bodies, above + 1):
        if (found := _claim_in(body, slot, generation)) is not None:
            yield found


def newest_claim(store: Readable, slot: str) -> Claim | None:
    """Return the slot's claim with the highest generation, or None without a claim."""
    return max(claims_above(store, slot), key=lambda c: c.generation, default=None)


def read_claim(store: Readable, slot: str, generation: int) -> Claim | None:
    """Return the claim of this generation of the slot, or None without such a claim."""
    return _claim_in(store.get(layout.claim_key(slot, generation)), slot, generation)


def _claim_in(body: bytes | None, slot: str, generation: int) -> Claim | None:
    found = decode_or_none(Claim, body)
    return found if found and (found.slot, found.generation) == (slot, generation) else None


def read_leave(store: Readable, slot: str, generation: int) -> Leave | None:
    """Return the leave record of this generation, or None without it."""
    found = decode_or_none(Leave, store.get(layout.leave_key(slot, generation)))
    return found if found and (found.slot, found.generation) == (slot, generation) else None


def claim(store: Store, clock: Clock, slot: str, *, host: str = "", **process: Any) -> int:
    """Claim a slot's next generation, and return its number.   process: the claim's other fields.

    If two launches claim at the same moment, Fenced is raised in the loser, which ends.  If the loser claimed the next
    generation instead, two launchers would fence each other without end.  Fenced is also raised in a launch that its
    platform restarts after a later launch has claimed the slot.
    """
    generation = 1
    while True:
        while (body := store.get(layout.claim_key(slot, generation))) is not None:
            other = _claim_in(body, slot, generation)
            if other and 0 < launch_of(host, slot) < launch_of(other.host, slot):
                raise Fenced(f"{slot} belongs to a later launch than {host}; this process ends")
            generation += 1
        mine = Claim(slot, generation, new_nonce(), clock.wall(), host=host, **process)
        won, value = put_once(store, clock, layout.claim_key(slot, generation), mine.encode())
        if won:
            return generation
        if (other := _claim_in(value, slot, generation)) is not None:
            raise Fenced(
                f"{slot} was claimed at the same moment by process {other.pid} on {other.host or '?'} "
                f"(generation {generation}); this process ends"
            )


def launch_of(host: str, slot: str) -> int:
    """Return the launch number in a claim's `host`: "modal/r01.3" -> 3; 0 if the host has none."""
    place, _, number = host.rpartition(".")
    return int(number) if number.isascii() and number.isdigit() and place.endswith(f"/{slot}") else 0


@dataclass
class BeatStatus:
    """Fields of this replica's next beat; the owner of the Membership overwrites them."""

    phase: str = "boot"
    step: int = 0
    inner: int = 0
    rate: float = 0.0
    note: str = ""
    data: int = 0
    box_usd: float = 0.0
    evaluates: bool = False

    def enter_phase(self, phase: str, step: int) -> None:
        self.phase = phase
        self.step = step
        self.note = ""
        if phase == "train":
            self.inner = 0


@dataclass(eq=False, repr=False)
class Membership:
    """One replica's view of the others; `tick` updates it.   emit: called for errors that are not RendezvousErrors."""

    store: Store
    clock: Clock
    slot: str
    generation: int
    timing: Timing
    _: KW_ONLY
    host: str = ""
    pid: int = 0
    started: int = 0
    ranks: int = 0
    emit: Emit = no_emit
    status: BeatStatus = field(default_factory=BeatStatus)
    wanted: Wanted = field(default_factory=Wanted)
    owed: set[str] = field(default_factory=set[str])  # slots that may still read this replica's body of the last step
    peers: dict[str, Peer] = field(default_factory=dict[str, Peer])  # each is replaced as a whole: threads read them
    fenced_by: int = 0  # the later generation that claimed the slot; 0 while none is known
    decided: int = -1  # highest step whose commit a tick has seen
    heartbeat_lost: BaseException | None = None  # why the caller of `tick` has stopped; the caller sets it

    def __post_init__(self) -> None:
        self._beats, self._late = 0, 0.0
        self._beating = threading.RLock()  # reentrant: simulated threads share one real thread
        self._ticked = 0.0, self.clock.now()  # the last tick's time, by `awake_s` and by the clock
        self._done_at: dict[str, float] = {}  # name of a look -> when it last succeeded
        self._read_at: dict[str, float] = {}  # slot -> `awake_s` at the last request for its beat
        self._opened, self._pace = 0.0, 0.0  # the open step: `awake_s` when it began, and its expected seconds
        self._untrusted: dict[str, int] = {}
        self._parts = Parts(self.emit)

    @property
    def name(self) -> str:
        """Name of this replica: slot and generation."""
        return f"{self.slot}-{self.generation}"

    def check_alive(self) -> None:
        """Raise HeartbeatLost if `tick` is not called any more: this replica would not see stops or successors."""
        if (why := self.heartbeat_lost) is not None:
            raise HeartbeatLost(f"the heartbeat of {self.name} has ended; this replica ends too: {why}") from why

    def refuse_if_fenced(self) -> None:
        """Raise Fenced if a later generation holds the slot; raise HeartbeatLost as `check_alive` does."""
        self.check_alive()
        if self.fenced_by > self.generation:
            raise Fenced(
                f"{self.slot} now belongs to generation {self.fenced_by}; this process (generation "
                f"{self.generation}) ends. Its offers and bundles still count"
            )

    def claim(self, store: Store, claimed: int = 0) -> int:
        """Claim the slot, if it is not claimed already, and read the desired state.   Return the generation."""
        self.generation = claimed or claim(
            store, self.clock, self.slot, host=self.host, pid=self.pid, started=self.started, ranks=self.ranks
        )
        self.hear_control(store)
        return self.generation

    def hear_control(self, store: Store) -> Wanted:
        """Read new control records.   Return the run's desired state."""
        heard = read_control(store, self.wanted)
        if heard.records > self.wanted.records:  # another thread may have read more records meanwhile
            self.wanted = heard
        return heard

    def note_offer(self, offer: Offer) -> None:
        """Note an offer.  If its generation's heartbeat had stopped, never trust that heartbeat again."""
        peer = self.peers.get(offer.slot)
        if peer and peer.is_dead(self.timing.dead_after) and peer.beat.generation == offer.generation:
            self._untrusted[offer.slot] = offer.generation
            self.peers[offer.slot] = replace(peer, untrusted_generation=offer.generation)

    def begin_step(self, pace: float, owed: set[str]) -> None:
        """Note that this replica begins to train for the open step.

        pace: expected seconds of an outer step, 0 if unknown.
        owed: slots that may still read this replica's body of the last step.
        """
        self._opened = self.awake_s
        self._pace = pace
        self.owed = owed
        self._done_at[self._read_commit.__name__] = self.clock.now()  # just read: no commit exists yet

    @property
    def awake_s(self) -> float:
        """Seconds since this replica began, without suspensions: each tick counts at most four beats' time."""
        awake, ticked = self._ticked
        return awake + min(self.clock.now() - ticked, 4 * self.timing.beat)

    def tick(self) -> None:
        """Write a beat; look for a successor, a commit, the other replicas' beats and the desired state."""
        self._ticked = self.awake_s, self.clock.now()
        self._parts.run(
            self._beat, self._look_for_successor, self._look_for_commit, self._look_around, self._look_for_control
        )

    def _do_every(self, period: float, act: Callable[[], object]) -> None:
        """Call act() if its last success is at least a period ago.  So after a long pause every look is due."""
        now = self.clock.now()
        name = act.__name__
        if now - self._done_at.get(name, -math.inf) >= JITTER * period:
            act()
            self._done_at[name] = now

    def _beat(self) -> None:
        with self._beating:  # else a beat of `tick` may be late, and overwrite the last beat
            self._beats += 1
            note = self.status.note[:NOTE].encode(errors="replace").decode()  # a note may be from user code
            beat = Beat(
                slot=self.slot, generation=self.generation, n=self._beats, at=self.clock.wall(), host=self.host,
                pid=self.pid, **vars(replace(self.status, note=note)),
            )  # fmt: skip
            began = self.clock.now()
            self.store.put(layout.beat_key(self.slot), beat.encode())
            self._late = REQUESTS * (self.clock.now() - began)

    def write_leave_beat(self) -> None:
        """Write a last beat, with phase "left".  Ignore an error of the store."""
        self.status.phase = "left"
        with suppress(StoreError):
            self._beat()

    def _look_for_successor(self) -> None:
        self._do_every(SUCCESSOR_BEATS * self.timing.beat, self._read_claims)

    def _read_claims(self) -> None:
        for successor in claims_above(self.store, self.slot, self.generation):
            self.fenced_by = successor.generation

    def _look_for_commit(self) -> None:
        if self.status.phase in ("wait", "sample") or self.decided >= self.status.step:
            return  # a replica that waits for the decision reads the commit itself; an actor needs no commit
        often = may_be_decided(self.awake_s - self._opened, self._pace)
        self._do_every(self.timing.beat if often else max(3 * self.timing.beat, self._pace / 2), self._read_commit)

    def _read_commit(self) -> None:
        step = self.status.step
        if self.store.get(layout.commit_key(step)) is not None:
            self.decided = step

    def _look_around(self) -> None:
        if self.status.phase in STARTING or self.status.step < 2:
            self.read_beats(self.wanted.slot_names, apart=0.0)
        elif self.owed and self.awake_s - self._opened >= self._pace / 2:
            self.read_beats(self.owed)
            self.owed = {s for s in self.owed if s in self.peers and self.peers[s].beat.step < self.status.step}

    def read_beats(self, slots: Iterable[str], apart: float | None = None) -> None:
        """Read these slots' beats that are due: read one beat (or `apart` seconds) ago, or of a slot that may be dead.

        Read at most `LARGE_FLEET` per beat, the longest unread first.  A failed read is repeated at the next call.
        """
        a_beat = JITTER * self.timing.beat
        now = self.awake_s
        asked = {slot: now - self._read_at.get(slot, -math.inf) for slot in {*slots} - {self.slot}}
        apart_s, limit = a_beat if apart is None else apart, self.timing.dead_after
        due = [slot for slot, ago in asked.items() if ago >= apart_s or _may_die(self.peers.get(slot), ago, limit)]
        recent = 0 if apart == 0.0 else sum(ago < a_beat for ago in asked.values())
        for slot in sorted(due, key=lambda slot: (-asked[slot], slot))[: max(0, LARGE_FLEET - recent)]:
            when = self.awake_s, self.clock.wall()  # before the request, so a slow request makes no beat look old
            with suppress(RendezvousError):
                self._observe_beat(slot, read_beat(self.store, slot), when)

    def _observe_beat(self, slot: str, beat: Beat | None, when: tuple[float, float]) -> None:
        """Note the beat that was read, or None.   when: seconds awake and wall clock before the request."""
        old = self.peers.get(slot)
        if old is not None and when[0] < old.read[0]:
            return  # another thread has read a newer beat
        self._read_at[slot] = when[0]
        if beat is None and old is not None:
            beat = old.beat  # the beat is gone or overwritten by another object: count it as unchanged
        if beat is not None:
            peer = updated_peer(old, beat, when, self.timing.beat, self._untrusted.get(slot, 0))
            self.peers[slot] = replace(peer, late=self._late)

    def by_now(self, slot: str) -> Peer | None:
        """Return the last observation of a slot's beat, aged to now as if the beat had not changed."""
        peer = self.peers.get(slot)
        return peer and peer.aged_by(self.awake_s - peer.read[0])

    def _look_for_control(self) -> None:
        self._do_every(CONTROL_BEATS * self.timing.beat, lambda: self.hear_control(self.store))


def _may_die(peer: Peer | None, ago: float, limit: float) -> bool:
    """Whether a slot that was beating `ago` seconds ago is dead by now if its beat has not changed."""
    return peer is not None and peer.is_beating(limit) and peer.aged_by(ago).is_dead(limit)


def refuse_lost_claim(store: Readable, mine: "Membership") -> None:
    """Raise RecordsLost if this replica's claim is gone, or now names another process: the store was replaced."""
    key = layout.claim_key(mine.slot, mine.generation)
    body = store.get(key)
    found = _claim_in(body, mine.slot, mine.generation)
    if body is None or (found is not None and (found.host, found.pid) != (mine.host, mine.pid)):
        raise RecordsLost(
            f"{store.url}/{key}, which this replica wrote, is "
            f"{'gone' if body is None else 'the claim of another process'}: the store was emptied, or swapped for "
            "another. Nothing was committed there. If the run was deleted, it has ended; start a new one"
        )


def read_beat(store: Readable, slot: str) -> Beat | None:
    """Return a slot's present heartbeat; None without an object, or if that is not this slot's heartbeat."""
    beat = decode_or_none(Beat, store.get(layout.beat_key(slot)))
    return beat if beat is not None and beat.slot == slot else None


def updated_peer(
    old: Peer | None, beat: Beat, read: tuple[float, float], period: float, untrusted_generation: int = 0
) -> Peer:
    """Return the new observation of a peer: `old` is the observation before it, `beat` the heartbeat just read.

    read: (seconds awake, wall clock) of the observer before it read the beat.   period: seconds between two beats.
    Older beats are ignored: a fenced process writes to the same key as its successor, and any writer may restore an old
    beat.
    """
    if old is None:
        return Peer(beat, read=read)
    elapsed = read[0] - old.read[0]
    wall = read[1] - old.read[1]
    if (beat.generation, beat.n) < (old.beat.generation, old.beat.n):
        return replace(old.aged_by(elapsed), untrusted_generation=untrusted_generation, read=read)
    changed = (beat.generation, beat.n) != (old.beat.generation, old.beat.n)
    moved = (beat.generation, beat.step, beat.inner) != (old.beat.generation, old.beat.step, old.beat.inner)
    age = beat_age(old, beat, elapsed, wall, period)
    return Peer(
        beat,
        changes=old.changes + changed,
        silent=age if changed else old.silent + elapsed,
        still=age if moved else old.still + elapsed,
        untrusted_generation=untrusted_generation,
        read=read,
    )
