"""The limits of a run's costs, as its control records state them.   costs.py decides what they allow."""

from dataclasses import dataclass

from rendezvous.agreement.membership import Wanted


@dataclass(frozen=True)
class Budget:
    """The limits of a run's costs; 0: no limit."""

    max_usd: float = 0.0
    max_hours: float = 0.0
    allow_unknown_price: bool = False

    @classmethod
    def of(cls, wanted: Wanted) -> "Budget":
        return cls(wanted.max_usd, wanted.max_hours, wanted.allow_unknown_price)

    @property
    def limited(self) -> bool:
        return self.max_usd > 0 or self.max_hours > 0
