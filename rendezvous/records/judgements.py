"""Records about a bundle of rollouts (rollouts.py), beside the bundle: a check of the bundle, and a later reward.

    rollouts/r01/0000000042/0000.0.bundle
    rollouts/r01/0000000042/0000.0.verdict                   diloco/replica/door.py
    rollouts/r01/0000000042/0000.0.0007.tests.reward         rollout 7, by the judge "tests"

Not promised: that a judgement is right.
"""

from dataclasses import dataclass
from typing import Annotated

from rendezvous import layout
from rendezvous.records.records import Count, Record, Step, UnixTime, Word
from rendezvous.records.schema import Longest, Where, Within

MOST_DOUBTS = 2  # doubts after which an actor's later bundles are not used
LARGE = 1e9  # a verdict has this number in place of a larger number, or of NaN
RewardName = Annotated[str, Longest(64), Where(layout.is_word, "name of letters, digits and _")]
RewardValue = Annotated[float, Within(-1e18, 1e18)]  # the limits of rewards in training (docs/rewards.md)


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

    name: the judge's; a name's first reward counts.   recorded: the reward in the bundle, which was trained on;
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
