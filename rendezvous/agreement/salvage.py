"""Functions to read and to end a run whose control records were lost.

    control/000000 gone, or no record ─┬─▶ no replica joins, no other record is written   (membership.py: RecordsLost)
                                       ├─▶ `read_standing_control`  desired state by the records left; all claimed slots
                                       └─▶ `write_stop`            a stop, under a number that living replicas will read

A stop needs neither the lost quorum nor the lost budget, and the person who pays for a fleet must always be able to end
it.  Running replicas have read the first records at their start; now they only look for the next number.

Not promised: that `read_standing_control` knows all rented machines; a record that named their places may be lost.
Not promised either: that replicas read the stop if the newest record has vanished: they look for the next number.
"""

from contextlib import suppress
from dataclasses import replace

from rendezvous import layout
from rendezvous.agreement.membership import Wanted, controls_above, read_control, refuse_lost, write_control
from rendezvous.clock import Clock
from rendezvous.errors import Forged, RecordsLost
from rendezvous.records.records import Control, new_nonce
from rendezvous.store import Readable, Store, put_once


def read_standing_control(store: Readable) -> tuple[Wanted, str]:
    """Return the desired state, and a text that describes a loss of control records, "" if there is none.

    After a loss, the desired state comes only from the records that are left.
    """
    try:
        wanted = read_control(store)
        refuse_lost(store, wanted)
    except (RecordsLost, Forged) as lost:
        return _what_stands(store), str(lost)
    return wanted, ""


def _what_stands(store: Readable) -> Wanted:
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


def write_stop(store: Store, clock: Clock) -> str:
    """Ask every replica to leave, even if records were lost.   Return a text that describes the loss, "" for none."""
    try:
        write_control(store, clock, stop=True)
    except (RecordsLost, Forged) as lost:
        won, n = False, _what_stands(store).records  # never 0: that number is for the run's first record
        while not won:
            record = Control(n, new_nonce(), clock.wall(), stop=True)
            won, _ = put_once(store, clock, layout.control_key(n), record.encode())
            n += 1
        return str(lost)
    return ""
