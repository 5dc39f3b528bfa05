"""A blob is missing: did a collector (garbage.py) delete it, so that this replica must heal from a newer snapshot?

Not promised: an answer that stays true; collectors go on.
"""

from rendezvous import layout
from rendezvous.agreement.chain import decode_commit
from rendezvous.keeping.garbage import Collected, can_heal_from
from rendezvous.snapshots import record as snapshots
from rendezvous.store import Store


def refuse_collected(store: Store, t: int) -> None:
    """Raise Collected if there is a complete snapshot after step t.   t: a step with a missing or damaged blob.

    A snapshot may be collected during the search, but only after a newer snapshot was written; so the search is
    repeated until it finds no newer snapshot.
    """
    seen = t
    while (newest := _newest_unless_refused(store, t)) > seen:
        seen = newest


def _newest_unless_refused(store: Store, t: int) -> int:
    """Return the step of the newest snapshot, complete or not; else t.  Raise as `refuse_collected`."""
    newest = t
    for snapshot in snapshots.newest_first(store, _newest_that_commits_name(store, t)):
        if snapshot.t <= t:
            break
        if can_heal_from(store, snapshot):
            raise Collected(
                f"step {t} cannot be read any more (its blobs were collected, or lost); snapshot {snapshot.t} exists. "
                "This replica ends; its slot's next generation heals from there",
                snapshot.t,
            )
        newest = max(newest, snapshot.t)
    return newest


def _newest_that_commits_name(store: Store, t: int) -> int:
    """Return the newest snapshot that a commit from t on names.  Commits are read by GET; LIST may be out of date."""
    newest = 0
    while (body := store.get(layout.commit_key(t))) is not None:
        newest = max(newest, decode_commit(store.url, t, body).snapshot)
        t += 1
    return newest
