"""Describes the price of a start, and the run's limit, in words.

Not promised: the bill; prices are the platform's own list.
"""

from diloco.units import dollars
from executors.supervision.money.budget import Budget


def price_words(usd_per_hour: float | None, spent_usd: float, budget: Budget, running: float = 0.0) -> str:
    """Return the price per hour, the costs so far, and the run's limit.

    usd_per_hour: price of this start; None if unknown.   running: US dollars per hour of processes that run already.
    """
    spent = f"{dollars(spent_usd)} spent so far, " if spent_usd else ""
    beside = f", beside {dollars(running)} per hour now" if running else ""
    if usd_per_hour is None:
        return f"{spent}the price of one of these is unknown{beside}; {_limit_words(None, spent_usd, budget)}"
    limit = _limit_words(usd_per_hour + running, spent_usd, budget)
    price = f"{dollars(usd_per_hour)} per hour more, {dollars(usd_per_hour + running)} in all"
    return f"{spent}{price if running else f'{dollars(usd_per_hour)} per hour in all'}; {limit}"


def _limit_words(usd_per_hour: float | None, spent_usd: float, budget: Budget) -> str:
    limits = []
    if budget.max_usd:
        left_usd = max(0.0, budget.max_usd - spent_usd)
        hours = f" ({left_usd / usd_per_hour:.1f} hours at this price)" if usd_per_hour else ""
        limits.append(f"{dollars(budget.max_usd)}{hours}")
    if budget.max_hours:
        limits.append(f"{budget.max_hours:g} hours")
    return f"ends by itself before {' or '.join(limits)}" if limits else "no limit (--max-usd X sets one)"
