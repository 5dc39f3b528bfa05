"""One replica's side of the agreement.

        claim ─▶ join ─▶ ┌─▶ offer ─▶ settle ─▶ mean ─▶ (caller applies it) ─▶ advance ─┐ ─▶ finish
                         └──────────────────────── catch_up when behind ◀───────────────┘

    claim      take the slot                            membership.py: holders of slots, beats, the desired state
    join       load θ_t from the bucket alone           replay.py
    offer      upload Δ, then write the offer           own_blobs.py, offers.py
    settle     wait for the step's only commit          closing.py, chain.py; step_wait.py
    mean       compute it, the same bits everywhere     averaging.py, reduce.py, sharded.py
    advance    open the next step                       snapshot_duty.py
    finish     write what other replicas need           leaving.py

All durable objects are write-once, so after an error the engine reads again and never fails a step.  The engine starts
no thread and has no timer: it waits only through the store and the clock.  `background` runs jobs in parallel, and
`together` makes several requests at a time.  Both are arguments: threads in a replica, greenlets in the simulator,
which can therefore run thousands of schedules of exactly this code.

The engine handles flat fp32 vectors and a `ReplicatedState`, which holds and steps them (state.py); it knows nothing of
models.
Not promised: progress with fewer than `min_replicas` replicas: the step stays open, and then `GaveUp` is raised.
"""

from collections.abc import Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from rendezvous.agreement import rules
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.closing import Committer
from rendezvous.agreement.membership import BeatStatus, Membership, Wanted, refuse_lost_claim
from rendezvous.agreement.offers import OfferBook
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.agreement.step_wait import StepTimes, StepWait
from rendezvous.background import Background, Emit, Inline, Together, in_turn, no_emit, submit_reported
from rendezvous.clock import Clock
from rendezvous.engine import leaving
from rendezvous.engine.averaging import Averager
from rendezvous.engine.leaving import Departure
from rendezvous.engine.own_blobs import OwnBlobs
from rendezvous.engine.snapshot_duty import SnapshotDuty
from rendezvous.errors import Diverged, GaveUp, Leaving, RendezvousError
from rendezvous.keeping import garbage
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Offer
from rendezvous.records.state import Digests, ReplicatedState
from rendezvous.records.wire import check_shape
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.replay import StateReplay, write_theta_0
from rendezvous.store import PatientStore, Store

if TYPE_CHECKING:
    from rendezvous.threads import Threads
    from rendezvous.weights.writer import WeightsWriter


class Rendezvous:
    """One generation of one slot.

    store, clock: its only connections to the outside.   emit(event, **fields): called for events that people read.
    background: runs jobs during the training.   uploads: runs jobs that may take longer than a round.
    together: makes several requests at a time (`background.together_on`).   threads: run passes over vectors.
    keep: bytes of old blobs to keep in the bucket beside those that a reader may need (keeping/budget.py); None: all.
    weights: writes bf16 weights of the steps that this replica closes, for inference engines.   process: host, pid, …
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        slot: str,
        rules_: Rules,
        timing: Timing,
        *,
        emit: Emit = no_emit,
        keep: int | None = None,
        background: Background | None = None,
        uploads: Background | None = None,
        together: Together = in_turn,
        threads: "Threads | None" = None,
        weights: "WeightsWriter | None" = None,
        **process: Any,
    ) -> None:
        self.slot = slot
        self.clock = clock
        self.timing = timing
        self.emit = emit
        self.members = Membership(store, clock, slot, 0, timing, emit=emit, **process)
        self._departure = Departure(clock, self.members, timing.grace)
        self.store = PatientStore(
            store, clock, min(timing.store_patience, timing.give_up), self._departure.check_before_pause,
            lambda text: _report_trouble(text, emit, self.members.status), full_s=timing.give_up,
            on_recovered=lambda: setattr(self.members.status, "note", ""),
        )  # fmt: skip
        self._bucket = store
        self._keep = keep
        self._background = background or Inline()
        self._uploads = uploads or self._background
        self._together, self._threads = together, threads
        self._weights = weights
        self._times = StepTimes(clock)
        self._theta_0: Callable[[], snapshots.Arrays] | None = None
        self._joined_at = -1  # the step during which we joined
        self._replayed_at = -1  # the step for which we last replayed our own θ
        self.generation = 0
        self.step = 0
        self.base = ""
        self.last_offer: Offer | None = None
        self.baggage: Callable[[], snapshots.Arrays] = dict  # arrays for the next generation of this slot
        self.inherited: dict[str, np.ndarray] = {}  # arrays from the generation before; set by `join`
        self.idle_steps = 0  # committed steps in a row in which every fresh offer was zero
        self.set_rules(rules_)

    @property
    def name(self) -> str:
        """Name of this replica: slot and generation."""
        return self.members.name

    def set_rules(self, rules_: Rules, timing: Timing | None = None) -> "Rendezvous":
        """Set the run's rules, after `claim` and before `join`, if the caller did not know them earlier."""
        self.rules = rules_
        self.h_cap = rules_.sync_every
        self.timing = timing or self.timing
        self.chain = Chain(self.store, rules_.window)
        self.offers = OfferBook(
            self.store, self.clock, self.chain, rules_, together=self._together,
            on_foreign_base=lambda offer: self._replay_own_state(f"{offer.slot}'s offer", offer.base),
            on_rejected=lambda key, why: self.emit("bad_offer", key=key, text=f"passed over: {why}"),
        )  # fmt: skip
        self._committer = Committer(
            self.store, self.clock, self.chain, self.members, self.offers,
            rules=rules_, timing=self.timing, together=self._together,
        )  # fmt: skip
        self.own_blobs = OwnBlobs(
            self.store, self.clock, self.chain, self.members, rules_, self.timing,
            emit=self.emit, collects=self._keep is not None,
            newest_snapshot=lambda: self.step if self.is_done else self._snapshots.newest,
        )  # fmt: skip
        self.reducer = Reducer(self.store, self.clock, self.emit, rules_, together=self._together)
        if self._threads is not None:
            from rendezvous.means.by_threads import by_threads

            near = self._together is in_turn
            self.reducer = by_threads(self._threads, self.own_blobs.encoder, self.reducer, near=near)
        self._averager = Averager(
            self.store, self.clock, self.reducer, self.members, self.own_blobs, self.timing,
            check_before_pause=self._departure.check_before_pause, refuse_lost=self._committer.refuse_lost_anchors,
        )  # fmt: skip
        self._snapshots = SnapshotDuty(
            self.store, self._bucket, self.clock, rules_, keep=self._keep, background=self._background,
            uploads=self._uploads, elements=lambda f: self.state.size(f), emit=self.emit,
        )  # fmt: skip
        return self

    # ------------------------------------------------------------------ joining

    def claim(self, claimed: int = 0) -> int:
        """Claim the slot, and return the generation. This is cheap, so a replica can do it before heavy imports."""
        self.generation = self.members.claim(self.store, claimed)
        return self.generation

    def join(self, state: ReplicatedState, theta_0: Callable[[], snapshots.Arrays] | None = None) -> None:
        """Heal before the first inner step: load the newest snapshot, then apply every later mean.

        theta_0(): the state's arrays at the start of the run, if they come from elsewhere; snapshot 0 then has no blob.
        If an earlier generation of this slot has written an offer for the open step, first wait for that step's commit.
        """
        self.state = state
        self._theta_0 = theta_0
        self.members.status.enter_phase("heal", self.step)
        refuse_lost_claim(self.store, self.members)  # never write a new θ_0 to an emptied store
        write_theta_0(self.store, self.clock, state, self.rules.fragments, elsewhere=theta_0 is not None)
        self._heal()
        self.members.refuse_if_fenced()  # claims may be lost, but the chain has the fence
        self._committer.refuse_lower_quorum()
        if self.store.digests is not None:  # the run is under a key
            from rendezvous.agreement.forgotten import refuse_forgotten_steps

            fence = self.chain.fence_before(self.step)
            refuse_forgotten_steps(self.store, self.wanted.slot_names, fence, self.step, self._together)
        sizes = [state.size(f) for f in range(self.rules.fragments)]
        unsent, self.inherited = leaving.take_over(self.store, self.members, sizes, self.emit)
        if unsent:
            self.own_blobs.encoder.restore_residuals(unsent)
        while not self.is_done and self.offers.has_offered(self.slot):
            self.emit("adopted", step=self.step)
            self.take_step(self.settle())
        self._joined_at = self.step
        self.h_cap = rules.first_cap(self.step, [*self.members.peers.values()], self.rules, self.timing.dead_after)
        self._digests.check_unchanged()
        self.members.status.enter_phase("train", self.step)

    def resume_at(self, state: ReplicatedState, step: int) -> None:
        """Begin at `step` with the present `state`, without a snapshot or a replay."""
        self.state = state
        self._digests = Digests(state, self.rules.fragments, self.name)
        self.chain.read_before(step)
        self._open_step(step)
        self._times.begin()

    def _heal(self, upto: int | None = None) -> None:
        """Load θ_upto (default: the newest θ) from the bucket.  Try again if its blobs are collected meanwhile."""
        garbage.look_again(lambda: self._heal_once(upto), self.emit)

    def _heal_once(self, upto: int | None) -> None:
        self._snapshots.writer.abandon()
        if self._weights is not None:
            self._weights.wait_until_read()
        self.chain.forget_commits()
        replay = StateReplay(
            self.store, self.chain, self.state, self.rules.fragments, self._averager.mean_of_past,
            emit=self.emit, theta_0=self._theta_0, name=self.name,
        )  # fmt: skip
        if not replay.load_snapshot(self._snapshots.newest, upto):
            from rendezvous.keeping.collected import refuse_collected

            refuse_collected(self.store, max(replay.damaged, default=upto or 0))
            raise RendezvousError(
                "no snapshot of this run can be read and fits this model, not even step 0's: the bucket lost objects, "
                "or the run is of another model. Restore it from a backup, or start a new run from an exported model"
            )
        start = replay.step
        self._digests = replay.digests
        self._snapshots.note_snapshot(start)
        self.chain.read_before(start)  # a closer must know the offers that these commits list
        self._open_step(start)
        for commit in replay.commits(upto):
            self._move_on(commit)
        self._times.begin()
        self.emit("healed", snapshot=start, step=self.step, replayed=self.step - start)

    # ------------------------------------------------------------------ one outer step

    @property
    def fragment(self) -> int:
        """The fragment that the open step synchronises."""
        return self.step % self.rules.fragments

    @property
    def wanted(self) -> Wanted:
        return self.members.wanted

    @property
    def is_done(self) -> bool:
        return self.step >= self.wanted.steps > 0

    @property
    def is_behind(self) -> bool:
        """Whether the open step was decided without this replica.  The background tick sets it; no request is made."""
        return self.members.decided >= self.step

    @property
    def is_leaving(self) -> bool:
        return self._departure.is_asked

    def offer(
        self,
        delta: np.ndarray,
        h: int,
        *,
        samples: float = 0.0,
        stats: dict[str, float] | None = None,
        theta: np.ndarray | None = None,
    ) -> None:
        """Write Δ for the open step: first the blob, then the offer that names it.

        delta: flat fp32 vector of the fragment; the caller may overwrite it afterwards.   h: Δ's inner steps.
        theta: the fragment's θ, for codecs that compare with it, and to refuse a Δ with an absurd norm.
        """
        self.members.refuse_if_fenced()
        if h < 1:
            raise ValueError(f"a pseudogradient must have at least one inner step, got h={h}; do not offer it")
        check_shape(delta, self.state.size(self.fragment))
        self._departure.hear()
        self._digests.check_unchanged(self.fragment)
        self.offers.open_step(self.step, self.base)
        if not self.offers.has_offered(self.slot):
            upload = self.own_blobs.upload(self.step, self.fragment, delta, theta)
            written = upload.written
            mine = Offer(
                step=self.step, slot=self.slot, generation=self.generation, base=self.base, h=int(h),
                took=self._times.took, at=self.clock.wall(), samples=float(samples), leaving=self.is_leaving,
                codec=self.rules.codec, stats={k: float(v) for k, v in (stats or {}).items() if isfinite(v)},
                nonce=upload.nonce, blob=upload.key, size=written.body.size, digest=written.digest,
                shards=written.shards, norm=written.norm, scale=written.scale, zero=written.norm == 0.0,
            )  # fmt: skip
            self._times.note_round(self.members.status.inner, self.rules.sync_every // self.rules.fragments)
            stands = self.offers.announce(mine)
            if stands is mine:
                self.last_offer = mine
            else:
                self.emit("offer_lost", step=self.step, to=stands.generation)
                self.own_blobs.take_back(self.fragment)
        self.members.status.enter_phase("wait", self.step)

    def settle(self) -> Commit:
        """Wait for the decision of the open step, help to make it, return the commit.  Our offer must be durable."""
        self.members.status.enter_phase("wait", self.step)
        self.offers.open_step(self.step, self.base)
        wait = StepWait(self.clock, self.timing, self._times.due_in())
        while (commit := self.chain.read(self.step)) is None:
            self._departure.check_before_pause()
            if (steps := self.wanted.steps) and self.is_done:  # no step is closed beyond the run's last one
                raise Leaving(f"the run now ends after {steps} outer steps, and {self.name} has taken them all")
            wait.count_time()
            why_open = self._committer.try_to_commit(wait, self._snapshots.newest)
            self.members.status.note = why_open
            if why_open:
                _refuse_long_wait(self.step, self.name, why_open, idle=wait.idle, limit=self.timing.give_up)
                if wait.is_overdue():
                    self._committer.refuse_lost_anchors()
                    self.own_blobs.mend_missed()
                wait.sleep()
        self._times.note_decision()
        return self._check_commit(commit)

    def _check_commit(self, commit: Commit) -> Commit:
        """Return the commit.  If its base differs from ours, replay our own state first."""
        self._digests.check_unchanged(self.fragment)
        if commit.base != self.base:
            self._replay_own_state(f"commit {commit.t} by {commit.by}", commit.base)
        return commit

    def mean(self, commit: Commit, out: np.ndarray, *, past: bool = False) -> None:
        """Write the commit's mean into `out`, which may be the vector that was offered.

        past: this replica did not train for the step, so it does not help to compute the mean.
        """
        self._snapshots.confirm(commit, closed=commit.by == self.name)
        (self._averager.mean_of_past if past else self._averager.mean)(commit, out)
        fragment = commit.t % self.rules.fragments
        self._snapshots.writer.release_fragment(fragment)  # as late as possible: the caller steps the fragment now
        if self._weights is not None:
            self._weights.wait_until_read()

    def advance(self, commit: Commit) -> None:
        """Open the next step.  The caller must have applied the mean."""
        offer = self.last_offer
        if commit.t == self._joined_at:
            self.h_cap = self.rules.sync_every
        if offer is not None and offer.step == commit.t:
            self._times.note_slowness(rules.slowness(self._times.round_s, pace_s=commit.pace, poll=self.timing.poll))
            fresh = commit.lists_offer(commit.t, self.slot)
            self.h_cap = rules.next_cap(self.rules.sync_every, self._times.slow, fresh=fresh)
        self._digests.renew_fragment(commit.t % self.rules.fragments)
        self._move_on(commit)
        if (announcement := self._averager.take_announcement()) is not None:
            submit_reported(self._background, announcement, self.emit)  # not while the others still average
        self._snapshots.start_if_due(
            self.state, self.step, base=self.base, prev=self.chain.commit_digest(commit.t),
            closed=commit.by == self.name, idle=not (self.is_behind or self.is_done),
        )  # fmt: skip
        if self._weights is not None:
            self._weights.note_step(
                self.state, self.step, self.rules.fragments, base=self.base, closed=commit.by == self.name
            )
        self.members.status.enter_phase("train", self.step)
        self._times.begin()
        self.members.begin_step(commit.pace, self.own_blobs.readers_of(commit))
        self.members.refuse_if_fenced()

    def take_step(self, commit: Commit) -> None:
        """Take a step for which this replica did not train: compute the mean, apply it, advance."""
        fragment = commit.t % self.rules.fragments
        mean = np.empty(self.state.size(fragment), np.float32)
        self.mean(commit, mean, past=True)
        self.state.apply(fragment, mean)
        self.advance(commit)

    def catch_up(self, late: Callable[[int], None] | None = None) -> int:
        """Apply every step that was decided without this replica, and return their number.

        late(step): called before each step is applied; may offer this replica's own work on the step's fragment, late.
        """
        start = self.step
        while not self.is_done and (commit := self.chain.read(self.step)) is not None:
            if late is not None:
                late(self.step)
            self.take_step(self._check_commit(commit))
        self.members.decided = min(self.members.decided, self.step - 1)  # the store may lose a commit that a tick saw
        return self.step - start

    def _move_on(self, commit: Commit) -> None:
        """Open the step after this commit.  The state must have applied it."""
        self._open_step(commit.t + 1)
        self._snapshots.note_commit(commit, self.state)
        self.idle_steps = self.idle_steps + 1 if all(o.zero for o in commit.fresh_offers) else 0

    def _open_step(self, step: int) -> None:
        self.step = step
        self.members.fenced_by = max(self.members.fenced_by, self.chain.fence_before(step).get(self.slot, 0))
        self.base = self._digests.base
        if self._threads is not None:
            self._digests.map = self._threads.map
        self.offers.open_step(step, self.base)

    def _replay_own_state(self, whose: str, base: str) -> None:
        """Replay θ from the bucket, because another replica started this step from another θ than ours.

        Done once per step.   Raise Diverged if the result is not our θ.
        """
        if self._replayed_at == self.step:
            return
        self._replayed_at = step = self.step
        mine = self.base
        began = self._times.began
        self._heal(upto=step)
        self.chain.read(step)  # the replay ended before this step, which may be decided already
        self._times.began = began
        self.emit("base_differs", step=step, whose=whose, theirs=base, ours=mine, replay=self.base)
        if self.base != mine:
            raise Diverged(
                f"θ_{step} of {self.name} differs from the one replayed from the bucket "
                f"(ours {mine}, replay {self.base}). This replica ends; its slot's next generation heals from there"
            )

    # ------------------------------------------------------------------ leaving

    def ask_to_leave(self) -> None:
        """Ask this replica to leave.  Safe in a signal handler."""
        self._departure.ask()

    def finish(self, reason: str) -> None:
        """Make the last writes of this generation.  If the store gives no answer, leave without them."""
        if not self.generation:  # this replica was asked to leave before it had the slot
            return
        self.store.before_pause = lambda: None  # nothing to do before a pause: this replica is leaving already
        if not self.is_done:
            self._snapshots.writer.abandon()
        self._uploads.drain()
        self._background.drain()
        if self.is_done and self._weights is not None:
            self._weights.drain()
        if self.is_done:
            self._digests.check_unchanged()  # our digest may confirm the last snapshot
            self._committer.refuse_lost_anchors()  # a run is done only if its records still exist
        try:
            self.own_blobs.mend_missed()
            unsent = {} if self.is_done else self.own_blobs.encoder.unsent_residuals
            residual = leaving.hand_over(
                self.store, self.members, unsent, {} if self.is_done else self.baggage(),
                bytes_per_s=self.own_blobs.bytes_per_s, left_s=self._departure.left_s, emit=self.emit,
            )  # fmt: skip
            step, base = self.step, self.base
            leaving.write_leave_record(
                self.store, self.clock, self.members, step=step, base=base, reason=reason, residual=residual
            )
            if self.is_done:
                self._snapshots.write_last(
                    self.state, step, base=base, prev=self.chain.commit_digest(step - 1), m=self.wanted.min_replicas,
                    agree=lambda: leaving.has_left_alike(self.store, self.chain, self.members, step=step, base=base),
                )  # fmt: skip
        except GaveUp as error:
            self.emit("no_leave_record", trouble=str(error))
        self.members.write_leave_beat()
        if self.is_done:  # the last request: a run is done only if its records still exist
            self._committer.refuse_lost_anchors()


def _report_trouble(text: str, emit: Emit, status: BeatStatus) -> None:
    emit("store_trouble", trouble=text)
    status.note = text


def _refuse_long_wait(step: int, name: str, why_open: str, *, idle: float, limit: float) -> None:
    if idle > limit:
        raise GaveUp(
            f"step {step} was open for {idle:.0f} s: {name} {why_open}. Its offers stay valid: run the same "
            "command again to continue, or lower min_replicas with a control record if fewer replicas are enough"
        )
