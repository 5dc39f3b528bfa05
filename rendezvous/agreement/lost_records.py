"""Control records were lost: the facts that claims, commits and the remaining records tell.

Not promised: that a loss is noticed; a lost record may have changed nothing that is left.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from rendezvous import layout
from rendezvous.agreement.membership import RESTORE, Wanted, controls_above, read_control
from rendezvous.errors import Forged, RecordsLost
from rendezvous.records.records import Commit
from rendezvous.store import Readable


def standing_state(store: Readable) -> Wanted:
    """Return the desired state by the records that are left, with all claimed slots."""
    wanted = Wanted()
    with suppress(RecordsLost, Forged):
        wanted = read_control(store)  # up to the first missing record
    for control in controls_above(store, wanted.records):
        wanted = wanted.with_control(control)
    claimed = [slot for key in store.list(layout.CLAIMS) if (slot := layout.claimed_slot(key)) is not None]
    most = {kind: max((1 + int(name[1:]) for name in claimed if name[0] == kind), default=0) for kind in "ra"}
    return replace(
        wanted,
        universe=max(most["r"], wanted.universe),
        most_actors=max(most["a"], wanted.most_actors),
        records=max(1, wanted.records),
    )


def refuse_lower_quorum(store: Readable, wanted: Wanted, commits: Iterable[Commit]) -> None:
    """Raise RecordsLost if a commit has a higher quorum than every control record that is left.

    A closer follows every control record that is durable before its commit, so the record with this quorum was lost.
    """
    known = max(wanted.highest_quorum, wanted.min_replicas)
    for commit in commits:
        if commit.m > known:
            raise RecordsLost(
                f"commit {commit.t} needed min_replicas = {commit.m}; of the {wanted.records} control records under "
                f"{store.url}/{layout.CONTROLS} no record asks for more: one was overwritten or has vanished. "
                f"Without it the run has another quorum, so no replica joins or closes a step. {RESTORE}"
            )
