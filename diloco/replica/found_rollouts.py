"""Read a bundle that stands in a place of a replica's slot, and decide whether the replica trains on it.

    bytes ─▶ record: this run, slot and place? of this outer step? ─▶ payload: whole? ─▶ fits? ─▶ an actor's: the door

Not promised: the same decision on two machines, if their weights differ inside a round (rollouts.py).
"""

from typing import TYPE_CHECKING

from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.recorded import BundlePlace, Unfit
from inner.rollouts.recording.unpack import unpack
from rendezvous.records.rollouts import is_whole, read_record
from rendezvous.store import VOID

if TYPE_CHECKING:
    from diloco.replica.rollouts import BucketPlaces


def read_found(
    places: "BucketPlaces", place: BundlePlace, key: str, body: bytes, unfit: Unfit
) -> tuple[Bundle | None, str]:
    """Return the bundle, or why it cannot be used; (None, "") if it is of another outer step.   key: the object's."""
    if body == VOID:
        return None, ""  # the store has reported the error
    record, payload = read_record(body)
    if (record.run, record.slot, tuple(record.place)) != (places.run, places.slot, place[1:]):
        return None, f"they are of {record.slot}, generation {record.place[0]}, in run {record.run}"
    if places.anew and record.by != places.by:
        return None, ""
    age = place.outer - record.step
    if not 0 <= age <= (places.staleness if record.actor else 0) or (record.actor and places.own_only):
        places.expired += bool(record.actor)
        return None, ""
    if not is_whole(record, payload, places.kind):
        return None, "their bytes have another digest than their record names"
    bundle = unpack(bytes(payload))
    counts = len(bundle.ids), sum(map(len, bundle.ids))
    if counts != (record.rollouts, record.tokens):
        told = f"{record.rollouts} of {record.tokens} by their record"
        return None, f"they are {counts[0]} rollouts of {counts[1]} tokens, and {told}"
    if record.actor and bundle.logprobs is None:
        return None, f"the actor {record.actor} left out their log-probs"
    why = unfit(bundle)
    may_lie = record.actor and (not why or isinstance(why, TooFar))  # rollouts of wrong weights are also too far
    if may_lie and places.door and not places.door.lets_in(place, key, record, bundle):
        return None, ""  # the door has reported its doubts
    return bundle, why
