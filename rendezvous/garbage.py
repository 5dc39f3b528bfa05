"""Retention "window": blobs that no reader needs any more, and never anything else.

    complete snapshots   …      ●          ●          ●         manifest and blob are there, digest confirmed
                                           f          └ newest  if it is damaged, f still heals
    step                 …    d−1 │ d  …  f−1 │ f … head        d = f − F·max_carry
      delta/*.bin            gone │    kept   │  kept           commit f may list a delta of step d, none before
      mean/*.bin             gone │    gone   │  kept           a replay starts at f or later
      *.safetensors          gone │    gone   │  kept           θ_0's too; all manifests stay

Registers are never deleted: a deleted one could be won again by a replica that slept.  So only names that a
register may point to are ever considered, and what nobody points to (the blob of a writer that was killed before
its register) goes with the rest of its step.

A reader that was slower than two snapshots finds nothing where a register points.  `refuse_collected` turns that
into `Collected`: a joiner looks again from the newer snapshot (`look_again`), a replica that stalled in the
middle of its life ends it, and its next one heals.

Any number of collectors may run, and die, at any moment: all of them delete the same keys, in ascending order.

Not promised: that nothing old is left.  LIST is a hint, and a writer that slept may upload once more.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

from rendezvous import layout, snapshots
from rendezvous.errors import StoreError, Terminal
from rendezvous.records import Commit, Snapshot
from rendezvous.rules import Rules
from rendezvous.store import Store

T = TypeVar("T")


class Collected(Terminal):
    """What this replica needs is below the floor: it has to start again from snapshot `newer`."""

    def __init__(self, message: str, newer: int) -> None:
        super().__init__(message)
        self.newer = newer


# ---------------------------------------------------------------------- what goes


def doomed(keys: Iterable[str], floor: int, rules: Rules) -> list[str]:
    """Those of `keys` that nobody needs who starts at snapshot `floor` or later."""
    carry = rules.fragments * rules.max_carry
    ends = {"delta": floor - carry, "mean": floor, "snapshot": floor}
    return [key for key in keys if (blob := _blob(key)) is not None and blob[1] < ends[blob[0]]]


def _blob(key: str) -> tuple[str, int] | None:
    """("delta" | "mean" | "snapshot", step) of a blob's key; None for registers and all that is not known here."""
    parts = key.split("/")
    if len(parts) < 3 or not parts[1].isdecimal():
        return None
    step = int(parts[1])
    for kind, some in (
        ("delta", layout.delta(step, "", 0, "")),
        ("mean", layout.mean_blob(step, "")),
        ("snapshot", layout.snapshot_blob(step, "")),
    ):
        folder, _, name = some.rpartition("/")
        if "/".join(parts[:-1]) == folder and parts[-1].endswith(name[name.index(".") :]):
            return kind, step
    return None


def complete(store: Store, snapshot: Snapshot) -> bool:
    """Can a replica heal from it, as far as one byte tells?  (The last one: a shorter blob is not complete.)"""
    last = memoryview(bytearray(1))
    return snapshot.confirmed and store.get_into(snapshot.blob, last, max(0, snapshot.size - 1))


def floor(store: Store, hint: int = 0, at_least: int = 0) -> int:
    """Step of the second-newest complete snapshot.   hint: a step that may have one.   at_least: an earlier floor."""
    newest = None
    for snapshot in snapshots.newest_first(store, hint):
        if snapshot.t <= at_least:
            break
        if complete(store, snapshot):
            if newest is not None:
                return snapshot.t
            newest = snapshot
    return at_least


def kept_from(store: Store) -> int:
    """The first step that can still be exported: that of the oldest complete snapshot."""
    first = snapshots.read(store, 0)
    if first is not None and complete(store, first):
        return 0
    oldest = 0
    for snapshot in snapshots.newest_first(store):
        if oldest and not complete(store, snapshot):
            break
        oldest = snapshot.t or oldest
    return oldest


# ---------------------------------------------------------------------- the loop


class Collector:
    """One replica's broom.  Where it, or another one, stopped it finds by bisection.

    store: asked without patience, since nothing depends on an answer; what fails is tried again at the next call.
    tell(event, **fields): where remarks for people go.
    """

    def __init__(self, store: Store, rules: Rules, tell: Callable[..., None]) -> None:
        self._store, self._rules, self._tell = store, rules, tell
        self.floor = 0  # blobs of older snapshots are gone
        self._next = 0  # every step before this one was seen without blobs
        self._heard = 0  # the newest snapshot that anybody told us of

    def sweep(self, snapshot: int, at_most: int = 256) -> int:
        """Collect, `at_most` steps in this call; -> how many blobs went.

        snapshot: step of the newest known.  Nothing is asked of the store until that changes or work is left.
        """
        if snapshot <= self._heard and not self._left:
            return 0
        try:
            gone = self._snapshots(snapshot) + self._steps(at_most)
        except StoreError as error:
            self._tell("garbage_stays", trouble=str(error))
            return 0
        self._heard = max(self._heard, snapshot)
        if gone:
            self._tell("collected", blobs=gone, below=self.floor)
        return gone

    @property
    def _left(self) -> bool:
        return self._next < self._end

    @property
    def _end(self) -> int:
        """Steps below this have no blob left after a full sweep."""
        return max(0, self.floor - self._rules.fragments * self._rules.max_carry)

    def _snapshots(self, hint: int) -> int:
        found = floor(self._store, hint, self.floor)
        gone = self._delete(layout.SNAPSHOTS, found) if found > self.floor else 0
        self.floor = found
        return gone

    def _steps(self, at_most: int) -> int:
        if not self._left:
            return 0
        at, gone = self._first_dirty(), 0
        for t in range(at, min(self.floor, at + at_most)):
            gone += self._delete(_folder(t), self.floor)
            self._next = min(t + 1, self._end)  # from there on deltas stay; the next floor comes back for them
        return gone

    def _first_dirty(self) -> int:
        """The first step below `_end` that has blobs.  Each had one, and they go in ascending order."""
        low, high = self._next, self._end
        while low < high:
            middle = (low + high) // 2
            if doomed(self._store.list(_folder(middle)), self.floor, self._rules):
                high = middle
            else:
                low = middle + 1
        return low

    def _delete(self, prefix: str, below: int) -> int:
        keys = doomed(self._store.list(prefix), below, self._rules)
        if keys:
            self._store.delete(keys)
        return len(keys)


def _folder(t: int) -> str:
    return layout.commit(t).rpartition("/")[0] + "/"


# ---------------------------------------------------------------------- the reader's side


def refuse_collected(store: Store, t: int) -> None:
    """Something of step t is missing or damaged: raises Collected if there is a complete snapshot after it.

    What is collected while we look has a newer one in its place, so it looks until it finds none.
    """
    seen = t
    while (newest := _newest_unless_refused(store, t)) > seen:
        seen = newest


def _newest_unless_refused(store: Store, t: int) -> int:
    """-> step of the newest snapshot, be it incomplete; t if none is newer."""
    newest = t
    for snapshot in snapshots.newest_first(store, _hint(store, t)):
        if snapshot.t <= t:
            break
        if complete(store, snapshot):
            raise Collected(
                f"step {t} cannot be read any more (its blobs were collected, or lost), but snapshot {snapshot.t} can. "
                "This life ends; the next heals from there",
                snapshot.t,
            )
        newest = max(newest, snapshot.t)
    return newest


def _hint(store: Store, t: int) -> int:
    """The newest snapshot that the commits from t on know of, by GETs: a LIST may lag."""
    newest = 0
    while (body := store.get(layout.commit(t))) is not None:
        newest = max(newest, Commit.decode(body).snapshot)
        t += 1
    return newest


def look_again(heal: Callable[[], T], tell: Callable[..., None]) -> T:
    """heal(), and again for as long as each Collected names a newer snapshot than the one before."""
    newest = -1
    while True:
        try:
            return heal()
        except Collected as gone:
            if gone.newer <= newest:
                raise  # that one is damaged: there is nothing to heal from until the next is written
            newest = gone.newer
            tell("looks_again", snapshot=newest)
