"""Minds a run's budget for its supervisor: asks prices, refuses launches, renews the lease.

    log ──▶ costs ──▶ may this be launched?         must the run end?
                └───▶ control: until = …, spent = … replicas leave by themselves once that has passed; and what was
                                                    spent is known also when the log has gone

Every replica that costs money has a lease, with a budget or without one, unless its place says otherwise
(`--no-lease`): when the supervisor dies, no replica bills for ever.  Without a budget it only refuses unknown prices.
All decisions are in executors/supervision/costs.py.

Not promised: a price that changes on the platform while this supervisor lives.
"""

from collections.abc import Sequence

from diloco.runlog.report import Report
from executors.platforms.base import ExecutorError, FleetExecutor, ReplicaSpec
from executors.platforms.multi import Place, place_of
from executors.supervision.costs import Budget, Costs, billed_events, costs, launch_refusal, lease, over
from rendezvous.background import Emit, no_emit
from rendezvous.clock import Clock
from rendezvous.membership import write_control
from rendezvous.records import Spent
from rendezvous.store import Store

JITTER_S = 5.0


class SpendLimit:
    """The spending limit of one supervisor."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        executor: FleetExecutor,
        places: Sequence[Place],
        *,
        former: Sequence[Place] = (),
        emit: Emit = no_emit,
    ) -> None:
        """former: earlier places of the run; processes that still run there are billed, and keep their lease."""
        self._store = store
        self._clock = clock
        self._executor = executor
        self._emit = emit
        self._places = places
        somewhere_else = any(p.executor != "local" for p in (*places, *former))
        self._leases = all(p.lease for p in places) and somewhere_else
        self._prices: dict[object, float | None] = {}

    def spent(self, report: Report) -> Costs:
        return costs(report, self._clock.wall())

    def must_end(self, report: Report) -> str:
        """Why the run must end now, or "": then its lease is renewed, if that is due."""
        budget = Budget.of(report.wanted)
        until = report.wanted.until
        spent = self.spent(report) if budget.limited or self._leases else Costs()
        if not budget.limited and not (self._leases and (spent.rented or until)):
            if until:
                self._write_lease(report, spent, until=0.0, rate=0.0)
            return ""
        if why := over(budget, spent):
            self._write_lease(report, spent, until=self._clock.wall(), rate=spent.rate_soon)
            return why
        self._renew_lease(report, spent, spent.rate_soon)
        return ""

    def refuses(self, report: Report, specs: Sequence[ReplicaSpec]) -> str:
        """Why these may not be launched, or "": then the lease reckons with them."""
        budget = Budget.of(report.wanted)
        prices = [self._price_per_hour(s) for s in specs]
        leased = budget.limited or (self._leases and any(price != 0 for price in prices))
        spent = self.spent(report) if leased else Costs()
        why = launch_refusal(budget, spent, prices)
        if not why and leased:
            self._renew_lease(report, spent, spent.rate_soon + sum(p or 0.0 for p in prices))
        return why

    def _price_per_hour(self, spec: ReplicaSpec) -> float | None:
        """US dollars per hour; the same for all of one kind in one place."""
        kind = (place_of(self._places, spec.slot).maker, spec.gpu)
        if kind not in self._prices:
            plan = self._executor.plan([spec])
            if plan.refused:
                raise ExecutorError(plan.refused[0])
            self._prices[kind] = plan.usd_per_hour
        return self._prices[kind]

    def _renew_lease(self, report: Report, spent: Costs, rate: float) -> None:
        """Renew the lease: an earlier end at once, a later one only when half of it is over."""
        now = self._clock.wall()
        until = report.wanted.until
        due = lease(Budget.of(report.wanted), spent, now, rate)
        if due < until - JITTER_S or (due > until + JITTER_S and until - now < (due - now) / 2):
            self._write_lease(report, spent, until=due, rate=rate)

    def _write_lease(self, report: Report, spent: Costs, *, until: float, rate: float) -> None:
        at = round(self._clock.wall(), 3)  # as events have it: one that follows is not earlier
        told = Spent(spent.usd, spent.hours, rate, at=at, until=until, logged=len(billed_events(report)))
        write_control(self._store, self._clock, until=until, spent=told)
        self._emit("lease", until=until, usd=spent.usd)
