"""Minds a run's budget for its supervisor: asks prices, refuses launches, renews the lease.

    log ──▶ costs ──▶ may this be launched?      must the run end?
                └───▶ control: until = …         replicas leave by themselves once that has passed

Whoever costs money has a lease, with a budget or without one, unless its place says otherwise (`--no-lease`): when the
supervisor dies, nobody may bill for ever.  Without a budget it only refuses what has no known price.  All decisions
are in executors/money.py.

Not promised: a price that changes on the platform while this supervisor lives.
"""

from collections.abc import Sequence

from diloco.report import Report
from executors.base import ExecutorError, ReplicaSpec, ServerlessExecutor
from executors.mixed import Place, place_of
from executors.money import Budget, Costs, costs, lease, over, refusal
from rendezvous.clock import Clock
from rendezvous.membership import Wanted, write_control
from rendezvous.store import Store

JITTER_S = 5.0


class Purse:
    """What one supervisor may spend."""

    def __init__(self, store: Store, clock: Clock, executor: ServerlessExecutor, places: Sequence[Place]) -> None:
        self._store, self._clock, self._executor, self._places = store, clock, executor, places
        self._leases = all(p.lease for p in places) and any(p.executor != "local" for p in places)
        self._prices: dict[object, float | None] = {}

    def spent(self, report: Report) -> Costs:
        return costs(report, self._clock.wall())

    def must_end(self, report: Report) -> str:
        """Why the run must end now, or "": then its lease is renewed, if that is due."""
        budget, until = Budget.of(report.wanted), report.wanted.until
        spent = self.spent(report) if budget.limited or self._leases else Costs()
        if not budget.limited and not (self._leases and (spent.rented or until)):
            if until:
                write_control(self._store, self._clock, until=0.0)
            return ""
        if why := over(budget, spent):
            write_control(self._store, self._clock, until=self._clock.wall())
            return why
        self._renew(report.wanted, spent, spent.rate_soon)
        return ""

    def refuses(self, report: Report, specs: Sequence[ReplicaSpec]) -> str:
        """Why these may not be launched, or "": then the lease reckons with them."""
        budget, prices = Budget.of(report.wanted), [self._price(s) for s in specs]
        leased = budget.limited or (self._leases and any(price != 0 for price in prices))
        spent = self.spent(report) if leased else Costs()
        why = refusal(budget, spent, prices)
        if not why and leased:
            self._renew(report.wanted, spent, spent.rate_soon + sum(p or 0.0 for p in prices))
        return why

    def _price(self, spec: ReplicaSpec) -> float | None:
        """Per hour; the same for all of one kind in one place."""
        kind = (place_of(self._places, spec.slot).maker, spec.gpu)
        if kind not in self._prices:
            told = self._executor.plan([spec])
            if told.refused:
                raise ExecutorError(told.refused[0])
            self._prices[kind] = told.usd_per_hour
        return self._prices[kind]

    def _renew(self, wanted: Wanted, spent: Costs, rate: float) -> None:
        """Earlier at once; later only when half of it is over."""
        now, until = self._clock.wall(), wanted.until
        due = lease(Budget.of(wanted), spent, now, rate)
        if due < until - JITTER_S or (due > until + JITTER_S and until - now < (due - now) / 2):
            write_control(self._store, self._clock, until=due)
