r"""Bundles of recorded rollouts in the bucket: one object each, whose last line is its record.

    rollouts/r01/0000000042/0000.0.bundle      payload ‖ \n ‖ {"kind":"rollouts", …, "digest":"xxh3-128:…"} ‖ \n

The record has no line end inside it, so the last but one line end of the object is just before it.  One object costs
one GET to find and one PUT to write, and its record can be sealed as a log is.

The payload is the trainer's (inner/rollouts/bundle.py); here it is bytes.  Not promised: that the payload is true.  A
verdict about it (diloco/replica/door.py) and a later reward are records of their own.
"""

from dataclasses import dataclass
from typing import Annotated

from rendezvous import layout
from rendezvous.records.digests import has_digest
from rendezvous.records.records import AtLeastOne, Count, Record, Slot, Step, UnixTime, WireError, Word
from rendezvous.records.schema import Longest, Where, Within

LARGE = 1e9  # a verdict has this in place of a larger number, or of NaN
RewardName = Annotated[str, Longest(64), Where(layout.is_word, "name of letters, digits and _")]
RewardValue = Annotated[float, Within(-1e18, 1e18)]  # the limits of rewards in training (docs/rewards.md)


@dataclass(frozen=True)
class Rollouts(Record):
    """The record of a bundle.

    run: the run's nonce.   place: number of the slot's batch of samples, number of the bundle in it.
    step: the outer step on whose weights it was sampled.   by: generation of the session, 0 for an actor.
    actor: its name; "" if the slot's own session sampled.
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
    """Whether the payload has the record's digest, of this kind or a stronger one."""
    return has_digest(payload, record.digest, kind)


@dataclass(frozen=True)
class RolloutVerdict(Record):
    """A session's check of an actor's bundle, under the bundle's key with another ending.   of: the bundle's nonce.

    by: generation of the session.   step: as in the bundle.   disagreement, surprise: as in RolloutCheck; LARGE if not
    a number.   doubts: the reasons not to use the bundle; "": it is believed.
    """

    kind = "verdict"
    of: Word
    actor: Word
    by: Count
    step: Step
    disagreement: Annotated[float, Within(-LARGE, LARGE)]
    surprise: Annotated[float, Within(-LARGE, LARGE)]
    doubts: Annotated[str, Longest(2000)]
    nonce: Word


@dataclass(frozen=True)
class LateReward(Record):
    """A reward that came after its rollout, beside the bundle.   of: bundle's nonce.   rollout: index in the bundle.

    name: of the judge; the first reward of a name counts.   recorded: the reward in the bundle, which was trained on;
    None if there was none.   at: when the late reward came.
    """

    kind = "reward"
    of: Word
    rollout: Count
    name: RewardName
    value: RewardValue
    recorded: RewardValue | None
    at: UnixTime
    nonce: Word

    def key(self, bundle: str) -> str:
        """Return the record's key.   bundle: the key of its bundle."""
        return layout.beside_bundle(bundle, f"{self.rollout:04d}.{self.name}.reward")
