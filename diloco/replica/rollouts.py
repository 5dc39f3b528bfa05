"""A replica's recorded rollouts in the bucket ([fleet] record_rollouts).

    GET rollouts/{slot}/{g}/{k}.0.bundle ── one of this run, sampled on outer step t, whole, fits ──▶ train on it
         │ none                                  │ no: the next attempt
         ▼                                       ▼
    generate ──▶ create ──▶ train                another process was faster ──▶ train on its bundle

A place is (slot, generation g, bundle k): known before the rollouts are made.  t is the outer step on which the slot
trains them.  A bundle of an earlier t has older weights.  An actor's bundle, which has log-probs, is used if it is at
most fleet.staleness outer steps older and passes a check (door.py).  A session's older bundle is not used.  This
depends only on the chain and on records, so every session of a slot decides alike.

A bundle may cause a session's end, if its rollouts are too long for the device's memory. So a session whose two
predecessors ended without counted work ignores the bundles of others, and draws noise of its own.

If the store fails, a bundle is not recorded, but no step is lost: the trainer continues with its own rollouts.

With a limit (fleet.keep), a slot's bundles are deleted when θ of their steps cannot be computed any more, since then
no audit can use them.  A bundle that a suspended process writes after that is of an old step, so no session uses it.

Not promised: that two machines compute the same weights inside a round; so a round's later generations may differ.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from diloco.process.data_position import read_offers, uncounted_sessions
from diloco.run.combinations import staleness_of
from diloco.run.sections import keep_bytes
from inner.rollouts.bundle import Bundle
from inner.rollouts.recorded import BundlePlace, TooFar, Unfit, record_rollouts
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from rendezvous.background import Background, Emit, Worker, seen_words, submit_reported, together_on
from rendezvous.clock import Clock
from rendezvous.errors import KeyExists, RendezvousError, StoreFull, StoreRefused, StoreUnclear
from rendezvous.keeping.reach import read_reach
from rendezvous.records.digests import digest, required_digest_kind
from rendezvous.records.records import WireError, new_nonce
from rendezvous.records.rollouts import Rollouts, is_whole, read_record, seal_bundle
from rendezvous.store import VOID, PatientStore, Store, put_once

if TYPE_CHECKING:
    from diloco.outer.ranks.group import Group
    from diloco.process.session import Session
    from diloco.replica.door import RolloutDoor
    from diloco.run.record import Run
    from inner import InnerLoop

PATIENCE_S = 30.0
UNLUCKY = 2  # sessions of a slot without counted work, after which the next one makes its own rollouts


def keep_rollouts(run: "Run", session: "Session", loop: "InnerLoop") -> Callable[[], None]:
    """Let the replica's loop find and record its rollouts in the run's bucket.

    Return a function to call after the training: it logs the counts of the last outer step's bundles.
    """
    trainer: Any = getattr(loop, "trainer", None)
    if trainer is None:
        return lambda: None
    bucket = session.rv.store.store  # without retries: the session's own store waits out a full disk
    engine = "vllm" if trainer.use_vllm else "transformers"
    ahead = staleness_of(run.config)
    anew = makes_anew(run, session.rv.slot, session.rv.generation)
    group: Group | None = getattr(loop, "group", None)  # the replica's ranks (ranks.py)
    each = [
        BucketPlaces(
            bucket, session.clock, session.emit, run=run.record.nonce, slot=session.rv.slot,
            by=session.rv.generation, engine=engine, staleness=ahead, anew=anew,
        )
        for _ in range(group.count if group else 1)
    ]  # fmt: skip
    if share := run.config.fleet.check_rollouts:
        from diloco.replica.door import ModelCheck, RolloutDoor, start_weights

        check = ModelCheck(each[0].store, trainer, loop.model, lambda: start_weights(run))
        door = RolloutDoor(
            each[0].store, session.clock, session.emit, check,
            run=run.record.nonce, slot=session.rv.slot, by=session.rv.generation, share=share,
            parent=run.record.parent.outer_steps,
        )  # fmt: skip
        for places in each:
            places.door = door
    if keep_bytes(run.config.fleet.keep) is not None:
        note = OldBundles(
            bucket, session.rv.slot, Worker(session.emit), session.emit, ahead, parent=run.record.parent.outer_steps
        ).note  # fmt: skip
        for places in each:
            places.after_put = note
    if group is None:
        record_rollouts(trainer, each[0])
        return each[0].tell
    from diloco.replica.rank_rollouts import LeadingPlaces

    leading = LeadingPlaces(group, each)
    record_rollouts(trainer, leading)
    return leading.tell


def makes_anew(run: "Run", slot: str, generation: int) -> bool:
    """Whether this session ignores bundles of others: the UNLUCKY sessions before it ended without counted work."""
    if generation <= UNLUCKY:
        return False
    offers = read_offers(run.store, first_open_step(run.store), together_on(run.store))
    return uncounted_sessions(offers.get(slot, ()), generation) >= UNLUCKY


class OldBundles:
    """The bundles of one slot, with their outer steps.   store: without retries; a failed deletion is tried again.

    background: runs the deletions.   emit: called for failures.   ahead: outer steps by which actors sample ahead.
    parent: outer steps of the run that this run continues; the numbers of places begin after them.
    """

    def __init__(
        self, store: Store, slot: str, background: Background, emit: Emit, ahead: int = 0, parent: int = 0
    ) -> None:  # fmt: skip
        self._store = store
        self._prefix = f"{layout.ROLLOUTS}{slot}/"
        self._background = background
        self._emit = emit
        self._ahead, self._parent = ahead, parent
        self._steps: dict[str, int] = {}  # prefix of a generation's keys -> its outer step
        self._began = self._newest = -1

    def note(self, place: BundlePlace) -> None:
        """Note that this place has a bundle; at a new outer step, delete those that no audit can use."""
        self._steps[f"{self._prefix}{place.generation:010d}/"] = place.outer
        if place.outer > self._newest:
            self._newest = place.outer
            submit_reported(self._background, self._sweep, self._emit)

    def _sweep(self) -> None:
        """Delete the bundles of steps whose θ cannot be computed any more."""
        if self._began < 0:
            self._began = self._newest
            others = {key.rpartition("/")[0] + "/" for key in self._store.list(self._prefix)} - set(self._steps)
            self._steps |= dict.fromkeys(others, self._began + self._ahead)  # bundles of other slots
        since = self._parent + read_reach(self._store).since
        for prefix in [prefix for prefix, step in list(self._steps.items()) if step < since]:
            self._store.delete(self._store.list(prefix))
            del self._steps[prefix]


class BucketPlaces:
    """The Places (inner/rollouts/recorded.py) of one slot.

    emit: called for bundles that cannot be used.   by: generation of the session, 0 for an actor.
    staleness: outer steps by which an actor's bundle may be older.   anew: whether to ignore bundles of other sessions.
    actor: the name of the actor that stores bundles here; "" for a replica.
    after_put: called when a place has its bundle.   door: decides which bundles of actors are used; None: all.
    """

    def __init__(
        self, store: Store, clock: Clock, emit: Emit, *, run: str, slot: str, by: int, engine: str, staleness: int = 0,
        actor: str = "", anew: bool = False,
    ) -> None:  # fmt: skip
        self.store = PatientStore(store, clock, PATIENCE_S, waits_on_refusal=False)
        self._clock = clock
        self._emit = emit
        self._run = run
        self._slot = slot
        self._by = by
        self._engine = engine
        self._staleness = staleness
        self._actor = actor
        self._anew = anew
        self._kind = required_digest_kind(store)
        self._attempt = 0  # the first free attempt in the newest place
        self._outer, self._found, self._expired = -1, 0, 0  # outer step of the newest place; two counts of this step
        self.door: RolloutDoor | None = None
        self.own_only = False  # whether actors' bundles are passed over
        self.after_put: Callable[[BundlePlace], None] = lambda place: None

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return the first bundle of this place that can be used."""
        if place.outer > self._outer:
            self.tell()
        self._outer = place.outer
        try:
            found = self._look(place, unfit)
        except RendezvousError as error:
            self._emit("rollouts_lost", step=place.outer, text=f"recorded rollouts cannot be read: {seen_words(error)}")
            found = None
        if found is not None:
            self._found += 1
            self.after_put(place)
        return found

    def pass_over(self, found: Bundle) -> None:
        """Count the bundle that `find` returned as not trained on, because another rank has no such bundle."""
        self._found -= 1
        self._expired += found.logprobs is not None

    def tell(self) -> None:
        """Log how many bundles the newest outer step found, and how many actors' bundles were too old or too far."""
        if self._found or self._expired:
            self._emit("rollouts_found", step=self._outer, bundles=self._found, expired=self._expired)
            self._found = self._expired = 0

    def _look(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        self._attempt = 0
        while (body := self.store.get(self._key(place))) is not None:
            if (found := self._usable(place, body, unfit)) is not None:
                return found
            self._attempt += 1
        return None

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Record `made`. Return the bundle that counts for this place."""
        try:
            stands = self._put(place, made, unfit)
            self.after_put(place)
            return stands
        except (RendezvousError, ValueError) as error:  # ValueError: of `pack`
            self._emit("rollouts_lost", step=place.outer, text=f"these rollouts are not recorded: {seen_words(error)}")
            return made

    def deliver(self, place: BundlePlace, made: Bundle) -> bool:
        """Record an actor's bundle, if its place has none yet.   Return whether this bundle counts.

        Raise StoreRefused if the actor may not write, because then all that it samples is lost.
        """
        try:
            body = self._sealed(place, made)
            return self._create(self._key(place), body) == body
        except (RendezvousError, ValueError) as error:
            if isinstance(error, StoreRefused) and not isinstance(error, StoreFull):
                raise
            self._emit("rollouts_lost", step=place.outer, text=f"these rollouts are not recorded: {seen_words(error)}")
            return False

    def _put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        body = self._sealed(place, made)
        while (stands := self._create(self._key(place), body)) != body:
            if (found := self._usable(place, stands, unfit)) is not None:
                self._found += 1
                return found
            self._attempt += 1
        return made

    def _sealed(self, place: BundlePlace, made: Bundle) -> bytes:
        """Return the bytes of a bundle's object."""
        payload = made.pack()
        record = Rollouts(
            run=self._run, slot=self._slot, place=(place.generation, place.bundle), step=place.outer, by=self._by,
            engine=self._engine, threads=torch.get_num_threads(), rollouts=len(made.ids),
            tokens=sum(map(len, made.ids)), digest=digest(payload, self._kind), nonce=new_nonce(),
            actor=self._actor,
        )  # fmt: skip
        return seal_bundle(payload, record)

    def _create(self, key: str, body: bytes) -> bytes:
        """Create the object unless it exists, and return the object's bytes.  No GET first: `find` saw no object."""
        try:
            self.store.create(key, body)
            return body
        except (KeyExists, StoreUnclear):
            return put_once(self.store, self._clock, key, body)[1]

    def _key(self, place: BundlePlace) -> str:
        return layout.bundle_key(self._slot, place.generation, place.bundle, self._attempt)

    def _usable(self, place: BundlePlace, body: bytes, unfit: Unfit) -> Bundle | None:
        """Return the object's bundle.   None: it is of another outer step, or cannot be used, which is reported."""
        try:
            bundle, why = self._read(place, body, unfit)
        except (WireError, ValueError) as error:
            bundle, why = None, str(error)
        if isinstance(why, TooFar):
            self._expired += 1
        elif why:
            self._emit("rollouts_refused", step=place.outer, key=self._key(place), text=why)
        return None if why else bundle

    def _read(self, place: BundlePlace, body: bytes, unfit: Unfit) -> tuple[Bundle | None, str]:
        """Return the bundle, or why it cannot be used; (None, "") if it is of another outer step."""
        if body == VOID:
            return None, ""  # the store has reported the error
        record, payload = read_record(body)
        if (record.run, record.slot, tuple(record.place)) != (self._run, self._slot, place[1:]):
            return None, f"they are of {record.slot}, generation {record.place[0]}, in run {record.run}"
        if self._anew and record.by != self._by:
            return None, ""
        age = place.outer - record.step
        if not 0 <= age <= (self._staleness if record.actor else 0) or (record.actor and self.own_only):
            self._expired += bool(record.actor)
            return None, ""
        if not is_whole(record, payload, self._kind):
            return None, "their bytes have another digest than their record names"
        bundle = Bundle.unpack(bytes(payload))
        counts = len(bundle.ids), sum(map(len, bundle.ids))
        if counts != (record.rollouts, record.tokens):
            told = f"{record.rollouts} of {record.tokens} by their record"
            return None, f"they are {counts[0]} rollouts of {counts[1]} tokens, and {told}"
        if record.actor and bundle.logprobs is None:
            return None, f"the actor {record.actor} left out their log-probs"
        why = unfit(bundle)
        may_lie = record.actor and (not why or isinstance(why, TooFar))  # rollouts of wrong weights are also too far
        if may_lie and self.door and not self.door.lets_in(place, self._key(place), record, bundle):
            return None, ""  # the door has reported its doubts
        return bundle, why
