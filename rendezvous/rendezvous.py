"""One replica's side of the agreement: join, offer, settle, mean, advance, leave.

        claim ─▶ join ─▶ ┌─▶ offer ─▶ settle ─▶ mean ─▶ (caller applies it) ─▶ advance ─┐ ─▶ finish
                         └──────────────────────── catch_up when behind ◀───────────────┘

Everything durable is write-once, so repair means reading again, never failing a step.  This file holds no thread
and no timer of its own: the store and the clock are its only ways to wait, so that a simulator can run thousands
of schedules of exactly this code.

It knows flat fp32 vectors and a `State` that can digest, apply, save and load them; it has never heard of models.
Not promised: progress with fewer than `min_replicas` (by design: the step stays open, `GaveUp` after a while).
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from rendezvous import layout, rules, snapshots
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.errors import Diverged, Fenced, GaveUp, Leaving, RendezvousError
from rendezvous.membership import Membership, Wanted, claim, read_control
from rendezvous.records import Commit, Leave, Listed, Offer, digest, nonce
from rendezvous.reduce import Reducer
from rendezvous.rules import Rules, Timing
from rendezvous.store import PatientStore, Store, put_once
from rendezvous.wire import checked_norm, payload


class State(Protocol):
    """What the replicas agree on: θ and the outer momentum, per fragment.  Its owner applies means to it."""

    def digest(self) -> str:
        """xxh3-128 over every fragment's θ and momentum, from the bytes as they are now."""
        ...

    def size(self, fragment: int) -> int:
        """Elements of a fragment's flat vector."""
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
    ) -> None:
        self.slot, self.rules, self.timing, self.clock, self.tell = slot, rules_, timing, clock, tell
        self._raw = store
        self.store = PatientStore(
            store, clock, timing.store_patience, self._alert, lambda text: tell("store_trouble", trouble=text)
        )
        self.chain = Chain(self.store, rules_.window)
        self._reducer = Reducer(self.store, clock, tell)
        self._host, self._pid = host, pid
        self.step, self.generation, self.base = 0, 0, ""
        self.h_cap = rules_.sync_every
        self.idle_steps = 0  # committed steps in a row in which every fresh offer was zero
        self.last_offer: Offer | None = None
        self._leave_at: float | None = None  # when somebody asked this replica to go
        self._began = clock.now()  # of this outer step's work
        self._mine: tuple[int, str, np.ndarray] | None = None  # step, key and vector of what we offered
        self._rederived = -1  # the step for which we last replayed our own θ
        self._snapshot = 0  # newest snapshot known
        self._offers: dict[tuple[int, str], Offer] = {}  # eligible ones, which can only be what they are

    @property
    def name(self) -> str:
        """This life: slot and generation."""
        return f"{self.slot}-{self.generation}"

    # ------------------------------------------------------------------ joining

    def claim(self) -> int:
        """Take the slot; -> the generation.  Cheap: done, and beaten, before any heavy import."""
        self.generation = claim(self.store, self.clock, self.slot, host=self._host, pid=self._pid)
        self.members = Membership(
            self._raw, self.clock, self.slot, self.generation, self.timing, host=self._host, pid=self._pid
        )
        self.members.wanted = read_control(self.store)
        return self.generation

    def join(self, state: State) -> None:
        """Heal before the first inner step: newest snapshot, then every later mean.

        If a predecessor of this slot has already offered the open step, wait for that step without training.
        """
        self.state = state
        self._phase("heal")
        self._found()
        self._heal()
        while not self.done and self._standing_offer(self.step) is not None:
            self.tell("adopted", step=self.step)
            self.complete(self.settle())
        self._phase("train")

    def _found(self) -> None:
        """Snapshot 0 is θ₀ from whoever came first; without it nobody could ever replay."""
        if self.store.get(layout.snapshot(0)) is None:
            base = self.state.digest()
            snapshots.write(self.store, self.clock, 0, self.state.arrays(), base=base, prev=None)

    def _heal(self, upto: int | None = None) -> None:
        """Become θ_upto (default: the head) from the bucket alone."""
        self.chain.forget()
        damaged: list[snapshots.Snapshot] = []
        for snapshot in snapshots.newest_first(self.store, self._snapshot, upto):
            arrays = snapshots.load(self.store, snapshot, self.tell)
            if arrays is not None:
                break
            damaged.append(snapshot)
        else:
            raise RendezvousError(
                "no snapshot of this run can be read, not even step 0's: the bucket lost objects. "
                "Restore it from a backup, or start a new run from an exported model"
            )
        self.state.load(arrays)
        self._replay(snapshot.t, upto, {s.t: s for s in damaged})
        self.tell("healed", snapshot=snapshot.t, step=self.step, replayed=self.step - snapshot.t)

    def _replay(self, start: int, upto: int | None, damaged: dict[int, snapshots.Snapshot]) -> None:
        for t in range(max(0, start - self.rules.window), start):
            self.chain.read(t)  # a closer must know what these listed
        self.step, self._snapshot = start, max(start, self._snapshot)
        self.base = self.state.digest()
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

    def offer(self, delta: np.ndarray, h: int, *, samples: float = 0.0, stats: dict[str, float] | None = None) -> None:
        """Make Δ for the open step durable: blob first, then the offer that names it.

        delta: flat fp32, the fragment's length; kept (not copied) until the step is over.   h: inner steps inside.
        """
        self._alert_fenced()
        norm = checked_norm(delta)
        self._check_state()
        if self._standing_offer(self.step) is None:
            self._announce_offer(self._upload(delta, h, norm, samples, stats or {}))
        self._phase("wait")

    def _upload(self, delta: np.ndarray, h: int, norm: float, samples: float, stats: dict[str, float]) -> Offer:
        n = nonce()
        key, body = layout.delta(self.step, self.slot, self.generation, n), payload(delta)
        self.store.put(key, body)
        self._mine = (self.step, key, delta)
        return Offer(
            self.step, self.slot, self.generation, n, self.base, h, key, len(body), digest(body),
            took=self.clock.now() - self._began, at=self.clock.wall(), samples=samples, norm=norm,
            zero=norm == 0.0, leaving=self._leave_at is not None, stats=stats,
        )  # fmt: skip

    def _announce_offer(self, record: Offer) -> None:
        attempt = 0
        while True:
            won, value = put_once(self.store, self.clock, layout.offer(record.step, self.slot, attempt), record.encode())
            if won:
                self.last_offer = self._offers[record.step, self.slot] = record
                return
            other = Offer.decode(value)
            if self._is_eligible(other):  # a predecessor's offer stands; it counts for this slot, ours does not
                self.tell("offer_lost", step=record.step, to=other.generation)
                return
            attempt += 1

    def settle(self) -> Commit:
        """The decision for the open step; helps to make it.  Ours must be durable before this is called."""
        polls, waited, looked_at = 0, 0.0, self.clock.now()
        idle = 0.0
        while (commit := self.chain.read(self.step)) is None:
            self._alert()
            now = self.clock.now()
            elapsed, looked_at = min(now - looked_at, 4 * self._poll(polls)), now
            idle += elapsed
            fresh = self._fresh() if polls >= 2 * self._rank() else {}
            waited = waited + elapsed if len(fresh) >= self.wanted.min_replicas else 0.0
            if fresh and self._may_close(fresh, waited, idle):
                self._close(fresh)
                continue
            polls += 1
            self.clock.sleep(self._poll(polls))
        self.members.status.note = ""
        return self._checked(commit)

    def _poll(self, polls: int) -> float:
        return self.timing.poll * min(4.0, 1 + polls / 20)

    def _rank(self) -> int:
        return rules.rank(self.step, layout.slot_index(self.slot), self.wanted.universe)

    def _checked(self, commit: Commit) -> Commit:
        """Ours to apply: not fenced out, and decided about the θ that we have."""
        self._check_state()
        if commit.base != self.base:
            self._rederive(f"commit {commit.t} by {commit.by}", commit.base)
        return commit

    def mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the commit's mean into `out`; it may be the vector that was offered."""
        self._snapshot_if_due(commit)
        mine = self._mine[1:] if self._mine and self._mine[0] == commit.t else None
        self._reducer.mean(commit, out, mine)
        if commit.by == self.name:
            self._reducer.announce(commit, out)

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
        self._reducer.mean(commit, mean)
        self.state.apply(fragment, mean)

    def _move_on(self, commit: Commit) -> None:
        self.step = commit.t + 1
        self.base = self.state.digest()
        self._snapshot = max(self._snapshot, commit.snapshot)
        self._offers = {k: o for k, o in self._offers.items() if k[0] >= self.step - self.rules.window}
        self.idle_steps = self.idle_steps + 1 if all(o.zero for o in commit.fresh) else 0
        if commit.fence.get(self.slot, 0) > self.generation:
            self.members.fenced_by = commit.fence[self.slot]

    # ------------------------------------------------------------------ closing

    def _fresh(self) -> dict[str, Offer]:
        """Eligible offers for the open step, by slot, as far as they are durable now."""
        found = {s: o for s in self.wanted.slots if (o := self._standing_offer(self.step, s)) is not None}
        for slot, offer in found.items():
            peer = self.members.peers.get(slot)
            if peer and peer.dead(self.timing.dead_after) and peer.beat.generation == offer.generation:
                peer.liar = offer.generation
        return found

    def _may_close(self, fresh: dict[str, Offer], waited: float, idle: float) -> bool:
        m = self.wanted.min_replicas
        if self.slot not in fresh:
            return False  # only who has an offer in may close: it has the θ that the step is about
        if len(fresh) < m:
            note = f"has offers of {sorted(fresh)}, needs min_replicas={m}; {self._silence()}"
            return self._keep_waiting(note, idle)
        expected = rules.expected(
            self.step, self.chain.recent(self.step, 2), self.members.peers, self.timing.dead_after, self.wanted.slots
        )
        reasons = rules.waiting_for(
            self.step, fresh, expected - {self.slot}, self.members.peers, waited, self.rules, self.timing
        )
        if reasons:
            return self._keep_waiting("; ".join(f"{s} {why}" for s, why in sorted(reasons.items())), idle)
        return True

    def _keep_waiting(self, note: str, idle: float) -> bool:
        self.members.status.note = note
        if idle > self.timing.give_up:
            raise GaveUp(
                f"step {self.step} stood open for {idle:.0f} s: {note}. What is offered stays offered; run the same "
                "command again to go on, or lower min_replicas with a control record if fewer replicas are meant to do"
            )
        return False

    def _silence(self) -> str:
        """Who is missing and what was last seen of them."""
        words = []
        for slot in self.wanted.slots:
            peer = self.members.peers.get(slot)
            if slot != self.slot and peer is None:
                words.append(f"{slot} never seen")
            elif peer is not None and peer.beat.phase in ("boot", "heal"):
                words.append(f"{slot} is starting")
            elif peer is not None and peer.dead(self.timing.dead_after):
                words.append(f"{slot} silent for {peer.silent:.0f} s at step {peer.beat.step}")
        return ", ".join(words) or "all slots are beating"

    def _close(self, fresh: dict[str, Offer]) -> None:
        commit = self._proposal(fresh)
        won, value = put_once(self.store, self.clock, layout.commit(self.step), commit.encode())
        stands = self.chain.accept(self.step, value)
        self.tell("closed" if won else "close_lost", step=self.step, by=stands.by, listed=len(stands.offers))

    def _proposal(self, fresh: dict[str, Offer]) -> Commit:
        t, tooks = self.step, [o.took for o in fresh.values()]
        listed = [self._listed(o, 0) for _, o in sorted(fresh.items())]
        for age in range(1, self.rules.max_carry + 1):
            listed += [self._listed(o, age) for o in self._late(t - age * self.rules.fragments)]
        return Commit(
            t, self.chain.digest(t - 1), self.base, tuple(listed), self._fence(listed), self.wanted.min_replicas,
            rules.pace(tooks, self.timing.poll), self._snapshot, self.name, nonce(), self.clock.wall(),
        )  # fmt: skip

    def _listed(self, o: Offer, age: int) -> Listed:
        w = rules.weight(o.h, self.rules.sync_every, age, self.rules.age_discount)
        return Listed(o.step, o.slot, o.generation, o.nonce, o.blob, o.size, o.digest, o.h, w, o.zero, o.leaving)

    def _late(self, s: int) -> list[Offer]:
        """Eligible offers for step s that no commit has listed: each may be listed once, by the chain alone."""
        if s < 0:
            return []
        since = [c for u in range(s, self.step) if (c := self.chain.known(u)) is not None]
        missing = [slot for slot in self.wanted.slots if not any(c.lists(s, slot) for c in since)]
        return [o for slot in missing if (o := self._standing_offer(s, slot)) is not None]

    def _fence(self, listed: list[Listed]) -> dict[str, int]:
        """Nobody below the newest claim of its slot may offer after this step."""
        fence = dict(self.chain.fence(self.step))
        for o in listed:
            fence[o.slot] = max(fence.get(o.slot, 0), o.generation)
        for slot in self.wanted.slots:
            generation = fence.get(slot, 0)
            while self.store.get(layout.claim(slot, generation + 1)) is not None:
                generation += 1
            if generation:
                fence[slot] = generation
        return fence

    def _standing_offer(self, s: int, slot: str | None = None) -> Offer | None:
        """A slot's offer for step s: its first eligible record.  Which one is eligible depends on the chain alone."""
        slot = slot or self.slot
        attempt = 0
        while (s, slot) not in self._offers:
            body = self.store.get(layout.offer(s, slot, attempt))
            if body is None:
                return None
            self._judge(Offer.decode(body))
            attempt += 1
        return self._offers[s, slot]

    def _judge(self, offer: Offer) -> None:
        if self._is_eligible(offer):
            self._offers[offer.step, offer.slot] = offer
        elif offer.step == self.step and offer.base != self.base:
            self._rederive(f"{offer.slot}'s offer", offer.base)

    def _is_eligible(self, offer: Offer) -> bool:
        commit = self.chain.known(offer.step)
        base = self.base if offer.step == self.step else commit.base if commit else ""
        return rules.eligible(offer, base, self.chain.fence(offer.step))

    # ------------------------------------------------------------------ keeping honest

    def _check_state(self) -> None:
        """Bytes of θ and momentum that changed behind our back are never offered and never stepped from."""
        now = self.state.digest()
        if now != self.base:
            raise Diverged(
                f"θ of {self.name} changed between outer steps (digest {now}, was {self.base}): "
                "bad memory, or code that writes to the fragments. This life ends; the next heals from the bucket"
            )

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
            prev = self.chain.digest(t - 1)
            snapshots.write(self.store, self.clock, t, self.state.arrays(), base=self.base, prev=prev)
            self._snapshot = t
            self.tell("snapshot", step=t)

    # ------------------------------------------------------------------ leaving

    def ask_to_leave(self) -> None:
        """The operator, the platform or the scheduler wants this replica gone (safe in a signal handler)."""
        if self._leave_at is None:
            self._leave_at = self.clock.now()

    @property
    def leaving(self) -> bool:
        return self._leave_at is not None or self.members.wanted.leaves(self.slot)

    def finish(self, reason: str) -> None:
        """Say goodbye: the last write of this generation."""
        record = Leave(self.slot, self.generation, self.step, self.base, reason, nonce(), self.clock.wall())
        put_once(self.store, self.clock, layout.leave(self.slot, self.generation), record.encode())
        if self.done:
            self._final_snapshot()
        self.members.goodbye()

    def _final_snapshot(self) -> None:
        """θ_T has no commit to confirm it: two leave records with one digest do, or m = 1 without (marked so)."""
        agree = self._others_who_left_with(self.base)
        if agree or self.wanted.min_replicas == 1:
            snapshots.write(
                self.store, self.clock, self.step, self.state.arrays(),
                base=self.base, prev=self.chain.digest(self.step - 1), confirmed=agree,
            )  # fmt: skip

    def _others_who_left_with(self, base: str) -> bool:
        fence = self.chain.fence(self.step)
        for slot in self.wanted.slots:
            body = self.store.get(layout.leave(slot, fence.get(slot, 0)))
            if slot != self.slot and body is not None:
                record = Leave.decode(body)
                if record.step == self.step and record.base == base:
                    return True
        return False

    def _phase(self, phase: str) -> None:
        status = self.members.status
        status.phase, status.step, status.note = phase, self.step, ""
        if phase == "train":
            status.inner = 0

    def _alert_fenced(self) -> None:
        if self.generation and self.members.fenced_by > self.generation:
            raise Fenced(
                f"{self.slot} now belongs to generation {self.members.fenced_by}; this process (generation "
                f"{self.generation}) goes. What it offered still counts"
            )

    def _alert(self) -> None:
        """Called before every pause.  Work that is not durable yet may use the whole grace time."""
        self._alert_fenced()
        if not self.generation or not self.leaving:
            return
        overdue = self._leave_at is not None and self.clock.now() - self._leave_at > self.timing.grace
        if overdue or self.members.status.phase in ("wait", "heal"):
            raise Leaving(f"{self.name} was asked to go; what it offered is durable")
