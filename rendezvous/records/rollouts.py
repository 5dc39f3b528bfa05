r"""Bundles of recorded rollouts in the bucket: one object each, whose last line is its record.

    rollouts/r01/0000000042/0000.0.bundle      payload ‖ \n ‖ {"kind":"rollouts", …, "digest":"xxh3-128:…"} ‖ \n

The record has no line end inside it, so the last but one line end of the object is just before it.  One object costs
one GET to find and one PUT to write, and its record can be sealed as a log is.

The payload is the trainer's (inner/rollouts/recording/bundle.py); here it is bytes.  Not promised: that the payload
is true.  A verdict about a bundle and a later reward are records of their own (judgements.py).
"""

from dataclasses import dataclass

from rendezvous.records.digests import has_digest
from rendezvous.records.records import AtLeastOne, Count, Record, Slot, Step, WireError, Word


@dataclass(frozen=True)
class Rollouts(Record):
    """The record of a bundle.

    run: the run's nonce.   place: number of the slot's batch of samples, and of the bundle in this batch.
    step: the outer step on whose weights it was sampled.   by: generation of the session, 0 for an actor.
    actor: the actor's name; "" if the slot's own session sampled.
    threads: the sampling process's number of threads, which affects bits.   digest: the payload's digest.
    """

    kind = "rollouts"
    run: Word
    slot: Slot
    place: tuple[Count, Count]
    step: Step
    by: Count
    engine: Word
    threads: AtLeastOne
    rollouts: AtLeastOne
    tokens: Count
    digest: Word
    nonce: Word
    actor: Word = ""

    def written_fields(self) -> dict[str, object]:
        return {**vars(self), "place": list(self.place)}


def seal_bundle(payload: bytes, record: Rollouts) -> bytes:
    """Return the bytes of a bundle's object."""
    return payload + b"\n" + record.encode() + b"\n"


def read_record(body: bytes) -> tuple[Rollouts, memoryview]:
    """Return the record and the payload of an object.   Raise WireError if it has no record."""
    before = body.rfind(b"\n", 0, len(body) - 1)
    if before < 0 or not body.endswith(b"\n"):
        raise WireError(f"no bundle of rollouts: its {len(body)} bytes have no record in their last line")
    view = memoryview(body)
    return Rollouts.decode(view[before + 1 : -1]), view[:before]


def is_whole(record: Rollouts, payload: memoryview, kind: str) -> bool:
    """Whether the payload has the record's digest, of this kind or a stronger kind."""
    return has_digest(payload, record.digest, kind)
