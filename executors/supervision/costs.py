"""The past, present and allowed costs of a run, from its log alone.

    launched ──(pending … running)──▶ lost, ended        seconds × usd_per_hour = one bill
      └─ bills ─▶ costs ─┬─ refusal   would this launch pass the budget?   Is its price known?
                         ├─ over      must the run end now, so that it has ended before the budget is passed?
                         └─ lease     until when may replicas go on if no supervisor looks any more?

        spent + rate · END_S ≤ max_usd               hours + END_S ≤ max_hours         rate: of all, the waiting too
        a launch: + its price · BOOT_S, since a replica that must end before it has booted is money for nothing

A bill has the seconds in which the platform says that it ran.  Where it does not say: from the launch, without the time
in which it waited for a machine, to the earliest of the platform's end, the goodbye, and the end as it was written
down.  Where the supervisor that wrote it never saw the launch alive, the last heartbeat is the end.  A heart that was
not heard for the length of a lease beats no more; else the sum errs towards too much.

Not promised: what the platform's invoice says.  Storage, traffic and rounding up to minutes are not in it.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.runlog.reader import SUPERVISOR, Report, SessionSummary
from diloco.units import dollars
from executors.platforms.base import Plain
from executors.supervision.slots.slot_state import native_of
from rendezvous.agreement.membership import Wanted, launch_of
from rendezvous.records.records import Beat

Spans = Sequence[tuple[float, float]]  # (since, to), Unix times

BEGINS = ("launched", "found")
ENDS = ("lost", "ended")
WAITS = ("pending", "running")  # for a machine, and no more
END_S = 60.0  # from "leave now" until no replica runs: a last offer, the goodbye, a kill if need be
LEASE_S = 1800.0  # a fleet without a supervisor bills no longer than this
BOOT_S = 300.0  # from a launch to the first inner step: a machine, the image, θ


@dataclass(frozen=True)
class Bill(Plain):
    """One launch.   usd_per_hour: None if unknown.   seconds: billed for so far.   began, ended: Unix time.

    pending: it waits for a machine.
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
        """US dollars so far; 0 where the price is unknown."""
        return (self.usd_per_hour or 0.0) * self.seconds / 3600

    @property
    def rate(self) -> float:
        """US dollars per hour, now."""
        return 0.0 if self.pending else self.rate_soon

    @property
    def rate_soon(self) -> float:
        """The same, once it has its machine."""
        return 0.0 if self.ended is not None else self.usd_per_hour or 0.0


@dataclass(frozen=True)
class Costs:
    """hours: of the clock, in which any launch was billed.   unlogged: US dollars that only control records tell.

    untold: sessions on rented machines that neither tells.
    """

    bills: tuple[Bill, ...] = ()
    hours: float = 0.0
    unlogged: float = 0.0
    untold: tuple[str, ...] = ()

    @property
    def usd(self) -> float:
        return sum(b.usd for b in self.bills) + self.unlogged

    @property
    def rate(self) -> float:
        """US dollars per hour, now."""
        return sum(b.rate for b in self.bills)

    @property
    def rate_soon(self) -> float:
        """The same, once those that wait for a machine have one: the rate that a budget must reckon with."""
        return sum(b.rate_soon for b in self.bills)

    @property
    def rented(self) -> bool:
        """Whether a launch runs, or waits for a machine, that costs money or has no known price."""
        return any(b.ended is None and b.usd_per_hour != 0 for b in self.bills)

    @property
    def unknown(self) -> tuple[Bill, ...]:
        """Bills whose price is unknown: they are not in any sum."""
        return tuple(b for b in self.bills if b.usd_per_hour is None)

    def per_slot(self) -> dict[str, float]:
        return _sum_by_key((b.slot, b.usd) for b in self.bills)

    def per_executor(self) -> dict[str, float]:
        return _sum_by_key((b.executor, b.usd) for b in self.bills)

    def to_dict(self) -> dict[str, Any]:
        """The costs for programs (`diloco costs --json`)."""
        return {
            "usd": self.usd,
            "usd_per_hour": self.rate,
            "hours": self.hours,
            "per_slot": self.per_slot(),
            "per_executor": self.per_executor(),
            "usd_unlogged": self.unlogged,
            "unknown_price": sorted({b.slot for b in self.unknown}),
            "unknown_sessions": list(self.untold),
            "bills": [{**b.to_dict(), "usd": b.usd} for b in self.bills],
        }


def _sum_by_key(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for key, value in pairs:
        sums[key] += value
    return dict(sorted(sums.items()))


# -------------------------------------------------------------------- what it has cost


def costs(report: Report, now: float | None = None) -> Costs:
    """Compute a run's costs.   now: Unix time (default: that of the newest sign of life)."""
    now = now if now is not None else max([b.at for b in report.beats.values()] + [report.ended])
    bills = list[Bill]()
    priced = list[tuple[float, Spans]]()
    for events in _per_launch(billed_events(report)).values():
        sessions = _sessions_of(report.sessions, events[0])
        ended = _end_time(events, sessions[-1:], report.beats, now)
        billed = _told_span(events) or _billed_spans(events, sessions, now if ended is None else ended)
        bills.append(_make_bill(events, sessions, ended, _length(billed)))
        priced.append((bills[-1].usd_per_hour or 0.0, billed))
    usd, hours = _sums_since(float("-inf"), priced)
    told_usd, told_hours = _told_by_record(report, priced, now)
    bills.sort(key=lambda b: (b.slot, b.attempt))
    return Costs(tuple(bills), max(hours, told_hours), max(0.0, told_usd - usd), _untold_sessions(report, bills))


def billed_events(report: Report) -> list[Mapping[str, Any]]:
    """Pick the events of supervisors that a bill is made of."""
    kinds = (*BEGINS, *ENDS, *WAITS)
    return [e for e in report.events if e["who"].startswith(SUPERVISOR) and e["event"] in kinds]


def _told_by_record(report: Report, priced: Sequence[tuple[float, Spans]], now: float) -> tuple[float, float]:
    """The (US dollars, hours) of the newest control record, where the log lacks an event that they were made of.

    They grow as the log shows.  A log that shows nothing since the record may be gone: then at the record's rate.
    """
    spent = report.wanted.spent
    heard = any(e["who"].startswith(SUPERVISOR) and e["at"] >= spent.at for e in report.events)
    if heard and sum(e["at"] <= spent.at for e in billed_events(report)) >= spent.logged:
        return 0.0, 0.0
    usd, hours = _sums_since(spent.at, priced)
    if not heard and spent.rate:
        unseen = max(0.0, min(now, spent.until) - spent.at) / 3600
        usd, hours = max(usd, spent.rate * unseen), max(hours, unseen)
    return spent.usd + usd, spent.hours + hours


def _sums_since(at: float, priced: Sequence[tuple[float, Spans]]) -> tuple[float, float]:
    """The (US dollars, hours of the clock) that launches were billed for since then."""
    later = [(price, [(max(at, since), to) for since, to in spans if to > at]) for price, spans in priced]
    union = _union_length(sorted(span for _, spans in later for span in spans))
    return sum(price * _length(spans) for price, spans in later) / 3600, union / 3600


def _untold_sessions(report: Report, bills: Sequence[Bill]) -> tuple[str, ...]:
    """Sessions that claimed their slot from a rented machine after the last record, and whose launch no log shows."""
    billed = {f"{b.executor}/{b.slot}.{b.attempt}" for b in bills}
    told_until = max(report.wanted.spent.at, report.wanted.spent.until)
    rented = [x for x in report.sessions if launch_of(x.host, x.slot) and not x.host.startswith(f"{SUPERVISOR}/")]
    return tuple(x.name for x in rented if x.host not in billed and x.claimed > told_until)


def _per_launch(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """(slot, attempt, id on its platform) -> its launch and the later events, in the order of time.

    A launch whose answer was lost may have more than one process, and each is billed.  An event that names none speaks
    of the newest.
    """
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    newest: dict[str, int] = {}
    process: dict[tuple[str, int], str] = {}
    for e in events:
        slot = e["slot"]
        native = native_of(e)
        if e["event"] in BEGINS:
            newest[slot] = e.get("attempt", 1)
            process[slot, newest[slot]] = native or ""
            found.setdefault((slot, newest[slot], native or ""), [e])
        else:
            launch = (slot, e.get("attempt", newest.get(slot, 0)))
            key = (*launch, process.get(launch, "") if native is None else native)
            if key in found:
                found[key].append(e)
    return found


def _sessions_of(sessions: Iterable[SessionSummary], launch: Mapping[str, Any]) -> list[SessionSummary]:
    """The sessions that this launch has had, in order: a platform may have restarted it."""
    slot = launch["slot"]
    pid = launch.get("pid", 0)
    place = f"{launch.get('executor', 'local')}/{slot}.{launch.get('attempt', 1)}"
    own = [x for x in sessions if x.slot == slot and (x.host == place or (pid and x.pid == pid))]
    return sorted(own, key=lambda x: x.generation)


def _end_time(
    events: Sequence[Mapping[str, Any]], newest: Sequence[SessionSummary], beats: Mapping[str, Beat], now: float
) -> float | None:
    """The end of a launch; None while it may go on.   newest: its last session, if it has had one."""
    end = next((e for e in events if e["event"] in ENDS), None)
    found = [] if end is None else [end["at"], *([_number(end, "ended_at")] if _number(end, "ended_at") else [])]
    for session in newest:
        beat = beats.get(session.slot)
        own = beat if beat is not None and beat.generation == session.generation else None
        if own is not None and own.phase == "left":
            found.append(own.at)
        elif session.how in ("left", "done") and session.ended is not None:
            found.append(session.ended)
        elif own is not None and end is not None and end.get("unseen") is True:
            found.append(own.at)
        elif own is not None and end is None and now - own.at > LEASE_S:
            found.append(own.at + LEASE_S)
    return min(found, default=None)


def _told_span(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """The interval in which the platform itself says that it ran; none where it does not say."""
    told = [(_number(e, "began_at"), _number(e, "ended_at")) for e in events if e["event"] in ENDS][:1]
    return [(began, ended) for began, ended in told if 0 < began <= ended]


def _number(event: Mapping[str, Any], name: str) -> float:
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _billed_spans(
    events: Sequence[Mapping[str, Any]], sessions: Sequence[SessionSummary], end: float
) -> list[tuple[float, float]]:
    """The intervals in which a launch was billed.  A replica that claims its slot has a machine, though
    its beginning was not seen."""
    since: float | None = _begin_time(events[0])  # None while it waits for a machine
    spans: list[tuple[float, float]] = []
    claims = [{"event": "running", "at": x.claimed} for x in sessions]
    for e in sorted([*events[1:], *claims], key=lambda e: e["at"]):
        if e["event"] == "pending" and since is not None:
            if not e.get("first"):  # else it has waited since its launch
                spans.append((since, e["at"]))
            since = None
        elif e["event"] == "running" and since is None:
            since = e["at"]
    return spans if since is None else [*spans, (since, max(since, end))]


def _begin_time(launch: Mapping[str, Any]) -> float:
    return launch.get("launched_at") or launch["at"]


def _make_bill(
    events: Sequence[Mapping[str, Any]], sessions: Sequence[SessionSummary], ended: float | None, seconds: float
) -> Bill:
    e = events[0]
    newest = [x for x in events if x["event"] in WAITS][-1:]
    waits = any(x["event"] == "pending" and all(s.claimed < x["at"] for s in sessions) for x in newest)
    return Bill(
        slot=e["slot"],
        attempt=e.get("attempt", 1),
        executor=e.get("executor", "local"),
        usd_per_hour=e.get("usd_per_hour", 0.0),
        began=_begin_time(e),
        seconds=seconds,
        ended=ended,
        pending=waits and ended is None,
    )


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(to - since for since, to in spans)


def _union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of sorted intervals."""
    total = 0.0
    until = float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


# -------------------------------------------------------------------- what it may cost


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


def launch_refusal(budget: Budget, spent: Costs, prices: Sequence[float | None]) -> str:
    """Why replicas at these prices per hour may not be launched; "" if they may."""
    if None in prices and not budget.allow_unknown_price:
        return "no price is known for this launch; --allow-unknown-price launches it anyway"
    if budget.max_usd and spent.untold and not budget.allow_unknown_price:
        return (
            f"nobody knows what {', '.join(spent.untold)} cost: the log of their launch is gone, so max_usd = "
            f"{budget.max_usd:g} cannot be kept. Restore the objects below log/, or add --allow-unknown-price"
        )
    new = sum(p or 0.0 for p in prices)
    return _limit_passed(budget, spent, spent.rate_soon + new, "starting this", new * BOOT_S / 3600)


def over(budget: Budget, spent: Costs) -> str:
    """Why the run must end now; "" if it may go on."""
    return _limit_passed(budget, spent, spent.rate_soon, "going on")


def _limit_passed(budget: Budget, spent: Costs, rate: float, doing: str, boot: float = 0.0) -> str:
    """The words if a limit would be passed, else "".   boot: US dollars until the new replicas have booted."""
    end = END_S / 3600
    if budget.max_usd and spent.usd + boot + rate * end > budget.max_usd:
        boots = f" {dollars(boot)} until it has booted, and" if boot else ""
        return (
            f"{doing} would pass max_usd = {budget.max_usd:g}: {dollars(spent.usd)} are spent, and{boots} all together "
            f"cost {dollars(rate * end)} more until they have ended (at {dollars(rate)} per hour); raise --max-usd"
        )
    if budget.max_hours and spent.hours + end > budget.max_hours:
        return (
            f"{doing} would pass max_hours = {budget.max_hours:g}: it has run for {spent.hours:.2f} hours, and ending "
            f"takes {END_S:.0f} s; raise --max-hours to go on"
        )
    return ""


def lease(budget: Budget, spent: Costs, now: float, rate: float | None = None) -> float:
    """Unix time until which replicas may go on unattended at `rate` (default: theirs)."""
    rate = spent.rate_soon if rate is None else rate
    left = [LEASE_S]
    if budget.max_usd and rate > 0:
        left.append((budget.max_usd - spent.usd) / rate * 3600 - END_S)
    if budget.max_hours:
        left.append((budget.max_hours - spent.hours) * 3600 - END_S)
    return now + max(0.0, min(left))
