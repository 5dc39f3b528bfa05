"""Reads a run whose control records were lost: control/000000 is gone, or is no record.

No replica joins such a run, and no other record is written (membership.py: RecordsLost), but for a stop (stop.py).

Not promised: that `read_standing_control` knows all rented machines; a record that named their places may be lost.
"""

from contextlib import suppress
from dataclasses import replace

from rendezvous import layout
from rendezvous.agreement.membership import Wanted, controls_above, read_control, refuse_lost
from rendezvous.errors import Forged, RecordsLost
from rendezvous.store import Readable


def read_standing_control(store: Readable) -> tuple[Wanted, str]:
    """Return the desired state, and a text that describes a loss of control records, "" if there is none.

    After a loss, the desired state comes only from the records that are left.
    """
    try:
        wanted = read_control(store)
        refuse_lost(store, wanted)
    except (RecordsLost, Forged) as lost:
        return standing_state(store), str(lost)
    return wanted, ""


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
