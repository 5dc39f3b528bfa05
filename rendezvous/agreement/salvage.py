"""Reads a run whose control records were lost: control/000000 is gone, or is no record.

No replica joins such a run, and no other record is written (membership.py: RecordsLost), except a stop (stop.py).

Not promised: that `read_standing_control` knows all rented machines; a record that named their places may be lost.
"""

from rendezvous.agreement.membership import Wanted, read_control, refuse_lost
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
        from rendezvous.agreement.lost_records import standing_state

        return standing_state(store), str(lost)
    return wanted, ""
