"""The blobs that a run keeps by its budget of bytes, and the plan of the next snapshot.

    snapshots   ●               ●               ●       ●   ●   ●       ages of about powers of two
    means                                   ├───────────────────▶       as far back as the budget allows: means_from
    deltas                                          ├───────────▶       with the remaining bytes: deltas_from
                                                        ├───┼───▶       the window: kept under any budget
                                                        f   s   head    the two newest complete snapshots

The budget is used in this order: window, older snapshots, means, deltas.  So the deltas are deleted first (the oldest
first), then the means, and then some of the older snapshots.
In the window, a step from f to s whose mean is announced keeps only its mean: its deltas would be needed only if both
that mean and snapshot s were damaged.  From s on, deltas are kept to repair a damaged mean.

The result is a pure function of records that are never deleted (commits, manifests), so all collectors get the same
result at any time.  A later result never needs blobs that an earlier result has given up, because ages only grow.

The size of the window follows the budget: `snapshot_period` chooses the steps to the next snapshot so that the largest
window fits.  `largest_window` with one step between snapshots is the floor; a run exceeds a smaller budget (decision
033).

SnapshotPace plans a snapshot every snapshot_every steps, or sooner if the budget requires it:

    the budget has room for snapshot_every steps   ●─────────────●─────────────●     every snapshot_every steps
    it has room for p < snapshot_every of them     ●──p──●──p──●──p──●──p──●         p: snapshot_period
    it has room for less than one step             ●─●─●─●─●─●─●─●─●─●─●─●─●─●       at every step

    planned ●  the closer begins ─▶ the next commit confirms it ─▶ visible     planned + RETRY: a closer looks for it,
                                                                               and begins one itself if it is missing

Every replica computes p from the commits that it applies, so all plan the same steps without communication.  The closer
of the step before writes the snapshot.  Only the writer knows that it has begun; the other replicas assume so until
RETRY steps have passed.  If two replicas plan different steps (one has just joined), both snapshots are written.  Each
has its own step and manifest, so this costs only bytes.

Not promised: the budget, if the upload of a snapshot takes longer than a round of training.  Not promised: exact bytes;
the budget counts only bodies that a commit lists.  A body without an offer (its replica was killed), or with an expired
offer, is deleted with its step.  A snapshot's blob without a manifest (its writer was killed, or another writer came
first) is deleted when two snapshots are newer.  Until then, several such blobs may exceed the 5 %.  If steps are faster
than deletions, deletions come later.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import ceil

from rendezvous.agreement.rules import Rules
from rendezvous.records.records import Commit

_SHARE = 0.95  # planned part of the budget; the rest is for deltas that no commit lists (of killed writers)
LATE = 3  # number of steps: the step that was just decided, and two steps that may follow while blobs are deleted
COMPLETE = 3  # number of snapshots: the two newest snapshots, and one that is being written
FULL_ENOUGH = 4  # we read no old commits for the exact size if the budget is this many times the estimated size
RETRY = 2  # in steps: one to write a snapshot, and one for its manifest


@dataclass(frozen=True)
class Sizes:
    """Bytes that one outer step leaves in the bucket: the listed deltas, and the mean if it is announced."""

    deltas: int
    mean: int


def sizes_of(commit: Commit, elements: int, rules: Rules) -> Sizes:
    """Return the bytes that a committed step leaves in the bucket.

    elements: number in its fragment; 0 if unknown: then we take the mean to be as large as the largest body.
    """
    bodies = [o.size for o in commit.offers]
    if commit.mode == "sharded":
        return Sizes(sum(bodies), max(bodies, default=0))
    mean = 4 * elements or max(bodies, default=0)
    return Sizes(sum(bodies), mean if is_mean_announced(sum(bodies), mean, rules) else 0)


def parts_of(commit: Commit) -> list[int]:
    """Return the numbers of the parts in which the commit's mean may be announced: only parts with at least one shard.

    The parts are those of `means.parts.MeanParts.split`.
    """
    if commit.mode != "sharded":
        return [0]
    shards = max(len(o.shards) for o in commit.offers)
    owners = len(commit.owners)
    cuts = [round(j * shards / owners) for j in range(owners + 1)]
    return [j for j in range(owners) if cuts[j] < cuts[j + 1]]


def is_mean_announced(bodies: int, mean: int, rules: Rules) -> bool:
    """Whether the closer of a direct step announces the mean.   bodies, mean: bytes."""
    return rules.announce and 2 * mean <= bodies


@dataclass(frozen=True)
class Window:
    """The steps that are kept under any budget, because a reader may need them.

    floor, newest: steps of the two newest complete snapshots.   carry: steps for which a late delta may be listed.
    snapshot: bytes of a snapshot.   every: steps from one snapshot to the next.
    """

    floor: int
    newest: int
    carry: int
    snapshot: int
    every: int

    @property
    def first_listable(self) -> int:
        """The first step whose deltas a commit in the window may list."""
        return max(0, self.floor - self.carry)

    def bytes_needed(self, t: int, step: Sizes) -> int:
        """Return the bytes of committed step t that are kept under any budget."""
        if t < self.floor:
            return 0
        return step.mean + (step.deltas if t >= self.newest or not step.mean else 0)


def snapshot_period(budget: int, every: int, snapshot: int, step: Sizes) -> int:
    """Return the number of outer steps between two snapshots with which the window fits into the budget.

    snapshot: bytes of a snapshot.   step: bytes that each step leaves.
    The number is at least 1, even if nothing fits, and at most `every`. Without a budget it is `every`.
    """
    each = _each_in_window(step)
    if not budget or not each:
        return every
    return max(1, min(every, int((_SHARE * budget - _beside(snapshot, step)) // each)))


def largest_window(period: int, snapshot: int, step: Sizes) -> int:
    """Return the smallest budget in bytes into which the window fits, with a snapshot every `period` steps."""
    return ceil((_beside(snapshot, step) + period * _each_in_window(step)) / _SHARE)


def _beside(snapshot: int, step: Sizes) -> int:
    """Return the bytes of the window that do not depend on the steps between snapshots."""
    return COMPLETE * snapshot + LATE * (step.deltas + step.mean)


def _each_in_window(step: Sizes) -> int:
    """Return the bytes that each step between two snapshots adds to the largest window.

    A mean stays for two periods.  Deltas stay for one period if their mean is announced, else for two periods.
    """
    return 2 * step.mean + step.deltas if step.mean else 2 * step.deltas


@dataclass(frozen=True)
class Kept:
    """The blobs to keep.

    snapshots: steps of the kept snapshots below the floor.   means_from, deltas_from: the first steps with such blobs.
    over: bytes by which the window alone exceeds the budget; 0 if it does not.
    A step in the window whose mean is not announced keeps its deltas.
    """

    snapshots: frozenset[int]
    means_from: int
    deltas_from: int
    over: int = 0


def choose_kept(
    budget: int,
    head: int,
    known: Mapping[int, Sizes],
    window: Window,
    older: Collection[int],
    *,
    most: int | None = None,
) -> Kept | None:
    """Return the blobs to keep of the steps below `head`; None if more commits must be read first.

    known: sizes of the newest steps without a gap, not necessarily of all steps.   older: steps of snapshots below the
    floor. most: bytes of the largest known step; None: computed here.
    Room is left for a snapshot that is being written, for LATE steps, and 5 % for bodies that no commit lists.
    """
    newest = known.get(head - 1, Sizes(0, 0))
    room = _SHARE * budget - _beside(window.snapshot, newest)
    for t in range(head - 1, window.floor - 1, -1):
        if t not in known and room >= 0:
            return None
        if t not in known:
            break
        room -= window.bytes_needed(t, known[t])
    if room < 0:
        return Kept(frozenset(), window.floor, window.newest, over=int(-room))
    if not known:
        return None
    most = max(one.deltas + one.mean for one in known.values()) if most is None else most
    if FULL_ENOUGH * (head * most + len(older) * window.snapshot) <= room:
        return Kept(frozenset(older), 0, 0)
    from rendezvous.keeping.thinning import thin_snapshots

    snapshots = thin_snapshots(older, window.floor, window.every, int(room // max(1, window.snapshot)))
    room -= len(snapshots) * window.snapshot
    means_from, room = _reach_back(window.floor, room, {t: one.mean for t, one in known.items()})
    if means_from and means_from - 1 not in known:
        return None
    bodies = {t: one.deltas + one.mean * (t >= window.floor) - window.bytes_needed(t, one) for t, one in known.items()}
    deltas_from, _ = _reach_back(window.newest, room, bodies)
    if deltas_from and deltas_from - 1 not in known:
        return None
    return Kept(frozenset(snapshots), means_from, deltas_from)


def _reach_back(end: int, room: float, sizes: Mapping[int, int]) -> tuple[int, float]:
    """Return the first step from which on all steps below `end` fit into `room`, and the remaining room."""
    while end and (size := sizes.get(end - 1, room + 1)) <= room:
        end = end - 1
        room = room - size
    return end, room


# ---------------------------------------------------------------------- when the next snapshot is due


class SnapshotPace:
    """One replica's plan of snapshots.   every: the rules' snapshot_every.   budget: bytes; 0: `every` alone decides.

    planned: the newest step for which a snapshot was due.   period: steps from one snapshot to the next.
    """

    def __init__(self, every: int, budget: int) -> None:
        self._every = every
        self._budget = budget
        self.planned = 0
        self.period = every
        self._largest = Sizes(0, 0)  # the largest sizes of a step since the planned one

    def take_step(self, t: int, step: Sizes, *, snapshot: int, newest: int) -> None:
        """Note that commit t was applied.

        step: bytes that it left in the bucket.   snapshot: bytes of a snapshot.   newest: step of the newest known one.
        """
        if newest > self.planned:
            self._plan(newest)
        self._largest = Sizes(max(self._largest.deltas, step.deltas), max(self._largest.mean, step.mean))
        self.period = snapshot_period(self._budget, self._every, snapshot, self._largest)
        if self._is_period_over(t + 1):
            self._plan(t + 1)

    def _is_period_over(self, t: int) -> bool:
        """Whether a snapshot is due at step t.

        If the period is `every`, snapshots are due at its multiples, so that one late snapshot does not delay the next.
        """
        if self.period < self._every:
            return t - self.planned >= self.period
        return t // self._every > self.planned // self._every

    def _plan(self, t: int) -> None:
        self.planned = t
        self._largest = Sizes(0, 0)

    def is_due(self, t: int, newest: int, *, closed: bool, owes: bool, stands: Callable[[int], bool]) -> bool:
        """Whether this replica must write θ_t.

        newest: step of the newest known snapshot.   closed: this replica wrote commit t − 1.   owes: whether this
        replica gave up the last snapshot that it began.   stands(step): whether that snapshot exists (a request).

        If there was no snapshot for 2·every steps, every replica writes one.
        """
        if t - newest >= 2 * self._every:
            return True
        if newest >= self.planned:
            return False
        is_missing = closed and t - self.planned >= RETRY and not stands(self.planned)
        return owes or is_missing or (closed and t == self.planned)
