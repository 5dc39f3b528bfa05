"""One replica's side of the agreement: join, offer, settle, mean, advance, leave.

        claim ─▶ join ─▶ ┌─▶ offer ─▶ settle ─▶ mean ─▶ (caller applies it) ─▶ advance ─┐ ─▶ finish
                         └──────────────────────── catch_up when behind ◀───────────────┘

Everything durable is write-once, so repair means reading again, never failing a step.  This file holds no thread
and no timer of its own: the store and the clock are its only ways to wait, so that a simulator can run thousands
of schedules of exactly this code.

It knows flat fp32 vectors and a `State` that can digest, apply, save and load them; it has never heard of models.
Not promised: progress with fewer than `min_replicas` (by design: the step stays open, `GaveUp` after a while).
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Protocol

import numpy as np

from rendezvous import garbage, layout, rules, snapshots
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.closing import Closer, Vigil
from rendezvous.errors import Corrupt, Diverged, Fenced, GaveUp, Leaving, RendezvousError
from rendezvous.membership import Membership, Wanted
from rendezvous.records import Commit, Leave, Offer, digest, nonce
from rendezvous.reduce import Reducer
from rendezvous.rules import Rules, Timing
from rendezvous.sharded import Sharer
from rendezvous.store import PatientStore, Store, put_once
from rendezvous.wire import Encoder, alignment, checked_norm, grid, payload, shard_digests


class State(Protocol):
    """What the replicas agree on: θ and the outer momentum, per fragment.  Its owner applies means to it."""

    def digest(self) -> str:
        """xxh3-128 over every fragment's θ and momentum, from the bytes as they are now."""
        ...

    def size(self, fragment: int) -> int:
        """Elements of a fragment's flat vector; 0 if that may change from step to step."""
        ...

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        """One outer step on one fragment."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything, by name, for a snapshot."""
        ...

    def load(self, arrays: snapshots.Arrays) -> None:
        """Become what `arrays()` gave."""
        ...


def no_tell(event: str, **fields: object) -> None:
    """Listens to nothing."""


class Rendezvous:
    """One life (one generation) of one slot.

    store, clock: the world.   tell(event, **fields): where remarks for people go.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        slot: str,
        rules_: Rules,
        timing: Timing,
        *,
        tell: Callable[..., None] = no_tell,
        host: str = "",
        pid: int = 0,
        retention: str = "all",
    ) -> None:
        self.slot, self.timing, self.clock, self.tell = slot, timing, clock, tell
        self.store = PatientStore(
            store, clock, timing.store_patience, self._alert, lambda text: tell("store_trouble", trouble=text)
        )
        self._bucket, self._window = store, retention == "window"
        self.members = Membership(store, clock, slot, 0, timing, host=host, pid=pid)
        self.step, self.generation, self.base = 0, 0, ""
        self.under(rules_)
        self.idle_steps = 0  # committed steps in a row in which every fresh offer was zero
        self.last_offer: Offer | None = None
        self._leave_at: float | None = None  # when somebody asked this replica to go
        self._began = clock.now()  # of this outer step's work
        self._mine: tuple[int, str, np.ndarray] | None = None  # step, key and body of what we offered
        self._rederived = -1  # the step for which we last replayed our own θ
        self._snapshot = 0  # newest snapshot known

    @property
    def name(self) -> str:
        """This life: slot and generation."""
        return f"{self.slot}-{self.generation}"

    def under(self, rules_: Rules, timing: Timing | None = None) -> "Rendezvous":
        """The same life under the run's rules, for an owner who learns them after it had to claim."""
        self._garbage = garbage.Collector(self._bucket, rules_, self.tell)
        self.rules, self.h_cap, self.timing = rules_, rules_.sync_every, timing or self.timing
        self.chain = Chain(self.store, rules_.window)
        self._reducer, self._encoder = Reducer(self.store, self.clock, self.tell, rules_), Encoder(rules_.codec)
        self._sharer = Sharer(self.clock, self._reducer, self.members, self.timing, self._alert)
        self._closer = Closer(self.store, self.clock, self.chain, self.members, rules_, self.timing, self._alien)
        return self

    # ------------------------------------------------------------------ joining

    def claim(self) -> int:
        """Take the slot; -> the generation.  Cheap: done, and beaten, before any heavy import."""
        self.generation = self.members.claim(self.store)
        return self.generation

    def join(self, state: State) -> None:
        """Heal before the first inner step: newest snapshot, then every later mean.

        If a predecessor of this slot has already offered the open step, wait for that step without training.
        """
        self.state = state
        self._phase("heal")
        self._found()
        self._heal()
        while not self.done and self.offered(self.slot):
            self.tell("adopted", step=self.step)
            self.complete(self.settle())
        self._phase("train")

    def resume_at(self, state: State, step: int) -> None:
        """Begin at `step` with `state` as it is, for states that need no history."""
        self.state = state
        self._replay(step, step, {})

    def _found(self) -> None:
        """Snapshot 0 is θ₀ from whoever came first; without it nobody could ever replay."""
        if self.store.get(layout.snapshot(0)) is None:
            base = self.state.digest()
            snapshots.write(self.store, self.clock, 0, self.state.arrays(), base=base, prev=None)

    def _heal(self, upto: int | None = None) -> None:
        garbage.look_again(lambda: self._heal_once(upto), self.tell)

    def _heal_once(self, upto: int | None) -> None:
        """Become θ_upto (default: the head) from the bucket alone."""
        self.chain.forget()
        damaged: dict[int, snapshots.Snapshot] = {}
        for snapshot in snapshots.newest_first(self.store, self._snapshot, upto):
            if self._load(snapshot):
                break
            damaged[snapshot.t] = snapshot
        else:
            garbage.refuse_collected(self.store, max(damaged, default=upto or 0))
            raise RendezvousError(
                "no snapshot of this run can be read, not even step 0's: the bucket lost objects. "
                "Restore it from a backup, or start a new run from an exported model"
            )
        self._snapshot = max(snapshot.t, self._snapshot)
        self._replay(snapshot.t, upto, damaged)
        self.tell("healed", snapshot=snapshot.t, step=self.step, replayed=self.step - snapshot.t)

    def _load(self, snapshot: snapshots.Snapshot) -> bool:
        """Become this snapshot, if its bytes are what was announced and mean what the chain confirmed."""
        arrays = snapshots.load(self.store, snapshot, self.tell)
        if arrays is None:
            return False
        self.state.load(arrays)
        base = self.state.digest()
        if base != snapshot.base:
            self.tell("bad_snapshot", step=snapshot.t, blob=snapshot.blob, found=base, announced=snapshot.base)
        return base == snapshot.base

    def _replay(self, start: int, upto: int | None, damaged: dict[int, snapshots.Snapshot]) -> None:
        self.chain.read_before(start)  # a closer must know what these listed
        self._open(start)
        while (upto is None or self.step < upto) and (commit := self.chain.read(self.step)) is not None:
            if commit.base != self.base:  # a fresh replay is the definition; the committer was wrong
                self.tell("replay_differs", step=self.step, replay=self.base, commit=commit.base, by=commit.by)
            self._mend_snapshot(damaged.get(self.step))
            self._apply(commit)
            self._move_on(commit)
        self._mend_snapshot(damaged.get(self.step))
        self._began = self.clock.now()

    def _mend_snapshot(self, damaged: snapshots.Snapshot | None) -> None:
        if damaged is not None and snapshots.mend(self.store, damaged, self.state.arrays()):
            self.tell("repaired", step=damaged.t, blob=damaged.blob)

    # ------------------------------------------------------------------ one outer step

    @property
    def fragment(self) -> int:
        """Which fragment the open step synchronises."""
        return self.step % self.rules.fragments

    @property
    def wanted(self) -> Wanted:
        return self.members.wanted

    @property
    def done(self) -> bool:
        return self.step >= self.wanted.steps > 0

    @property
    def behind(self) -> bool:
        """Has the open step been decided without us?  A flag that the background tick sets; costs nothing."""
        return self.members.decided >= self.step

    def offered(self, slot: str) -> bool:
        """Has this slot an offer that counts for the open step, whichever of its lives made it?"""
        return self._closer.standing(self.step, slot) is not None

    def offer(self, delta: np.ndarray, h: int, *, samples: float = 0.0, stats: dict[str, float] | None = None) -> None:
        """Make Δ for the open step durable: blob first, then the offer that names it.

        delta: flat fp32, the fragment's length; kept (not copied) until the step is over.   h: inner steps inside.
        """
        self._alert_fenced()
        if h < 1:
            raise ValueError(f"a pseudogradient has at least one inner step inside, got h={h}; offer nothing instead")
        norm = checked_norm(delta, self.state.size(self.fragment))
        self._check_state()
        self._turn()
        if not self.offered(self.slot):
            self._announce_offer(self._upload(delta, h, norm, samples, stats or {}))
        self._phase("wait")

    def _upload(self, delta: np.ndarray, h: int, norm: float, samples: float, stats: dict[str, float]) -> Offer:
        n = nonce()
        key, body = layout.delta(self.step, self.slot, self.generation, n), self._encoder.encode(self.fragment, delta)
        self.store.put(key, payload(body))
        ranges = grid(delta.size, alignment(self.rules.codec), self.rules.shard_elements)
        self._mine = (self.step, key, body)
        return Offer(
            self.step, self.slot, self.generation, n, self.base, int(h), key, len(body), digest(payload(body)),
            took=self.clock.now() - self._began, at=self.clock.wall(), samples=float(samples), norm=norm,
            zero=norm == 0.0, leaving=self.leaving, codec=self.rules.codec,
            shards=shard_digests(body, self.rules.codec, ranges),
            stats={k: float(v) for k, v in stats.items() if isfinite(v)},
        )  # fmt: skip

    def _announce_offer(self, record: Offer) -> None:
        body, attempt = record.encode(), 0
        while True:
            won, value = put_once(self.store, self.clock, layout.offer(record.step, self.slot, attempt), body)
            if won:
                self.last_offer = record
                self._closer.mine(record)
                return
            other = Offer.decode(value)
            if self._closer.eligible(other):  # a predecessor's offer stands; it counts for this slot, ours does not
                self.tell("offer_lost", step=record.step, to=other.generation)
                if self._mine is not None:
                    self._encoder.take_back(self.fragment, self._mine[2])
                return
            attempt += 1

    def settle(self) -> Commit:
        """The decision for the open step; helps to make it.  Ours must be durable before this is called."""
        self._phase("wait")
        self._turn()
        vigil = Vigil(self.clock, self.timing)
        while (commit := self.chain.read(self.step)) is None:
            self._alert()
            vigil.look()
            why_open = self._closer.attempt(vigil, self._snapshot)
            self.members.status.note = why_open
            if why_open:
                self._give_up_after(vigil.idle, why_open)
                vigil.sleep()
        return self._checked(commit)

    def _give_up_after(self, idle: float, why_open: str) -> None:
        if idle > self.timing.give_up:
            raise GaveUp(
                f"step {self.step} stood open for {idle:.0f} s: {self.name} {why_open}. What is offered stays offered; "
                "run the same command again to go on, or lower min_replicas with a control record if fewer replicas "
                "are meant to do"
            )

    def _checked(self, commit: Commit) -> Commit:
        """Ours to apply: not fenced out, and decided about the θ that we have."""
        self._check_state()
        if commit.base != self.base:
            self._rederive(f"commit {commit.t} by {commit.by}", commit.base)
            self.chain.read(commit.t)  # the replay went up to it, not through it
        return commit

    def mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the commit's mean into `out`; it may be the vector that was offered."""
        self._snapshot_if_due(commit)
        mine = self._mine[1:] if self._mine and self._mine[0] == commit.t else None
        with self._or_collected(commit):
            if commit.mode == "sharded":
                self._sharer.mean(commit, out)
                return
            self._reducer.mean(commit, out, mine)
        if commit.by == self.name:
            self._reducer.announce(commit, out)

    @contextmanager
    def _or_collected(self, commit: Commit) -> Generator[None]:
        try:
            yield
        except Corrupt:
            garbage.refuse_collected(self.store, commit.t)
            raise

    def advance(self, commit: Commit) -> None:
        """The caller has applied the mean: the next step is open."""
        offer, self._mine = self.last_offer, None
        if offer is not None and offer.step == commit.t:
            self.h_cap = rules.next_cap(
                self.h_cap, self.rules.sync_every, h=offer.h, took=offer.took, pace_s=commit.pace,
                fresh=commit.lists(commit.t, self.slot),
            )  # fmt: skip
        self._move_on(commit)
        self._phase("train")
        self._began = self.clock.now()
        self._alert_fenced()

    def complete(self, commit: Commit) -> None:
        """mean, apply, advance: a whole step for which this replica did not train."""
        self._snapshot_if_due(commit)
        self._apply(commit)
        self.advance(commit)

    def catch_up(self, late: Callable[[int], None] | None = None) -> int:
        """Apply every step that was decided without us; -> how many.

        late(step): called before each, to offer what we have for that step's fragment.
        """
        start = self.step
        while not self.done and (commit := self.chain.read(self.step)) is not None:
            if late is not None:
                late(self.step)
            self.complete(self._checked(commit))
        return self.step - start

    def _apply(self, commit: Commit) -> None:
        fragment = commit.t % self.rules.fragments
        mean = np.empty(self.state.size(fragment), np.float32)
        with self._or_collected(commit):
            self._reducer.mean(commit, mean)
        self.state.apply(fragment, mean)

    def _move_on(self, commit: Commit) -> None:
        self._open(commit.t + 1)
        self._snapshot = max(self._snapshot, commit.snapshot)
        self.idle_steps = self.idle_steps + 1 if all(o.zero for o in commit.fresh) else 0
        self.members.fenced_by = max(self.members.fenced_by, commit.fence.get(self.slot, 0))

    def _open(self, step: int) -> None:
        self.step, self.base = step, self.state.digest()
        self._turn()

    def _turn(self) -> None:
        self._closer.turn(self.step, self.base)

    # ------------------------------------------------------------------ keeping honest

    def _check_state(self) -> None:
        """Bytes of θ and momentum that changed behind our back are never offered and never stepped from."""
        now = self.state.digest()
        if now != self.base:
            raise Diverged(
                f"θ of {self.name} changed between outer steps (digest {now}, was {self.base}): "
                "bad memory, or code that writes to the fragments. This life ends; the next heals from the bucket"
            )

    def _alien(self, offer: Offer) -> None:
        self._rederive(f"{offer.slot}'s offer", offer.base)

    def _rederive(self, whose: str, base: str) -> None:
        """Somebody started this step from another θ: replay ours from the bucket, once per step, and see."""
        if self._rederived == self.step:
            return
        self._rederived = step = self.step
        mine, began = self.base, self._began
        self._heal(upto=step)
        self._began = began
        self.tell("base_differs", step=step, whose=whose, theirs=base, ours=mine, replay=self.base)
        if self.base != mine:
            raise Diverged(
                f"θ_{step} of {self.name} is not what the bucket replays to "
                f"(ours {mine}, replay {self.base}). This life ends; the next heals from the bucket"
            )

    def _snapshot_if_due(self, commit: Commit) -> None:
        """θ_t, once commit t has confirmed its digest.  The closer writes; after two periods without, anybody."""
        t, every = commit.t, self.rules.snapshot_every
        due = t > 0 and t % every == 0 and commit.by == self.name
        overdue = t - max(self._snapshot, commit.snapshot) >= 2 * every
        if (due or overdue) and commit.base == self.base:
            if self.store.get(layout.snapshot(t)) is None:
                self._check_state()
                self._write_snapshot(confirmed=True)
            self._snapshot = t
        if self._window and commit.by == self.name:
            self._garbage.sweep(self._snapshot)

    def _write_snapshot(self, *, confirmed: bool) -> None:
        prev = self.chain.digest(self.step - 1)
        snapshots.write(
            self.store, self.clock, self.step, self.state.arrays(), base=self.base, prev=prev, confirmed=confirmed
        )
        self.tell("snapshot", step=self.step)

    # ------------------------------------------------------------------ leaving

    def ask_to_leave(self) -> None:
        """The operator, the platform or the scheduler wants this replica gone (safe in a signal handler)."""
        if self._leave_at is None:
            self._leave_at = self.clock.now()

    @property
    def leaving(self) -> bool:
        return self._leave_at is not None or self.wanted.leaves(self.slot)

    def finish(self, reason: str) -> None:
        """Say goodbye: the last writes of this generation, as far as the store takes them."""
        self.store.alert = lambda: None  # going already
        record = Leave(self.slot, self.generation, self.step, self.base, reason, nonce(), self.clock.wall())
        try:
            put_once(self.store, self.clock, layout.leave(self.slot, self.generation), record.encode())
            if self.done:
                self._final_snapshot()
        except GaveUp as error:
            self.tell("no_goodbye", trouble=str(error))
        self.members.goodbye()

    def _final_snapshot(self) -> None:
        """θ_T has no commit to confirm it: two leave records with one digest do, or m = 1 without (marked so)."""
        if self.store.get(layout.snapshot(self.step)) is not None:
            return
        agree = self._others_who_left_with(self.base)
        if agree or self.wanted.min_replicas == 1:
            self._check_state()
            self._write_snapshot(confirmed=agree)

    def _others_who_left_with(self, base: str) -> bool:
        left = [r for slot in self.wanted.slots if slot != self.slot for r in self._goodbyes(slot)]
        return any(r.step == self.step and r.base == base for r in left)

    def _goodbyes(self, slot: str) -> Iterator[Leave]:
        """Leave records of a slot's generations, from the newest that the chain knows on."""
        generation = self.chain.fence(self.step).get(slot, 1)
        while self.store.get(layout.claim(slot, generation)) is not None:
            body = self.store.get(layout.leave(slot, generation))
            if body is not None:
                yield Leave.decode(body)
            generation += 1

    def _phase(self, phase: str) -> None:
        status = self.members.status
        status.phase, status.step, status.note = phase, self.step, ""
        if phase == "train":
            status.inner = 0

    def _alert_fenced(self) -> None:
        if self.members.fenced_by > self.generation:
            raise Fenced(
                f"{self.slot} now belongs to generation {self.members.fenced_by}; this process (generation "
                f"{self.generation}) goes. What it offered still counts"
            )

    def _alert(self) -> None:
        """Called before every pause.  Work that is not durable yet may use the whole grace time."""
        self._alert_fenced()
        if not self.leaving:
            return
        overdue = self._leave_at is not None and self.clock.now() - self._leave_at > self.timing.grace
        if overdue or self.members.status.phase in ("wait", "heal"):
            raise Leaving(f"{self.name} was asked to go; what it offered is durable")
