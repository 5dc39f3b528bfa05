"""One replica's work on snapshots: to write them, to make them visible, to delete the blobs that they replace.

    commit t−1 applied ──▶ due? (keeping/budget.py) ──▶ write θ_t while round t trains (snapshots/writer.py)
    commit t read      ──▶ its base is ours: the manifest is written    else: the snapshot is abandoned
                       └─▶ this replica wrote commit t: delete blobs that no replica needs any more (garbage.py)
    the run's end      ──▶ θ_T has no commit: two replicas that left with the same digest confirm it

Not promised: that this replica knows the newest snapshot.  The writer knows at once; others learn from a commit.
"""

from collections.abc import Callable
from dataclasses import dataclass

from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.background import Background, Emit, submit_reported
from rendezvous.clock import Clock
from rendezvous.keeping.budget import Sizes, SnapshotPace, sizes_of
from rendezvous.keeping.garbage import Collector
from rendezvous.records.records import Commit
from rendezvous.records.state import ReplicatedState, all_arrays
from rendezvous.records.tensors import TensorFile
from rendezvous.snapshots import record as snapshots
from rendezvous.snapshots.writer import SnapshotWriter
from rendezvous.store import Store


@dataclass(eq=False, repr=False)
class SnapshotDuty:
    """One replica's snapshots.

    keep: bytes of blobs that stay in the bucket (keeping/budget.py), None for all.
    bucket: the store without retries, for deletions, which may fail.
    background: runs jobs during the training.   uploads: runs jobs that may take longer than a round.
    elements(fragment): number of elements in the fragment's vector.
    """

    store: Store
    bucket: Store
    clock: Clock
    rules: Rules
    keep: int | None
    background: Background
    uploads: Background
    elements: Callable[[int], int]
    emit: Emit
    newest: int = 0  # the newest snapshot known

    def __post_init__(self) -> None:
        budget = self.keep or 0
        self._pace = SnapshotPace(self.rules.snapshot_every, budget)
        self._collector = Collector(self.bucket, self.rules, self.emit, budget, self.elements)
        self.writer = SnapshotWriter(
            self.store, self.clock, self.uploads, self._submit, emit=self.emit, on_written=self.note_snapshot
        )

    def note_commit(self, commit: Commit, state: ReplicatedState) -> None:
        """Note that a commit was applied: plan the next snapshot, and inform the collector.

        For a state without arrays, plan without the budget.
        """
        if self.keep is not None:
            self._collector.note_commit(commit)
        self.note_snapshot(commit.snapshot)
        size = 0
        left = Sizes(0, 0)
        if self.keep and (arrays := all_arrays(state, self.rules.fragments)):
            size = TensorFile(arrays).size
            left = sizes_of(commit, state.size(commit.t % self.rules.fragments), self.rules)
        self._pace.take_step(commit.t, left, snapshot=size, newest=self.newest)

    def confirm(self, commit: Commit, *, closed: bool) -> None:
        """Make the snapshot of θ_t visible if commit t started from the same state; else abandon it.

        closed: this replica wrote the commit.  The writer also deletes old blobs, if the run collects them.
        """
        self.writer.confirm_base(commit.t, commit.base)
        if closed and self.keep is not None:
            self._submit(self.sweep)

    def start_if_due(
        self, state: ReplicatedState, step: int, *, base: str, prev: str | None, closed: bool, idle: bool
    ) -> None:
        """Begin to write θ_step during the next inner steps, if a snapshot is due.

        closed: this replica wrote the last commit.   idle: this replica is not behind, and the run is not done.
        """
        due = self._pace.is_due(step, self.newest, closed=closed, owes=self.writer.owes, stands=self._hear_of_snapshot)
        if due and idle and not self.writer.is_busy:
            self.writer.start(state, self.rules.fragments, step, base=base, prev=prev)

    def write_last(
        self, state: ReplicatedState, step: int, *, base: str, prev: str | None, m: int, agree: Callable[[], bool]
    ) -> None:
        """Write θ_T if two leave records with the same digest confirm it.  If m = 1, write it without them, too.

        No replica closes a later step, and the writer of this snapshot may be killed before it deletes old blobs.  So
        every replica that ends deletes them once more.
        """
        if self.store.get(layout.snapshot_key(step)) is None:
            confirmed = agree()
            if not confirmed and m > 1:
                return
            self.writer.write(state, self.rules.fragments, step, base=base, prev=prev, confirmed=confirmed)
        if self.keep is not None:
            self.note_snapshot(step)
            self._submit(self.sweep)
            self.background.drain()

    def sweep(self) -> None:
        """Delete the blobs that exceed the budget and that no reader of the newest snapshots needs."""
        if self._pace.planned > self.newest:
            self._hear_of_snapshot(self._pace.planned)
        self._collector.sweep(self.newest)

    def _submit(self, job: Callable[[], None]) -> None:
        submit_reported(self.background, job, self.emit)

    def _hear_of_snapshot(self, step: int) -> bool:
        """Whether the snapshot of this step exists.  (Its writer knows without a request.)"""
        found = snapshots.read(self.store, step) is not None
        if found:
            self.note_snapshot(step)
        return found

    def note_snapshot(self, step: int) -> None:
        """Note that the snapshot of this step is visible."""
        self.newest = max(self.newest, step)
