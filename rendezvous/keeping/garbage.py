"""Collector: it deletes blobs that no reader needs and that exceed the budget, and no other objects.

    complete snapshots   …      ●          ●          ●              manifest and blob exist, digest confirmed
                                           f          s: the newest  if it is damaged, replicas heal from f
    step                 …    d−1 │ d … f−1 │ f … s−1 │ s … head     d = f − F·max_carry
      delta/*.bin          may go │ listed  │ replaced│  kept        listed: may go if a commit before f lists it
      mean/*.bin           may go │  may go │   kept  │  kept        replaced: may go if its commit's mean is announced
      *.safetensors        may go │  may go │   kept  │  kept        all manifests stay

A commit may list a late delta until F·max_carry steps after the delta's step.  So a delta that no commit lists is
deleted only below d, with the rest of its step.  The readers of a delta that commit t
lists are the replicas that have not taken step t.  A replica that takes part reads the other bodies, and has its own in
memory.  Every other replica reads the announced mean; so does a replica that finds a body deleted.  Before s, a delta
is needed only if the mean and snapshot s are both damaged.  From s on, the delta is kept to repair the mean.

The budget (keeping/budget.py) decides which deletable blobs are deleted; a budget of 0 keeps none of these blobs.

Registers (write-once records) are never deleted, because a replica that was suspended could write a deleted register
again. So the collector considers only names to which a register may point.  A blob without a register (its writer was
killed) is deleted with the rest of its step.

A reader that is slower than two snapshots does not find the blob that a register names.  `refuse_collected` then raises
`Collected`.  A joining replica tries again from the newer snapshot (`look_again`).  A replica that was stalled during a
step ends, and the slot's next generation heals.

Any number of collectors may run, and be killed, at any time: all delete the same keys, in ascending order.

Not promised: that all old blobs are deleted.  LIST is a hint, and a writer that was suspended may still upload.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, TypeVar

from rendezvous import layout
from rendezvous.agreement.rules import Rules
from rendezvous.background import Emit
from rendezvous.errors import StoreError, StoreRefused, Terminal
from rendezvous.keeping.budget import LATE, Kept, Sizes, Window, choose_kept, largest_window, parts_of, sizes_of
from rendezvous.records.records import Commit, Mean, Snapshot, decode_or_none
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store

T = TypeVar("T")
_TOLD = 64  # a log event names at most so many older snapshots
_LAST_SWEEP = 1024  # the limit of steps that a run's last sweep reads or collects, with 1–2 requests each
_BACK = 16  # earlier commits that are read at a time, each by a request


class Collected(Terminal):
    """An object that this replica needs was deleted: it must start again from snapshot `newer`."""

    def __init__(self, message: str, newer: int) -> None:
        super().__init__(message)
        self.newer = newer


# ---------------------------------------------------------------------- deletable blobs


def blobs_before(keys: Iterable[str], kind: str, below: int) -> list[str]:
    """Select the blobs of steps before `below`.   kind: "delta", "mean" or "snapshot"."""
    return [key for key in keys if (blob := parse_blob_key(key)) is not None and blob[0] == kind and blob[1] < below]


def parse_blob_key(key: str) -> tuple[str, int] | None:
    """Return ("delta" | "mean" | "snapshot", step) of a blob's key; None for registers and for unknown keys."""
    found = layout.BLOB.fullmatch(key)
    return (found[2] or "snapshot", int(found[1] or found[3])) if found and layout.is_plain(key) else None


def can_heal_from(store: Store, snapshot: Snapshot) -> bool:
    """Whether the snapshot is confirmed and its blob exists, judged by the blob's last byte."""
    return snapshot.confirmed and (not snapshot.blob or blob_stands(store, snapshot.blob, snapshot.size))


def blob_stands(store: Store, key: str, size: int) -> bool:
    """Whether the blob exists with at least `size` bytes: its last byte is read."""
    return store.get_into(key, memoryview(bytearray(1)), max(0, size - 1))


def two_newest(store: Store, hint: int = 0, at_least: int = 0) -> tuple[int, Snapshot | None]:
    """Return the step of the second-newest complete snapshot (at least `at_least`), and the newest snapshot.

    at_least: an earlier floor; older snapshots are ignored.   hint: a step that may have a snapshot.
    The newest is None if no complete snapshot is newer than `at_least`.
    """
    newest = None
    for snapshot in snapshots.newest_first(store, hint):
        if snapshot.t <= at_least:
            break
        if can_heal_from(store, snapshot):
            if newest is not None:
                return snapshot.t, newest
            newest = snapshot
    return at_least, newest


def announced_stands(store: Store, commit: Commit) -> bool:
    """Whether all parts of the mean are announced and their blobs exist."""
    parts = parts_of(commit)
    return bool(parts) and all(_part_stands(store, commit.t, j) for j in parts)


def may_be_collected(store: Store, commit: Commit, hint: int) -> bool:
    """Whether a collector may have deleted the bodies that `commit` lists.

    This is possible if the commit's mean is announced and a replica can heal from a newer snapshot.
    hint: a step that may have a snapshot.
    """
    if not announced_stands(store, commit):
        return False
    newer = takewhile(lambda snapshot: snapshot.t > commit.t, snapshots.newest_first(store, hint))
    return any(can_heal_from(store, snapshot) for snapshot in newer)


def _part_stands(store: Store, t: int, j: int) -> bool:
    record = decode_or_none(Mean, store.get(layout.mean_key(t, j)))
    return record is not None and record.t == t and blob_stands(store, record.blob, record.size)


# ---------------------------------------------------------------------- the loop


@dataclass(eq=False, repr=False)
class Collector:
    """One replica's collector.  A bisection finds the step at which this or another collector stopped.

    budget: bytes of old blobs that are kept.   elements(fragment): number of elements in the fragment's flat vector.
    store: a store without retries; a failed deletion is tried again at the next call.
    emit(event, **fields): called for events that people read.
    """

    store: Store
    rules: Rules
    emit: Emit
    budget: int = 0
    elements: Callable[[int], int] = lambda fragment: 0
    floor: int = 0

    def __post_init__(self) -> None:
        self._window = Window(0, 0, 0, 0, 1)
        self._snapshots: list[str] = []  # keys, as they were listed when the floor was found
        self._steps: list[int] = []  # steps of the manifests among these keys
        self._blobs: dict[int, str] = {}  # step -> blob that its manifest names, for manifests that were read
        self._heard = 0  # the newest snapshot that any call of `sweep` was given
        self._news: deque[tuple[int, Sizes]] = deque()  # (step, sizes) of new commits, from another thread
        self._known: dict[int, Sizes] = {}
        self._most = 0  # bytes of the largest known step
        self._head = 0  # the step after the newest commit that was noted
        self._next: dict[str, int] = {}  # kind -> the step before which no blobs of this kind were found
        self._thinned = (0, frozenset[int]())  # the floor and the kept older snapshots of the last call
        self._replaced = set[int]()  # steps in the window whose listed bodies were deleted
        self._unannounced = set[int]()  # steps in the window whose mean was not announced when it was checked
        self._warned = set[str]()  # kinds of warnings that were given

    def note_commit(self, commit: Commit) -> None:
        """Note a commit that was read, without a request. Any thread may call this."""
        self._news.append((commit.t, self._sizes_of(commit)))

    def sweep(self, snapshot: int, at_most: int = 256) -> int:
        """Delete blobs of at most `at_most` steps.   Return the number of deleted blobs.

        snapshot: step of the newest known snapshot.   No request is made while no blob may go.
        """
        try:
            self._renew_floor(snapshot)
            answer = self._choose_kept(at_most)
            gone = 0 if answer is None else self._delete_beyond(answer, at_most)
        except StoreError as error:
            self.emit("garbage_stays", trouble=str(error))
            if isinstance(error, StoreRefused):
                self._warn_once("refused", error)
            return 0
        if gone:
            self.emit("collected", blobs=gone, below=self.floor, **_kept_fields(answer, self.floor))
        return gone

    def _renew_floor(self, snapshot: int) -> None:
        if snapshot <= self._heard:
            return
        self.floor, newest = two_newest(self.store, snapshot, self.floor)
        if newest is not None and newest.t > self._window.newest:
            self._snapshots = self.store.list(layout.SNAPSHOTS)
            self._steps = snapshots.steps_of(self._snapshots)
            carry = self.rules.fragments * self.rules.max_carry
            self._window = Window(self.floor, newest.t, carry, newest.size, self.rules.snapshot_every)
            self._unannounced.clear()
            self._replaced = {t for t in self._replaced if t >= self._window.first_listable}
        self._heard = snapshot

    # ------------------------------------------------------------------ how much stays

    def _choose_kept(self, at_most: int) -> Kept | None:
        """Return the blobs to keep; None if all blobs stay, or if too few commits are known."""
        self._learn_sizes()
        if not self._window.newest:
            return None
        older = self._steps[: bisect_left(self._steps, self.floor)]
        ask = lambda: choose_kept(  # noqa: E731
            self.budget, self._head, self._known, self._window, older, most=self._most
        )
        answer = ask()
        first = min(self._known, default=self._head)
        for start in range(first, max(0, first - at_most), -_BACK):
            if answer is not None:
                break
            self._read_back(range(max(0, start - _BACK), start))
            answer = ask()
        if answer is not None and answer.over and self.budget:
            self._warn_of_excess(answer.over)
        return answer

    def _warn_of_excess(self, over: int) -> None:
        """Warn once that the window exceeds the budget, unless a snapshot that is being written may make it fit."""
        newest = self._known.get(self._head - 1, Sizes(0, 0))
        floor = largest_window(1, self._window.snapshot, newest)
        on_their_way = self._window.snapshot + LATE * (newest.deltas + newest.mean)
        if self.budget < floor or over > on_their_way:
            self._warn_once("excess", over, self.budget, floor)

    def _warn_once(self, name: str, *facts: Any) -> None:
        from rendezvous.keeping.words import warn_once

        warn_once(self._warned, self.emit, self._head, name, *facts)

    def _learn_sizes(self) -> None:
        while self._news:
            t, sizes = self._news.popleft()
            if t > self._head:
                self._known.clear()  # there is a gap: this replica healed again, and skipped steps
            self._note_sizes(t, sizes)
            self._head = max(self._head, t + 1)

    def _read_back(self, steps: range) -> None:
        """Read earlier commits that this replica does not know, and note their sizes."""
        for t in reversed(steps):
            commit = decode_or_none(Commit, self.store.get(layout.commit_key(t)))
            self._note_sizes(t, Sizes(0, 0) if commit is None else self._sizes_of(commit))

    def _note_sizes(self, t: int, sizes: Sizes) -> None:
        self._known[t] = sizes
        self._most = max(self._most, sizes.deltas + sizes.mean)

    def _sizes_of(self, commit: Commit) -> Sizes:
        return sizes_of(commit, self.elements(commit.t % self.rules.fragments), self.rules)

    # ------------------------------------------------------------------ deleting

    def _delete_beyond(self, answer: Kept, at_most: int) -> int:
        gone = self._thin_snapshots(answer)
        gone += self._delete_steps("delta", min(answer.deltas_from, self._window.first_listable), at_most)
        gone += self._delete_steps("mean", answer.means_from, at_most)
        return gone + self._delete_listed(answer.deltas_from, at_most)

    def _delete_listed(self, end: int, at_most: int) -> int:
        """Delete the bodies that commits in the window before `end` list, if no reader needs them.

        If a step's mean is not announced yet, check it again when there is a newer snapshot."""
        known = self._replaced | self._unannounced
        due = [t for t in range(self._window.first_listable, end) if t not in known]
        return sum(self._delete_bodies(t) for t in due[:at_most])

    def _delete_bodies(self, t: int) -> int:
        """Delete the bodies that commit t names, without a LIST.   Return their number, also of those already gone."""
        commit = decode_or_none(Commit, self.store.get(layout.commit_key(t)))
        if commit is not None and t >= self.floor and not announced_stands(self.store, commit):
            self._unannounced.add(t)
            return 0
        self._replaced.add(t)
        return 0 if commit is None else self._delete_keys([o.blob for o in commit.offers])

    def _thin_snapshots(self, answer: Kept) -> int:
        """Delete the older snapshots that are not kept, and snapshot blobs that no manifest names."""
        if (now := (self.floor, answer.snapshots)) == self._thinned:
            return 0
        stay = {self._blob_of(t) for t in answer.snapshots}
        gone = self._delete_keys([k for k in blobs_before(self._snapshots, "snapshot", self.floor) if k not in stay])
        self._thinned = now
        return gone

    def _blob_of(self, t: int) -> str:
        """Return the blob that the manifest of step t names; "" if there is none."""
        if t not in self._blobs and (found := snapshots.read(self.store, t)) is not None:
            self._blobs[t] = found.blob
        return self._blobs.get(t, "")

    def _delete_steps(self, kind: str, end: int, at_most: int) -> int:
        if kind not in self._next and end:
            # bisection finds the first step with blobs, because collectors delete them in ascending order
            self._next[kind] = bisect_left(range(end), True, key=lambda t: bool(self._old_blobs(t, kind, end)))
        at = self._next.get(kind, 0)
        gone = 0
        for t in range(at, min(end, at + at_most)):
            gone += self._delete_keys(self._old_blobs(t, kind, end))
            self._next[kind] = t + 1
        return gone

    def _old_blobs(self, t: int, kind: str, end: int) -> list[str]:
        return blobs_before(self.store.list(f"{layout.commit_key(t).rpartition('/')[0]}/{kind}/"), kind, end)

    def _delete_keys(self, keys: list[str]) -> int:
        if keys:
            self.store.delete(keys)
        return len(keys)


def sweep_ended_run(
    store: Store,
    rules: Rules,
    emit: Emit,
    *,
    steps: int,
    budget: int,
    elements: Sequence[int],
    at_most: int = _LAST_SWEEP,
) -> int:
    """Collect once more after all `steps` are committed.   Return the number of blobs, including those already gone.

    Call it after all replicas have ended: if the last replica was killed before it collected, no other replica did.
    elements: number in each fragment.   at_most: the largest number of steps that are read.
    Delete nothing if the last commit cannot be read.
    """
    collector = Collector(store, rules, emit, budget, lambda fragment: elements[fragment])
    last = decode_or_none(Commit, store.get(layout.commit_key(steps - 1)))
    if last is None:
        return 0
    collector.note_commit(last)
    return collector.sweep(steps, at_most=at_most)


def _kept_fields(answer: Kept | None, floor: int) -> dict[str, Any]:
    """Return the fields of the event `collected` for the kept blobs; diloco/runlog/summary.py has their text."""
    if answer is None:
        return {}
    stay = sorted({*answer.snapshots, floor})[-_TOLD:]
    return {"deltas_from": answer.deltas_from, "means_from": answer.means_from, "snapshots": stay}


# ---------------------------------------------------------------------- the reader's side


def look_again(heal: Callable[[], T], emit: Emit) -> T:
    """Return heal()'s result; call it again while each Collected names a newer snapshot than the Collected before."""
    newest = -1
    while True:
        try:
            return heal()
        except Collected as gone:
            if gone.newer <= newest:
                raise  # that snapshot is damaged: no replica can heal before the next snapshot is written
            newest = gone.newer
            emit("looks_again", snapshot=newest)
