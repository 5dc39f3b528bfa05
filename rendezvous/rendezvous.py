"""One replica's side of the agreement: join, offer, settle, mean, advance, leave.

        claim ─▶ join ─▶ ┌─▶ offer ─▶ settle ─▶ mean ─▶ (caller applies it) ─▶ advance ─┐ ─▶ finish
                         └──────────────────────── catch_up when behind ◀───────────────┘

Everything durable is write-once, so repair means reading again, never failing a step.  The engine starts no thread and
has no timer: the store and the clock are its only ways to wait.  Work beside it (`background`) and requests made at the
same time (`together`) are arguments: threads in a replica, greenlets in the simulator, which therefore runs thousands
of schedules of exactly this code.

It knows flat fp32 vectors and a `ReplicatedState` that holds and steps them (state.py); it has never heard of models.
Not promised: progress with fewer than `min_replicas` (by design: the step stays open, `GaveUp` after a while).
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from math import isfinite

import numpy as np

from rendezvous import garbage, layout, residuals, rules, snapshots
from rendezvous.background import Background, Inline, Together, in_turn, no_emit
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.closing import Committer, refuse_misweighed
from rendezvous.digests import required_digest_kind
from rendezvous.errors import Corrupt, Diverged, Fenced, GaveUp, HeartbeatLost, Leaving, RendezvousError
from rendezvous.keeping import Sizes, sizes_of
from rendezvous.membership import Membership, Wanted, read_leave
from rendezvous.offers import OfferBook
from rendezvous.records import Commit, Leave, Offer, new_nonce
from rendezvous.reduce import OwnBody, Reducer
from rendezvous.rules import Rules, Timing
from rendezvous.sharded import ShardedMean
from rendezvous.snapshot_pace import SnapshotPace
from rendezvous.snapshot_writer import SnapshotWriter
from rendezvous.state import Digests, ReplicatedState, all_arrays, base_of
from rendezvous.step_wait import StepTimes, StepWait
from rendezvous.store import PatientStore, Store, put_once
from rendezvous.tensors import TensorFile
from rendezvous.wire import Encoder, as_bytes, check_shape, codec_alignment, digested_pieces, shard_grid


class Rendezvous:
    """One life (one generation) of one slot.

    store, clock: the world.   tell(event, **fields): where remarks for people go.
    background: runs what nobody waits for.   uploads: the same for what may take longer than a round.
    together: runs requests that go together (`background.together_on`).
    keep: bytes of blobs that stay in the bucket beside what a reader may need (rendezvous/keeping.py); None for all.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        slot: str,
        rules_: Rules,
        timing: Timing,
        *,
        emit: Callable[..., None] = no_emit,
        host: str = "",
        pid: int = 0,
        keep: int | None = None,
        background: Background | None = None,
        uploads: Background | None = None,
        together: Together = in_turn,
    ) -> None:
        self.slot = slot
        self.timing = timing
        self.clock = clock
        self.emit = emit
        self.store = PatientStore(
            store, clock, timing.store_patience, self._check_before_pause, self._store_trouble, full_s=timing.give_up,
            on_recovered=lambda: self._set_note(""),
        )  # fmt: skip
        self._bucket = store
        self._keep = keep
        self._background = background or Inline()
        self._together = together
        self._uploads = uploads or self._background
        self._writer = SnapshotWriter(
            self.store,
            clock,
            self._uploads,
            run_in_background=self._run_in_background,
            emit=emit,
            on_written=self._snapshot_stands,
        )
        self.members = Membership(store, clock, slot, 0, timing, host=host, pid=pid, emit=emit)
        self.step = 0
        self.generation = 0
        self.base = ""
        self.set_rules(rules_)
        self.idle_steps = 0  # committed steps in a row in which every fresh offer was zero
        self.last_offer: Offer | None = None
        self._leave_at: float | None = None  # when somebody asked this replica to go
        self._times = StepTimes(clock)
        self._announcement: Callable[[], None] | None = None
        self._own_bodies: list[OwnBody] = []  # what we offered last, and before if somebody may still miss it
        self._replayed_at = -1  # the step for which we last replayed our own θ
        self._snapshot = 0  # newest snapshot known
        self._rate = 0.0  # bytes per second of the last upload
        self._first = -1  # the step in whose middle we joined
        self._theta_0: Callable[[], snapshots.Arrays] | None = None

    @property
    def name(self) -> str:
        """This life: slot and generation."""
        return f"{self.slot}-{self.generation}"

    def set_rules(self, rules_: Rules, timing: Timing | None = None) -> "Rendezvous":
        """The same life under the run's rules, for an owner who learns them after it had to claim."""
        self._garbage = garbage.Collector(
            self._bucket, rules_, self.emit, self._keep or 0, lambda f: self.state.size(f)
        )
        self.rules = rules_
        self.h_cap = rules_.sync_every
        self.timing = timing or self.timing
        self._pace = SnapshotPace(rules_.snapshot_every, self._keep or 0)
        self.chain = Chain(self.store, rules_.window)
        self._reducer = Reducer(self.store, self.clock, self.emit, rules_, together=self._together)
        self._encoder = Encoder(rules_.codec, digests=required_digest_kind(self.store))
        self._sharded_mean = ShardedMean(
            self.clock, self._reducer, self.members, self.timing, self._pause_for_parts, self._on_bad_body
        )
        self.offers = OfferBook(
            self.store,
            self.clock,
            self.chain,
            rules_,
            on_foreign_base=lambda offer: self._replay_own_state(f"{offer.slot}'s offer", offer.base),
            on_rejected=lambda key, why: self.emit("bad_offer", key=key, text=f"passed over: {why}"),
            together=self._together,
        )
        self._committer = Committer(
            store=self.store,
            clock=self.clock,
            chain=self.chain,
            members=self.members,
            offers=self.offers,
            rules_=rules_,
            timing=self.timing,
            together=self._together,
        )
        return self

    # ------------------------------------------------------------------ joining

    def claim(self) -> int:
        """Take the slot; -> the generation.  Cheap: done, and beaten, before any heavy import."""
        self.generation = self.members.claim(self.store)
        return self.generation

    def join(self, state: ReplicatedState, theta_0: Callable[[], snapshots.Arrays] | None = None) -> None:
        """Heal before the first inner step: newest snapshot, then every later mean.

        theta_0: the state's arrays as the run began, where they lie elsewhere; then snapshot 0 has no blob.
        If a predecessor of this slot has already offered the open step, wait for that step without training.
        """
        self.state = state
        self._theta_0 = theta_0
        self._set_phase("heal")
        self._write_first_snapshot()
        self._heal_from_bucket()
        self._committer.refuse_lower_quorum()
        self._take_residual()
        while not self.is_done and self.has_offered(self.slot):
            self.emit("adopted", step=self.step)
            self.take_step(self.settle())
        self._first = self.step
        self.h_cap = rules.first_cap(self.step, [*self.members.peers.values()], self.rules, self.timing.dead_after)
        self._check_state()
        self._set_phase("train")

    def _take_residual(self) -> None:
        """Take over what the codec of the life directly before this one had not sent, if that one left word of it.

        Nobody else ever reads it: should this life die without a goodbye, it is gone.
        """
        left = read_leave(self.store, self.slot, self.generation - 1)
        if left is None or not left.residual:
            return
        sizes = [self.state.size(f) for f in range(self.rules.fragments)]
        if (unsent := residuals.take_residuals(self.store, left, sizes)) is None:
            self.emit("bad_residual", text=f"{left.residual} is missing or damaged; the codec starts from zero")
            return
        self._encoder.restore_residuals(unsent)
        self.emit("inherited", of=left.generation, bytes=sum(e.nbytes for e in unsent.values()))

    def resume_at(self, state: ReplicatedState, step: int) -> None:
        """Begin at `step` with `state` as it is, for states that need no history."""
        self.state, self._digests = state, Digests(state, self.rules.fragments, self.name)
        self._replay_commits(step, step, {})

    def _write_first_snapshot(self) -> None:
        """Snapshot 0 is θ₀ of whoever came first; without it nobody could ever replay.

        One that was lost when steps had been taken is not replaced: nobody knows any more that ours is the same.
        """
        first = (layout.snapshot_key(0), layout.commit_key(0))
        if all(self.store.get(key) is None for key in first) and not self._later_snapshots():
            base = base_of(self.state, self.rules.fragments)
            elsewhere = self._theta_0 is not None
            snapshots.write_first(self.store, self.clock, self._all_arrays(0), base=base, elsewhere=elsewhere)

    def _later_snapshots(self) -> bool:
        return any(snapshots.steps_of(self.store.list(layout.SNAPSHOTS)))

    def _heal_from_bucket(self, upto: int | None = None) -> None:
        garbage.look_again(lambda: self._heal_once(upto), self.emit)

    def _heal_once(self, upto: int | None) -> None:
        """Become θ_upto (default: the head) from the bucket alone."""
        self._writer.abandon()
        self.chain.forget_commits()
        damaged: dict[int, snapshots.Snapshot] = {}
        for snapshot in snapshots.newest_first(self.store, self._snapshot, upto):
            if self._load_snapshot(snapshot):
                break
            damaged[snapshot.t] = snapshot
        else:
            garbage.refuse_collected(self.store, max(damaged, default=upto or 0))
            raise RendezvousError(
                "no snapshot of this run can be read and fits this model, not even step 0's: the bucket lost objects, "
                "or the run is of another model. Restore it from a backup, or start a new run from an exported model"
            )
        self._snapshot = max(snapshot.t, self._snapshot)
        self._replay_commits(snapshot.t, upto, damaged)
        self.emit("healed", snapshot=snapshot.t, step=self.step, replayed=self.step - snapshot.t)

    def _load_snapshot(self, snapshot: snapshots.Snapshot) -> bool:
        """Become this snapshot, if its bytes are what was announced and mean what the chain confirmed."""
        if snapshot.blob or base_of(self.state, self.rules.fragments) != snapshot.base:
            arrays = self._arrays_of(snapshot)
            if arrays is None:
                return False
            self.state.load(dict(arrays))
        self._digests = Digests(self.state, self.rules.fragments, self.name)
        base = self._digests.base
        if base != snapshot.base:
            self.emit("bad_snapshot", step=snapshot.t, blob=snapshot.blob, found=base, announced=snapshot.base)
        return base == snapshot.base

    def _arrays_of(self, snapshot: snapshots.Snapshot) -> snapshots.Arrays | None:
        if snapshot.blob:
            return snapshots.load(self.store, snapshot, self.emit, self._all_arrays(0), in_place=True)
        if self._theta_0 is None:
            self.emit("bad_snapshot", step=0, blob="", found="no start model", announced=snapshot.base)
            return None
        return self._theta_0()

    def _replay_commits(self, start: int, upto: int | None, damaged: dict[int, snapshots.Snapshot]) -> None:
        self.chain.read_before(start)  # a closer must know what these listed
        self._open_step(start)
        while (upto is None or self.step < upto) and (commit := self.chain.read(self.step)) is not None:
            if commit.base != self.base:  # a fresh replay is the definition; the committer was wrong
                self.emit("replay_differs", step=self.step, replay=self.base, commit=commit.base, by=commit.by)
            self._mend_snapshot(damaged.get(self.step))
            self._apply_mean(commit)
            self._move_on(commit)
        if upto is None:
            self.chain.refuse_gap(self.step)
        self._mend_snapshot(damaged.get(self.step))
        self._times.begin()

    def _mend_snapshot(self, damaged: snapshots.Snapshot | None) -> None:
        if damaged is not None and snapshots.mend_blob(self.store, damaged, self._all_arrays(damaged.t)):
            self.emit("repaired", step=damaged.t, blob=damaged.blob)

    # ------------------------------------------------------------------ one outer step

    @property
    def fragment(self) -> int:
        """Which fragment the open step synchronises."""
        return self.step % self.rules.fragments

    @property
    def wanted(self) -> Wanted:
        return self.members.wanted

    @property
    def is_done(self) -> bool:
        return self.step >= self.wanted.steps > 0

    @property
    def is_behind(self) -> bool:
        """Has the open step been decided without us?  A flag that the background tick sets; costs nothing."""
        return self.members.decided >= self.step

    def has_offered(self, slot: str) -> bool:
        """Has this slot an offer that counts for the open step, whichever of its lives made it?"""
        return self.offers.standing_offer(self.step, slot) is not None

    def offer(
        self,
        delta: np.ndarray,
        h: int,
        *,
        samples: float = 0.0,
        stats: dict[str, float] | None = None,
        theta: np.ndarray | None = None,
    ) -> None:
        """Make Δ for the open step durable: blob first, then the offer that names it.

        delta: flat fp32, the fragment's length; its memory is the caller's again afterwards.   h: inner steps inside.
        theta: the fragment's θ, for a codec that compares with it, and to tell what is absurd.
        """
        self._refuse_if_fenced()
        if h < 1:
            raise ValueError(f"a pseudogradient has at least one inner step inside, got h={h}; offer nothing instead")
        check_shape(delta, self.state.size(self.fragment))
        self._check_state(self.fragment)
        self._point_committer()
        if not self.has_offered(self.slot):
            self._keep_own_body()
            self._announce_offer(self._upload_delta(delta, theta, h, samples, stats or {}))
        self._set_phase("wait")

    def _upload_delta(
        self, delta: np.ndarray, theta: np.ndarray | None, h: int, samples: float, stats: dict[str, float]
    ) -> Offer:
        n = new_nonce()
        codec = self.rules.codec
        ranges = shard_grid(delta.size, codec_alignment(codec), self.rules.shard_elements)
        written = self._encoder.encode_in_shards(self.fragment, delta, ranges, theta)
        key = layout.delta_blob(self.step, self.slot, self.generation, n)
        began = self.clock.now()
        self.store.put(key, as_bytes(written.body))
        self._rate = written.body.nbytes / max(self.clock.now() - began, 1e-6)
        self._own_bodies.append(OwnBody(self.step, key, written.body, digested_pieces(written, codec, ranges)))
        return Offer(
            step=self.step,
            slot=self.slot,
            generation=self.generation,
            nonce=n,
            base=self.base,
            h=int(h),
            blob=key,
            size=written.body.size,
            digest=written.digest,
            took=self._times.took,
            at=self.clock.wall(),
            samples=float(samples),
            norm=written.norm,
            scale=written.scale,
            zero=written.norm == 0.0,
            leaving=self.is_leaving,
            codec=codec,
            shards=written.shards,
            stats={k: float(v) for k, v in stats.items() if isfinite(v)},
        )

    def _announce_offer(self, mine: Offer) -> None:
        stands = self.offers.announce(mine)
        if stands is mine:
            self.last_offer = mine
            return
        self.emit("offer_lost", step=mine.step, to=stands.generation)
        if self._own_bodies:
            self._encoder.take_back(self.fragment, self._own_bodies[-1].body)

    def settle(self) -> Commit:
        """The decision for the open step; helps to make it.  Our offer must be durable before this is called."""
        self._set_phase("wait")
        self._point_committer()
        wait = StepWait(self.clock, self.timing, self._times.due_in())
        while (commit := self.chain.read(self.step)) is None:
            self._check_before_pause()
            wait.count_time()
            why_open = self._committer.try_to_commit(wait, self._snapshot)
            self.members.status.note = why_open
            if why_open:
                self._leave_if_done()
                self._give_up_after(wait.idle, why_open)
                if wait.is_overdue():
                    self._mend_own_bodies()
                wait.sleep()
        self._times.note_decision()
        return self._check_commit(commit)

    def _pause_for_parts(self, wait: StepWait, normal: float) -> None:
        """Between two looks for what the others owe to a decided step; normal: seconds that are no reason to worry."""
        self._check_before_pause()
        if wait.is_overdue(normal):
            self._mend_own_bodies()
        wait.sleep()

    def _leave_if_done(self) -> None:
        """The run was shortened while we trained: whoever had heard of it has ended, and nobody closes this step."""
        if self.is_done:
            raise Leaving(f"the run is to have {self.wanted.steps} outer steps now, and {self.name} has taken them all")

    def _give_up_after(self, idle: float, why_open: str) -> None:
        if idle > self.timing.give_up:
            raise GaveUp(
                f"step {self.step} stood open for {idle:.0f} s: {self.name} {why_open}. What is offered stays offered; "
                "run the same command again to go on, or lower min_replicas with a control record if fewer replicas "
                "are meant to do"
            )

    def _check_commit(self, commit: Commit) -> Commit:
        """The commit, once it is ours to apply: not fenced out, and decided about the θ that we have."""
        self._check_state(self.fragment)
        if commit.base != self.base:
            self._replay_own_state(f"commit {commit.t} by {commit.by}", commit.base)
        return commit

    def mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the commit's mean into `out`; it may be the vector that was offered."""
        refuse_misweighed(commit, self.rules)
        self._confirm_snapshot(commit)
        mine = next((m for m in self._own_bodies if m.step == commit.t), None)
        with self._or_collected(commit):
            if commit.mode == "sharded":
                self._sharded_mean.mean(commit, out, mine)
            else:
                self._mean_when_mended(commit, out, mine)
        direct = commit.mode != "sharded" and commit.by == self.name
        if direct and self.rules.announce and self._reducer.is_worth_announcing(commit, out):
            self._announcement = self._prepare_announcement(commit, out, mine)
        self._writer.release_fragment(commit.t % self.rules.fragments)  # as late as can be: the caller steps it now

    def _prepare_announcement(self, commit: Commit, mean: np.ndarray, mine: OwnBody | None) -> Callable[[], None]:
        """-> what writes the mean down, from a copy, in the memory of our own body where it fits: it replaces that."""
        if mine is None or mine.body.size != mean.nbytes:
            copy = mean.copy()
        else:
            self._own_bodies.remove(mine)
            self._encoder.give_away(mine.body)  # the next body must not be written over what is being announced
            copy = mine.body.view(np.float32)
            copy[:] = mean

        def announce() -> None:
            self._reducer.announce_mean(commit, copy)
            self._encoder.give_back(copy.view(np.uint8))

        return announce

    def _run_in_background(self, job: Callable[[], None]) -> None:
        """In the background; what fails there is told, and left to others."""

        def run_and_report() -> None:
            try:
                job()
            except RendezvousError as error:
                self.emit("not_written", trouble=str(error))

        self._background.submit(run_and_report)

    # ------------------------------------------------------------------ our own blobs

    def _may_be_missed(self, mine: OwnBody) -> bool:
        """May another replica still need our blob of that step?

        One that was listed and is not known to be dead or past the step; we may never have seen its beat.
        In a crowd nobody looks at everybody.  Small bodies are kept; others are reduced in shards, whose means are all
        announced when ours is made, so that they serve instead.
        """
        commit = self.chain.known_commit(mine.step)
        if commit is None or not commit.lists_offer(mine.step, self.slot):
            return False
        if self.wanted.universe > rules.LARGE_FLEET:
            return commit.mode == "direct"
        peers = [self.members.peers.get(o.slot) for o in commit.fresh_offers if o.slot != self.slot]
        return any(p is None or not (p.is_dead(self.timing.dead_after) or p.beat.step > mine.step) for p in peers)

    def _keep_own_body(self) -> None:
        """Before the next body is written: the last one stays in memory as long as somebody may miss it."""
        kept = [mine for mine in self._own_bodies[-1:] if self._may_be_missed(mine)]
        for mine in self._own_bodies:
            if kept and mine is kept[0]:
                self._encoder.give_away(mine.body)
            else:
                self._encoder.give_back(mine.body)
        self._own_bodies = kept

    def _mend_own_bodies(self) -> None:
        """Others are long in coming: is a blob of ours what they miss?"""
        for mine in self._own_bodies:
            if (self._may_be_missed(mine) or self._is_replayed(mine.step)) and not self._may_be_collected(mine):
                self._reducer.mend_own_body(mine)

    def _may_be_collected(self, mine: OwnBody) -> bool:
        """May its blob be gone because nobody needs it?  Then nobody would delete it a second time."""
        commit = self.chain.known_commit(mine.step)
        hint = self.step if self.is_done else self._snapshot
        return self._keep is not None and commit is not None and garbage.may_be_collected(self.store, commit, hint)

    def _is_replayed(self, step: int) -> bool:
        """Does somebody heal who has not made this step yet?  He reads every body that it lists."""
        peers = [*self.members.peers.values()]
        limit = self.timing.dead_after
        return any(p.beat.phase in rules.STARTING and p.beat.step <= step and not p.is_dead(limit) for p in peers)

    def _mean_when_mended(self, commit: Commit, out: np.ndarray, mine: OwnBody | None) -> None:
        """The mean, once its blobs are what they should be.   Raises Corrupt when nobody could mend them any more."""
        began = self.clock.now()
        while True:
            try:
                return self._reducer.mean(commit, out, mine)
            except Corrupt as error:
                if not self._on_bad_body(commit, error) or self.clock.now() - began > self.timing.give_up:
                    raise
                self._check_before_pause()

    def _on_bad_body(self, commit: Commit, error: Corrupt) -> bool:
        """A listed body is bad.  See that ours are not: two would wait for each other.   -> May it yet be put back?"""
        self.members.status.note = str(error)
        for mine in self._own_bodies:
            self._reducer.mend_own_body(mine)
        return self._writers_hold(commit)

    def _writers_hold(self, commit: Commit) -> bool:
        """Have its writers their bodies in memory still?  Until the step after the next, if they live."""
        self.members.read_beats(o.slot for o in commit.offers)
        peers = [self.members.peers.get(o.slot) for o in commit.offers]
        alive = any(p and p.is_beating(self.timing.dead_after) for p in peers)
        return alive and self.store.get(layout.commit_key(commit.t + 2)) is None

    @contextmanager
    def _or_collected(self, commit: Commit) -> Generator[None]:
        try:
            yield
        except Corrupt:
            garbage.refuse_collected(self.store, commit.t)
            raise

    def advance(self, commit: Commit) -> None:
        """The caller has applied the mean: the next step is open."""
        offer = self.last_offer
        if commit.t == self._first:
            self.h_cap = self.rules.sync_every
        if offer is not None and offer.step == commit.t:
            self.h_cap = rules.next_cap(
                self.h_cap, self.rules.sync_every, h=offer.h, took=offer.took, pace_s=commit.pace,
                fresh=commit.lists_offer(commit.t, self.slot),
            )  # fmt: skip
        self._move_on(commit)
        if self._announcement is not None:  # not before: others still average, on the same machine or link
            self._run_in_background(self._announcement)
            self._announcement = None
        self._snapshot_if_due(commit)
        self._set_phase("train")
        self._times.begin()
        small = bool(self._own_bodies) and self.wanted.universe <= rules.LARGE_FLEET
        self.members.begin_step(commit.pace, {o.slot for o in commit.fresh_offers} - {self.slot} if small else set())
        self._refuse_if_fenced()

    def take_step(self, commit: Commit) -> None:
        """mean, apply, advance: a whole step for which this replica did not train."""
        self._confirm_snapshot(commit)
        self._apply_mean(commit)
        self.advance(commit)

    def catch_up(self, late: Callable[[int], None] | None = None) -> int:
        """Apply every step that was decided without us; -> how many.

        late(step): called before each, to offer what we have for that step's fragment.
        """
        start = self.step
        while not self.is_done and (commit := self.chain.read(self.step)) is not None:
            if late is not None:
                late(self.step)
            self.take_step(self._check_commit(commit))
        self.members.decided = min(self.members.decided, self.step - 1)  # a commit that a tick saw may be gone again
        return self.step - start

    def _apply_mean(self, commit: Commit) -> None:
        refuse_misweighed(commit, self.rules)
        fragment = commit.t % self.rules.fragments
        mean = np.empty(self.state.size(fragment), np.float32)
        with self._or_collected(commit):
            self._mean_when_mended(commit, mean, None)
        self._writer.release_fragment(fragment)
        self.state.apply(fragment, mean)

    def _move_on(self, commit: Commit) -> None:
        self._digests.renew_fragment(commit.t % self.rules.fragments)
        if self._keep is not None:
            self._garbage.note_commit(commit)
        self._open_step(commit.t + 1)
        self._snapshot = max(self._snapshot, commit.snapshot)
        self._keep_pace(commit)
        self.idle_steps = self.idle_steps + 1 if all(o.zero for o in commit.fresh_offers) else 0
        self.members.fenced_by = max(self.members.fenced_by, commit.fence.get(self.slot, 0))

    def _open_step(self, step: int) -> None:
        self.step = step
        self.base = self._digests.base
        self._point_committer()

    def _point_committer(self) -> None:
        self.offers.open_step(self.step, self.base)

    # ------------------------------------------------------------------ keeping honest

    def _check_state(self, *fragments: int) -> None:
        """Bytes of θ and momentum (default: of all fragments) that changed behind our back are never offered, stepped
        from or published.   Raises Diverged."""
        self._digests.check_unchanged(*fragments)

    def _all_arrays(self, t: int) -> snapshots.Arrays:
        """In the order in which they stand in snapshot t."""
        return all_arrays(self.state, self.rules.fragments, t)

    def _replay_own_state(self, whose: str, base: str) -> None:
        """Somebody started this step from another θ: replay ours from the bucket, once per step, and see."""
        if self._replayed_at == self.step:
            return
        self._replayed_at = step = self.step
        mine = self.base
        began = self._times.began
        self._heal_from_bucket(upto=step)
        self.chain.read(step)  # where it is decided already: the replay went up to it, not through it
        self._times.began = began
        self.emit("base_differs", step=step, whose=whose, theirs=base, ours=mine, replay=self.base)
        if self.base != mine:
            raise Diverged(
                f"θ_{step} of {self.name} is not what the bucket replays to "
                f"(ours {mine}, replay {self.base}). This life ends; the next heals from the bucket"
            )

    def _confirm_snapshot(self, commit: Commit) -> None:
        """Commit t says from which state it started: what is written of θ_t may become visible, or not."""
        self._writer.confirm_base(commit.t, commit.base)
        if self._keep is not None and commit.by == self.name:
            self._run_in_background(self._sweep_garbage)

    def _snapshot_if_due(self, commit: Commit) -> None:
        """Begin to write θ as this commit has made it, beside the next inner steps."""
        due = self._pace.is_due(
            self.step, self._snapshot, closed=commit.by == self.name, owes=self._writer.owes,
            stands=self._hear_of_snapshot,
        )  # fmt: skip
        if due and not (self._writer.is_busy or self.is_behind or self.is_done):
            self._writer.start(
                self.state, self.rules.fragments, self.step, base=self.base, prev=self.chain.commit_digest(commit.t)
            )

    def _keep_pace(self, commit: Commit) -> None:
        """Reckon when the next snapshot is due; without the budget for a state that cannot be seen into."""
        size = 0
        left = Sizes(0, 0)
        if self._keep and (arrays := self._all_arrays(0)):
            size = TensorFile(arrays).size
            left = sizes_of(commit, self.state.size(commit.t % self.rules.fragments), self.rules)
        self._pace.take_step(commit.t, left, snapshot=size, newest=self._snapshot)

    def _hear_of_snapshot(self, step: int) -> bool:
        """Is this snapshot there?  Its writer alone knows until it closes a step."""
        found = snapshots.read(self.store, step) is not None
        if found:
            self._snapshot_stands(step)
        return found

    def _snapshot_stands(self, step: int) -> None:
        self._snapshot = max(self._snapshot, step)

    def _sweep_garbage(self) -> None:
        if self._pace.planned > self._snapshot:
            self._hear_of_snapshot(self._pace.planned)
        self._garbage.sweep(self._snapshot)

    # ------------------------------------------------------------------ leaving

    def ask_to_leave(self) -> None:
        """The operator, the platform or the scheduler wants this replica gone (safe in a signal handler)."""
        if self._leave_at is None:
            self._leave_at = self.clock.now()

    @property
    def is_leaving(self) -> bool:
        return self._leave_at is not None or self.wanted.is_to_leave(self.slot)

    def finish(self, reason: str) -> None:
        """Say goodbye: the last writes of this generation, as far as the store takes them."""
        if not self.generation:  # asked to go before it held the slot
            return
        self.store.before_pause = lambda: None  # going already
        if not self.is_done:
            self._writer.abandon()
        self._uploads.drain()
        self._background.drain()
        if self.is_done:
            self._check_state()  # our digest may confirm the last snapshot
        try:
            self._mend_own_bodies()
            residual, digest = self._hand_over_residual()
            record = Leave(
                slot=self.slot,
                generation=self.generation,
                step=self.step,
                base=self.base,
                reason=reason,
                nonce=new_nonce(),
                at=self.clock.wall(),
                residual=residual,
                residual_digest=digest,
            )
            put_once(self.store, self.clock, layout.leave_key(self.slot, self.generation), record.encode())
            if self.is_done:
                self._final_snapshot()
        except GaveUp as error:
            self.emit("no_goodbye", trouble=str(error))
        self.members.say_goodbye()

    def _hand_over_residual(self) -> tuple[str, str]:
        """-> key and digest of what the codec has not sent, for the next life of this slot; ("", "") for none.

        It may take half of the time that is left, by the rate of the last upload; else it is lost, and that is told.
        """
        unsent = {} if self.is_done else self._encoder.unsent_residuals
        size = sum(e.nbytes for e in unsent.values())
        asked = self.clock.now() if self._leave_at is None else self._leave_at
        left = asked + self.timing.grace - self.clock.now()
        if not size:
            return "", ""
        if size > self._rate * left / 2:
            self.emit("residual_dropped", bytes=size, rate=self._rate, left_s=left)
            return "", ""
        return residuals.put_residuals(self.store, self.slot, self.generation, unsent)

    def _final_snapshot(self) -> None:
        """θ_T has no commit to confirm it: two leave records with one digest do, or m = 1 without (marked so).

        Nobody closes a step after it, so all who end collect once more: its writer may have been killed before it did.
        """
        if self.store.get(layout.snapshot_key(self.step)) is None:
            agree = self._others_who_left_with(self.base)
            if not agree and self.wanted.min_replicas > 1:
                return
            self._writer.write(
                self.state, self.rules.fragments, self.step, base=self.base,
                prev=self.chain.commit_digest(self.step - 1), confirmed=agree,
            )  # fmt: skip
        if self._keep is not None:
            self._snapshot = max(self._snapshot, self.step)
            self._run_in_background(self._sweep_garbage)
            self._background.drain()

    def _others_who_left_with(self, base: str) -> bool:
        left = [r for slot in self.wanted.slot_names if slot != self.slot for r in self._leave_records(slot)]
        return any(r.step == self.step and r.base == base for r in left)

    def _leave_records(self, slot: str) -> Iterator[Leave]:
        """Leave records of a slot's generations, from the newest that the chain knows on."""
        generation = self.chain.fence_before(self.step).get(slot, 1)
        while self.store.get(layout.claim_key(slot, generation)) is not None:
            if (left := read_leave(self.store, slot, generation)) is not None:
                yield left
            generation += 1

    def _store_trouble(self, text: str) -> None:
        self.emit("store_trouble", trouble=text)
        self._set_note(text)

    def _set_note(self, text: str) -> None:
        self.members.status.note = text

    def _set_phase(self, phase: str) -> None:
        status = self.members.status
        status.phase = phase
        status.step = self.step
        status.note = ""
        if phase == "train":
            status.inner = 0

    def check_alive(self) -> None:
        """Raises HeartbeatLost once nobody ticks for this life any more: it would hear of nothing."""
        if (why := self.members.heartbeat_lost) is not None:
            raise HeartbeatLost(f"the heartbeat of {self.name} has ended; this life ends too: {why}") from why

    def _refuse_if_fenced(self) -> None:
        self.check_alive()
        if self.members.fenced_by > self.generation:
            raise Fenced(
                f"{self.slot} now belongs to generation {self.members.fenced_by}; this process (generation "
                f"{self.generation}) goes. What it offered still counts"
            )

    def _check_before_pause(self) -> None:
        """Called before every pause.  Work that is not durable yet may use the whole grace time."""
        self._refuse_if_fenced()
        if not self.is_leaving:
            return
        overdue = self._leave_at is not None and self.clock.now() - self._leave_at > self.timing.grace
        if overdue or self.members.status.phase in ("wait", "heal"):
            raise Leaving(f"{self.name} was asked to go; what it offered is durable")
