"""The steps whose θ can still be computed after collectors (rendezvous/keeping/garbage.py) have deleted blobs.

    snapshots   8      16              32       40  ●  50
    means and deltas                         ├──────────────▶ head
                                            from
    θ_t can be computed        for t = 8, 16 and 32, from the snapshot alone
                               for t ≥ 40, from snapshot 40 and the means after it

These steps are found by GETs, one LIST and a bisection, because collectors delete in ascending order.

Not promised: that an existing blob is intact; a reader compares its digest.  Not promised either: that every later mean
exists. If a step's closer was killed before it announced the mean, the mean is lost with the step's deltas, and θ can
be computed again only from the next snapshot on.
"""

from bisect import bisect_left
from dataclasses import dataclass

from rendezvous import layout
from rendezvous.agreement.chain import decode_commit, first_open_step
from rendezvous.keeping.garbage import announced_stands, blob_stands
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store


@dataclass(frozen=True)
class Reach:
    """The computable steps: all steps from `since` on, and the steps `before` it that have a snapshot."""

    since: int
    before: tuple[int, ...] = ()

    def covers_step(self, step: int) -> bool:
        return step >= self.since or step in self.before

    def in_words(self) -> str:
        """Return "reaches back to step 40, and every step that has a snapshot: 8, 16, 32"."""
        more = f", and every step that has a snapshot: {', '.join(map(str, self.before))}" if self.before else ""
        return f"reaches back to step {self.since}{more}"


def read_reach(store: Store) -> Reach:
    """Return the steps whose θ can still be computed from the bucket as it is now."""
    found = _readable_snapshots(store)
    if not found:
        return Reach(0)
    first = bisect_left(range(found[-1]), True, key=lambda t: mean_stands(store, t))  # from here on, all means exist
    since = min((t for t in found if t >= first), default=found[-1])
    return Reach(since, tuple(t for t in found if t < since))


def newest_head(store: Store) -> int:
    """Return the first step without a commit, counted from the newest snapshot: all commits before it exist."""
    steps = (s.t for s in snapshots.newest_first(store))
    return first_open_step(store, next((t for t in steps if t and store.get(layout.commit_key(t - 1))), 0))


def _readable_snapshots(store: Store) -> list[int]:
    """Return the steps of the readable snapshots, in order, as a LIST names them.

    A snapshot that LIST names may be gone, so each snapshot is checked.
    """
    keys = store.list(layout.SNAPSHOTS)
    with_blob = {key.rpartition("/")[0] for key in keys if key.endswith(".safetensors")}
    steps = [t for t in snapshots.steps_of(keys) if t == 0 or layout.snapshot_key(t).rpartition("/")[0] in with_blob]
    found = ((t, snapshots.read(store, t)) for t in steps)
    return [t for t, s in found if s is not None and (not s.blob or blob_stands(store, s.blob, s.size))]


def mean_stands(store: Store, t: int) -> bool:
    """Whether the mean of a committed step is available: announced, or computable from the listed bodies."""
    body = store.get(layout.commit_key(t))
    if body is None:
        return False
    commit = decode_commit(store.url, t, body)
    return announced_stands(store, commit) or all(blob_stands(store, o.blob, o.size) for o in commit.offers)
