"""Asks every replica to leave, also those of a run whose control records were lost.

    control/000000 gone, or no record ─▶ a stop, under a number that living replicas will read

A stop needs neither the lost quorum nor the lost budget, and the person who pays for a fleet must always be able to end
it.  Running replicas have read the first records at their start; now they only look for the next number.

Not promised: that replicas read the stop if the newest record has vanished: they look for the next number.
"""

from rendezvous import layout
from rendezvous.agreement.lost_records import standing_state
from rendezvous.agreement.membership import write_control
from rendezvous.clock import Clock
from rendezvous.errors import Forged, RecordsLost
from rendezvous.records.records import Control, new_nonce
from rendezvous.store import Store, put_once


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
