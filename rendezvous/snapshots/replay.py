"""Replay: θ_t of any committed step, from the bucket alone, to join, heal, check, export and audit.

    θ_t = snapshot(s) ∘ outer(mean_s) ∘ … ∘ outer(mean_{t−1})            s ≤ t, the newest readable snapshot

    newest  ●──── bytes have their digest, state has the announced base ──▶ state
            │ no
    older   ●──── … ──▶ state ── commits s, s+1, … ──▶ at the step of the damaged snapshot: upload its bytes again

The replay defines the run: if a commit names another base, its closer was wrong.

Not promised: speed far from a snapshot.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.background import Emit
from rendezvous.clock import Clock
from rendezvous.records.records import Commit, Snapshot
from rendezvous.records.state import Digests, ReplicatedState, all_arrays, base_of
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store

Mean = Callable[[Commit, np.ndarray], None]  # writes a commit's mean into the vector


def write_theta_0(store: Store, clock: Clock, state: ReplicatedState, fragments: int, *, elsewhere: bool) -> None:
    """Write this state as snapshot 0, if the run has neither steps nor snapshots.

    A snapshot 0 that was lost later is not written again, because no replica can know that its own state is the same.
    elsewhere: every replica gets θ₀ from another place.
    """
    first = (layout.snapshot_key(0), layout.commit_key(0))
    later = any(store.get(key) is not None for key in first) or any(snapshots.steps_of(store.list(layout.SNAPSHOTS)))
    if not later:
        base = base_of(state, fragments)
        snapshots.write_first(store, clock, all_arrays(state, fragments), base=base, elsewhere=elsewhere)


@dataclass(eq=False, repr=False)
class StateReplay:
    """Replay of a state from a snapshot to a later step.

    mean(commit, out): writes the mean of a decided step.   theta_0(): the arrays of step 0, if the bucket has none.
    name: the replica's name, for errors.   mends: whether damaged snapshots are uploaded again.
    """

    store: Store
    chain: Chain
    state: ReplicatedState
    fragments: int
    mean: Mean
    emit: Emit
    theta_0: Callable[[], snapshots.Arrays] | None = None
    name: str = ""
    mends: bool = True
    step: int = 0
    damaged: dict[int, Snapshot] = field(default_factory=dict[int, Snapshot])  # newer than the loaded one
    digests: Digests = field(init=False)  # digests of the state at `step`; set by `load_snapshot`

    def load_snapshot(self, hint: int = 0, upto: int | None = None) -> bool:
        """Load the newest readable snapshot up to step `upto`, and set `step` and `digests`.

        Return False if no snapshot can be read.   hint: a step that may have a snapshot.
        """
        for snapshot in snapshots.newest_first(self.store, hint, upto):
            if self._load(snapshot):
                self.step = snapshot.t
                return True
            self.damaged[snapshot.t] = snapshot
        return False

    def commits(self, upto: int | None = None) -> Iterator[Commit]:
        """Apply one commit after the other, up to `upto` or the last commit.   Yield each after it was applied."""
        while (upto is None or self.step < upto) and (commit := self.chain.read(self.step)) is not None:
            base = self.digests.base
            if commit.base != base:
                self.emit("replay_differs", step=self.step, replay=base, commit=commit.base, by=commit.by)
            self._mend_snapshot()
            self._apply(commit)
            self.step += 1
            yield commit
        if upto is None:
            self.chain.refuse_gap(self.step)
        self._mend_snapshot()

    def _apply(self, commit: Commit) -> None:
        fragment = commit.t % self.fragments
        mean = np.empty(self.state.size(fragment), np.float32)
        self.mean(commit, mean)
        self.state.apply(fragment, mean)
        self.digests.renew_fragment(fragment)

    def _load(self, snapshot: Snapshot) -> bool:
        """Load this snapshot.   Return whether its bytes' digest and the state's base are as announced."""
        if snapshot.blob or base_of(self.state, self.fragments) != snapshot.base:
            arrays = self._arrays_of(snapshot)
            if arrays is None:
                return False
            self.state.load(dict(arrays))
        self.digests = Digests(self.state, self.fragments, self.name)
        base = self.digests.base
        if base != snapshot.base:
            self.emit("bad_snapshot", step=snapshot.t, blob=snapshot.blob, found=base, announced=snapshot.base)
        return base == snapshot.base

    def _arrays_of(self, snapshot: Snapshot) -> snapshots.Arrays | None:
        if snapshot.blob:
            like = all_arrays(self.state, self.fragments)
            return snapshots.load(self.store, snapshot, self.emit, like, in_place=True)
        if self.theta_0 is None:
            self.emit("bad_snapshot", step=0, blob="", found="no start model", announced=snapshot.base)
            return None
        return self.theta_0()

    def _mend_snapshot(self) -> None:
        damaged = self.damaged.get(self.step)
        if damaged is None or not self.mends:
            return
        if snapshots.mend_blob(self.store, damaged, all_arrays(self.state, self.fragments, self.step)):
            self.emit("repaired", step=self.step, blob=damaged.blob)
