"""The past, present and allowed costs of a run, from its log.

    bills (money/bills.py) ▶ Costs ─┬─ refusal   would this launch exceed the budget?  Is its price known?
                                    ├─ over      must the run end now, so that it ends before the budget is exceeded?
                                    └─ lease     how long may replicas continue without a supervisor?

        spent + rate · END_S ≤ max_usd               hours + END_S ≤ max_hours         rate: also of waiting replicas
        a launch: + its price · BOOT_S, because a replica that must end before it has booted would waste money

Not promised: the amount of the platform's invoice.  Storage, traffic and rounding up to minutes are not included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.units import dollars
from executors.platforms.base import LEASE_S, Plain
from executors.supervision.money.budget import Budget

END_S = 60.0  # from "leave now" until no replica runs: a last offer, the leave record, a kill if necessary
BOOT_S = 300.0  # from a launch to the first inner step: a machine, the image, θ


@dataclass(frozen=True)
class Bill(Plain):
    """The bill of one launch.   usd_per_hour: None if unknown.   seconds: billed so far.   began, ended: Unix times.

    pending: the launch waits for a machine.
    """

    slot: str
    attempt: int
    executor: str
    usd_per_hour: float | None
    began: float
    seconds: float
    ended: float | None = None
    pending: bool = False

    @property
    def usd(self) -> float:
        """US dollars so far; 0 if the price is unknown."""
        return (self.usd_per_hour or 0.0) * self.seconds / 3600

    @property
    def rate(self) -> float:
        """US dollars per hour, now."""
        return 0.0 if self.pending else self.rate_soon

    @property
    def rate_soon(self) -> float:
        """US dollars per hour, also while the launch waits for its machine."""
        return 0.0 if self.ended is not None else self.usd_per_hour or 0.0


@dataclass(frozen=True)
class Costs:
    """The costs of a run.   hours: wall time with any billed launch.   unlogged: dollars that are missing in the log.

    boxes: US dollars for boxes, of the batches whose boxes have ended.
    untold: sessions on rented machines whose costs are missing in the log and in the control records.
    """

    bills: tuple[Bill, ...] = ()
    hours: float = 0.0
    unlogged: float = 0.0
    untold: tuple[str, ...] = ()
    boxes: float = 0.0

    @property
    def usd(self) -> float:
        return sum(b.usd for b in self.bills) + self.unlogged + self.boxes

    @property
    def rate(self) -> float:
        """US dollars per hour, now."""
        return sum(b.rate for b in self.bills)

    @property
    def rate_soon(self) -> float:
        """US dollars per hour, with launches that wait for a machine: the rate for budget decisions."""
        return sum(b.rate_soon for b in self.bills)

    @property
    def rented(self) -> bool:
        """Whether a launch that costs money, or has an unknown price, runs or waits for a machine."""
        return any(b.ended is None and b.usd_per_hour != 0 for b in self.bills)


# -------------------------------------------------------------------- what it may cost


def launch_refusal(budget: Budget, spent: Costs, prices: Sequence[float | None]) -> str:
    """Return why replicas at these prices per hour must not be launched; "" if they may."""
    if None in prices and not budget.allow_unknown_price:
        return "no price is known for this launch; --allow-unknown-price launches it anyway"
    if budget.max_usd and spent.untold and not budget.allow_unknown_price:
        return (
            f"the cost of {', '.join(spent.untold)} is unknown: the log of their launch is gone, so max_usd = "
            f"{budget.max_usd:g} cannot be kept. Restore the objects below log/, or add --allow-unknown-price"
        )
    new = sum(p or 0.0 for p in prices)
    return _limit_passed(budget, spent, spent.rate_soon + new, "starting this", new * BOOT_S / 3600)


def over(budget: Budget, spent: Costs) -> str:
    """Return why the run must end now; "" if it may continue."""
    return _limit_passed(budget, spent, spent.rate_soon, "going on")


def _limit_passed(budget: Budget, spent: Costs, rate: float, doing: str, boot: float = 0.0) -> str:
    """Return a message if a limit would be exceeded, else "".   boot: US dollars until new replicas have booted."""
    end = END_S / 3600
    if budget.max_usd and spent.usd + boot + rate * end > budget.max_usd:
        boots = f" {dollars(boot)} until it has booted, and" if boot else ""
        return (
            f"{doing} would pass max_usd = {budget.max_usd:g}: {dollars(spent.usd)} are spent, and{boots} all together "
            f"cost {dollars(rate * end)} more until they have ended (at {dollars(rate)} per hour); raise --max-usd"
        )
    if budget.max_hours and spent.hours + end > budget.max_hours:
        return (
            f"{doing} would pass max_hours = {budget.max_hours:g}: the run has run {spent.hours:.2f} hours, and ending "
            f"takes {END_S:.0f} s; raise --max-hours to continue"
        )
    return ""


def lease(budget: Budget, spent: Costs, now: float, rate: float | None = None) -> float:
    """Return the Unix time until which replicas may run without a supervisor.   rate: default: spent.rate_soon."""
    rate = spent.rate_soon if rate is None else rate
    left = [LEASE_S]
    if budget.max_usd and rate > 0:
        left.append((budget.max_usd - spent.usd) / rate * 3600 - END_S)
    if budget.max_hours:
        left.append((budget.max_hours - spent.hours) * 3600 - END_S)
    return now + max(0.0, min(left))
