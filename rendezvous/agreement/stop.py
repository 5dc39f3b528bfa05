"""Asks every replica to leave, also those of a run whose control records were lost.

    control/000000 gone, or no record ─▶ a stop, under a number that living replicas will read

A stop needs neither the lost quorum nor the lost budget, and the person who pays for a fleet must always be able to end
it.  Running replicas have read the first records at their start; now they only look for the next number.

Not promised: that replicas read the stop if the newest record has vanished: they look for the next number.
"""

from contextlib import suppress
from dataclasses import replace

from rendezvous import layout
from rendezvous.agreement.membership import Wanted, controls_above, read_control, write_control
from rendezvous.clock import Clock
from rendezvous.errors import Forged, RecordsLost
from rendezvous.records.records import Control, new_nonce
from rendezvous.store import Readable, Store, put_once


def write_stop(store: Store, clock: Clock) -> str:
    """Ask every replica to leave, even if records were lost.   Return a text that describes the loss, "" for none."""
    try:
        write_control(store, clock, stop=True)
    except (RecordsLost, Forged) as lost:
        won, n = False, standing_state(store).records  # never 0: that number is for the run's first record
        while not won:
            record = Control(n, new_nonce(), clock.wall(), stop=True)
            won, _ = put_once(store, clock, layout.control_key(n), record.encode())
            n += 1
        return str(lost)
    return ""


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
