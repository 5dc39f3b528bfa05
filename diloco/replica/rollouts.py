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

If the store fails, this outer step's bundles are not recorded any more, but no step is lost: the trainer continues with
its own rollouts, and waits for the store only once.  With fleet.keep, old bundles are deleted (old_bundles.py).

Not promised: that two machines compute the same weights inside a round; so a round's later generations may differ.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from diloco.run.sections import keep_bytes
from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.recorded import BundlePlace, Unfit, can_record, record_rollouts
from rendezvous import layout
from rendezvous.background import Emit, Worker, seen_words
from rendezvous.clock import Clock
from rendezvous.errors import KeyExists, RendezvousError, StoreFull, StoreRefused, StoreUnclear
from rendezvous.records.digests import digest, required_digest_kind
from rendezvous.records.records import WireError, new_nonce
from rendezvous.records.rollouts import Rollouts, seal_bundle
from rendezvous.store import PatientStore, Store, put_once

if TYPE_CHECKING:
    from diloco.outer.ranks.group import Group
    from diloco.process.session import Session
    from diloco.replica.door import RolloutDoor
    from diloco.replica.old_bundles import OldBundles
    from diloco.run.record import Run
    from inner import InnerLoop

PATIENCE_S = 30.0
KEPT = 8  # outer steps from the run's beginning on in which no bundle is deleted


def keep_rollouts(run: "Run", session: "Session", loop: "InnerLoop") -> Callable[[], None]:
    """Let the replica's loop find and record its rollouts in the run's bucket.

    Return a function to call after the training: it logs the counts of the last outer step's bundles.
    """
    trainer: Any = getattr(loop, "trainer", None)
    group: Group | None = getattr(loop, "group", None)  # the replica's ranks (ranks.py)
    if trainer is None or not can_record(trainer, in_shards=group is not None and run.config.inner.lora is None):
        return lambda: None
    bucket = session.rv.store.store  # without retries: the session's own store waits out a full disk
    engine = "vllm" if trainer.use_vllm else "transformers"
    ahead = staleness_in(run)
    anew = False
    if session.rv.generation > 1:
        from diloco.process.data_position import is_unlucky

        anew = is_unlucky(run.store, session.rv.slot, session.rv.generation)
    each = [
        BucketPlaces(
            bucket, session.clock, session.emit, run=run.record.nonce, slot=session.rv.slot,
            by=session.rv.generation, engine=engine, staleness=ahead, anew=anew,
        )
        for _ in range(group.count if group else 1)
    ]  # fmt: skip
    note, door = _deletion(run, session, bucket), None
    if ahead >= 0 and run.config.fleet.check_rollouts:
        from diloco.replica.door import door_of

        door = door_of(run, session, loop, each[0].store)
    for places in each:
        places.door, places.after_put = door, note
    if group is None:
        record_rollouts(trainer, each[0])
        return each[0].tell
    from diloco.replica.rank_rollouts import LeadingPlaces

    leading = LeadingPlaces(group, each)
    record_rollouts(trainer, leading)
    return leading.tell


def staleness_in(run: "Run") -> int:
    """Return how many outer steps old an actor's weights may be; -1 in a run without broadcast weights."""
    if not run.config.fleet.broadcast_weights:
        return -1
    from diloco.run.combinations import staleness_of

    return staleness_of(run.config)


def _deletion(run: "Run", session: "Session", bucket: Store) -> "Callable[[BundlePlace], None]":
    """Return a function that is told each place with a bundle, and deletes old bundles if the run has a limit."""
    before, ahead = run.record.parent.outer_steps, max(0, staleness_in(run))

    @cache
    def old() -> "OldBundles":
        from diloco.replica.old_bundles import OldBundles

        return OldBundles(bucket, session.rv.slot, Worker(session.emit), session.emit, ahead, parent=before)

    def note(place: BundlePlace) -> None:
        if place.outer >= before + KEPT:
            old().note(place)

    return note if keep_bytes(run.config.fleet.keep) is not None else lambda place: None


class BucketPlaces:
    """The Places (inner/rollouts/recording/recorded.py) of one slot.

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
        self.run = run
        self.slot = slot
        self.by = by
        self._engine = engine
        self.staleness = staleness
        self._actor = actor
        self.anew = anew
        self.kind = required_digest_kind(store)
        self._attempt = 0  # the first free attempt in the newest place
        self._outer, self._found, self.expired = -1, 0, 0  # outer step of the newest place; two counts of this step
        self.door: RolloutDoor | None = None
        self.own_only = False  # whether actors' bundles are passed over
        self._lost_in = -1  # an outer step in which the store failed: no further wait for the store in this step
        self.is_past_others = False  # without actors: True after a place without a bundle. Then only `put` asks
        self.after_put: Callable[[BundlePlace], None] = lambda place: None

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return the first bundle of this place that can be used."""
        if place.outer > self._outer:
            self.tell()
        self._outer, self._attempt = place.outer, 0
        if self.is_past_others or place.outer == self._lost_in:
            return None
        try:
            found = self._look(place, unfit)
            self.is_past_others = found is None and self.staleness < 0
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
        self.expired += found.logprobs is not None

    def tell(self) -> None:
        """Log how many bundles the newest outer step found, and how many actors' bundles were too old or too far."""
        if self._found or self.expired:
            self._emit("rollouts_found", step=self._outer, bundles=self._found, expired=self.expired)
            self._found = self.expired = 0

    def _look(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        self._attempt = 0
        while (body := self.store.get(self._key(place))) is not None:
            if (found := self._usable(place, body, unfit)) is not None:
                return found
            self._attempt += 1
        return None

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Record `made`. Return the bundle that counts for this place."""
        if place.outer == self._lost_in:
            return made
        try:
            stands = self._put(place, made, unfit)
            self.after_put(place)
            return stands
        except (RendezvousError, ValueError) as error:  # ValueError: of `pack`
            self._emit("rollouts_lost", step=place.outer, text=f"these rollouts are not recorded: {seen_words(error)}")
            self._lost_in = place.outer if isinstance(error, RendezvousError) else self._lost_in
            return made

    def deliver(self, place: BundlePlace, made: Bundle) -> bool:
        """Record an actor's bundle, if its place has none yet.   Return whether this bundle counts.

        Raise StoreRefused if the actor may not write, because then all its rollouts are lost.
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
            run=self.run, slot=self.slot, place=(place.generation, place.bundle), step=place.outer, by=self.by,
            engine=self._engine, threads=torch.get_num_threads(), rollouts=len(made.ids),
            tokens=sum(map(len, made.ids)), digest=digest(payload, self.kind), nonce=new_nonce(),
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
        return layout.bundle_key(self.slot, place.generation, place.bundle, self._attempt)

    def _usable(self, place: BundlePlace, body: bytes, unfit: Unfit) -> Bundle | None:
        """Return the object's bundle.   None if it is of another outer step, or is reported as unusable."""
        try:
            bundle, why = self._read(place, body, unfit)
        except (WireError, ValueError) as error:
            bundle, why = None, str(error)
        if isinstance(why, TooFar):
            self.expired += 1
        elif why:
            self._emit("rollouts_refused", step=place.outer, key=self._key(place), text=why)
        return None if why else bundle

    def _read(self, place: BundlePlace, body: bytes, unfit: Unfit) -> tuple[Bundle | None, str]:
        """Return the bundle, or why it cannot be used; (None, "") if it is of another outer step."""
        from diloco.replica.found_rollouts import read_found

        return read_found(self, place, self._key(place), body, unfit)
