"""Keeps a supervisor within the run's budget: requests prices, refuses launches, renews the lease.

    log ──▶ costs ──▶ verdict: must the run end?   launch_verdict: may these launch?     both: which lease is due?
                └───▶ carry_out ─▶ control: until = …, spent = …   replicas leave by themselves after `until`;
                                                                     `spent` is known even if the log is lost

Every replica that costs money has a lease, with or without a budget, unless its place has `--no-lease`.  So replicas
are not billed for ever if the supervisor dies.  Without a budget, only launches at unknown prices are refused.
All decisions are in executors/supervision/costs.py.

Not promised: a correct sum if a price changes on the platform while this supervisor runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from diloco.runlog.reader import Report
from executors.platforms.base import ExecutorError, FleetExecutor, ReplicaSpec
from executors.platforms.places import Place, place_of
from executors.supervision.costs import Costs, launch_refusal, lease, over
from executors.supervision.money.budget import Budget
from rendezvous.agreement.membership import write_control
from rendezvous.background import Emit, no_emit
from rendezvous.clock import Clock
from rendezvous.records.records import Spent
from rendezvous.store import Store

JITTER_S = 5.0


@dataclass(frozen=True)
class NewLease:
    """A lease to write.   until: Unix time; 0: no lease.   rate: assumed US dollars per hour.   spent: costs so far."""

    until: float
    rate: float
    spent: Costs


@dataclass(frozen=True)
class SpendVerdict:
    """A decision.   why: the reason to stop, or "".   lease: the lease to write first, or None."""

    why: str = ""
    lease: NewLease | None = None


class SpendLimit:
    """The spending limit of one supervisor: two verdicts without side effects, and `carry_out`."""

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
        """Make the limit.   former: earlier places, whose running processes still cost money and have a lease."""
        self._store = store
        self._clock = clock
        self._executor = executor
        self._emit = emit
        self._places = places
        somewhere_else = any(p.executor != "local" for p in (*places, *former))
        self._leases = all(p.lease for p in places) and somewhere_else
        self._prices: dict[object, float | None] = {}

    def spent(self, report: Report) -> Costs:
        from executors.supervision.money.bills import costs

        return costs(report, self._clock.wall())

    def verdict(self, report: Report) -> SpendVerdict:
        """Return whether the run must end now, and the lease that is due; do not write the lease."""
        budget = Budget.of(report.wanted)
        until = report.wanted.until
        spent = self.spent(report) if budget.limited or self._leases else Costs()
        if not budget.limited and not (self._leases and (spent.rented or until)):
            return SpendVerdict(lease=NewLease(0.0, 0.0, spent) if until else None)
        if why := over(budget, spent):
            return SpendVerdict(why, NewLease(self._clock.wall(), spent.rate_soon, spent))
        return SpendVerdict(lease=self._due_lease(report, spent, spent.rate_soon))

    def launch_verdict(self, report: Report, specs: Sequence[ReplicaSpec]) -> SpendVerdict:
        """Return whether these specs may be launched, and the lease with them.  Request prices, but write nothing."""
        budget = Budget.of(report.wanted)
        prices = [self._price_per_hour(s) for s in specs]
        leased = budget.limited or (self._leases and any(price != 0 for price in prices))
        spent = self.spent(report) if leased else Costs()
        if (why := launch_refusal(budget, spent, prices)) or not leased:
            return SpendVerdict(why)
        return SpendVerdict(lease=self._due_lease(report, spent, spent.rate_soon + sum(p or 0.0 for p in prices)))

    def carry_out(self, verdict: SpendVerdict, report: Report) -> str:
        """Write the verdict's lease and the spent amount into the control record; return the verdict's `why`."""
        if (new := verdict.lease) is not None:
            at = round(self._clock.wall(), 3)  # rounded as in events, so that a later event is not earlier
            from executors.supervision.money.bills import billed_events

            usd, logged = max(0.0, new.spent.usd - new.spent.boxes), len(billed_events(report))  # boxes: in heartbeats
            told = Spent(usd, new.spent.hours, new.rate, at=at, until=new.until, logged=logged)
            known = None if report.damage else report.wanted  # damaged records may lack the budget
            write_control(self._store, self._clock, known, until=new.until, spent=told)
            self._emit("lease", until=new.until, usd=new.spent.usd)
        return verdict.why

    def _price_per_hour(self, spec: ReplicaSpec) -> float | None:
        """Return US dollars per hour, requested once per place and kind of GPU."""
        kind = (place_of(self._places, spec.slot).maker, spec.gpu)
        if kind not in self._prices:
            plan = self._executor.plan([spec])
            if plan.refused:
                raise ExecutorError(plan.refused[0])
            self._prices[kind] = plan.usd_per_hour
        return self._prices[kind]

    def _due_lease(self, report: Report, spent: Costs, rate: float) -> NewLease | None:
        """Return the lease that is due: a shorter lease at once, a longer one if the present one covers under half."""
        now = self._clock.wall()
        until = report.wanted.until
        due = lease(Budget.of(report.wanted), spent, now, rate)
        is_due = due < until - JITTER_S or (due > until + JITTER_S and until - now < (due - now) / 2)
        return NewLease(due, rate, spent) if is_due else None
