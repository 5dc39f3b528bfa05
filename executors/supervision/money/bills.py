"""Computes the bills of a run from its log.

    launched ──(pending … running)──▶ lost, ended        seconds × usd_per_hour = one bill ─▶ Costs (costs.py)

A bill counts the time that the platform reports for a launch.  Without a report it counts from the launch, without the
wait for a machine, to the earliest of: the end that the platform names, the replica's leave record, the logged end.  If
the supervisor that logged the end never saw the launch alive, the last heartbeat is the end.  If a launch has no end,
and no heartbeat for the length of a lease, the bill ends after that lease, and not before the lease that the supervisor
wrote.  A replica's time from before its launch shows a wrong clock, and ends no bill.  In doubt the sum is too high.

Only heartbeats count the costs of boxes, and control records count only launches, so that new boxes never hide lost
bills.  A control record of an older release counts boxes, too: if the log is lost, its boxes are counted twice.

Not promised: the amount of the platform's invoice.  Storage, traffic and rounding up to minutes are not included.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from diloco.events import LAUNCH_BEGINS
from diloco.runlog.reader import SUPERVISOR, Report
from diloco.runlog.sessions import SessionSummary
from diloco.views.overview import written_at
from executors.supervision.costs import LEASE_S, Bill, Costs
from executors.supervision.slots.slot_state import native_of
from rendezvous.agreement.membership import launch_of
from rendezvous.records.records import Beat

Process = tuple[str, str | int]  # slot, and host or pid
Spans = Sequence[tuple[float, float]]  # (since, to), Unix times
ENDS = ("lost", "ended")
WAITS = ("pending", "running")  # the launch waits for a machine; the launch has a machine


def costs(report: Report, now: float | None = None) -> Costs:
    """Compute a run's costs.   now: Unix time (default: the time of the newest heartbeat or event)."""
    now = now if now is not None else max([b.at for b in report.beats.values()] + [report.ended])
    bills = list[Bill]()
    priced = list[tuple[float, Spans]]()
    by_process = _by_process(report.sessions)
    for events in _per_launch(billed_events(report)).values():
        sessions = _sessions_of(by_process, events[0])
        ended = _end_time(events, sessions[-1:], report, now)
        billed = _told_span(events) or _billed_spans(events, sessions, now if ended is None else ended)
        bills.append(_make_bill(events, sessions, ended, _length(billed)))
        priced.append((bills[-1].usd_per_hour or 0.0, billed))
    usd, hours = _sums_since(float("-inf"), priced)
    boxes = sum(beat.box_usd for beat in report.beats.values())
    told_usd, told_hours = _told_by_record(report, priced, now)
    bills.sort(key=lambda b: (b.slot, b.attempt))
    unlogged, untold = max(0.0, told_usd - usd), _untold_sessions(report, bills)
    return Costs(tuple(bills), max(hours, told_hours), unlogged, untold, boxes)


def unpriced(spent: Costs) -> tuple[Bill, ...]:
    """Return the bills with an unknown price, which no sum includes."""
    return tuple(b for b in spent.bills if b.usd_per_hour is None)


def billed_events(report: Report) -> list[Mapping[str, Any]]:
    """Return the events of supervisors from which bills are computed."""
    kinds = (*LAUNCH_BEGINS, *ENDS, *WAITS)
    return [e for e in report.events if e["who"].startswith(SUPERVISOR) and e["event"] in kinds]


def _told_by_record(report: Report, priced: Sequence[tuple[float, Spans]], now: float) -> tuple[float, float]:
    """Return (US dollars, hours) of launches from the newest control record if the log lacks events; else (0, 0).

    Add the costs that the log shows since the record.  If the log has no event since the record, the log may be lost:
    then add the costs at the record's rate.
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
    """Return the (US dollars, hours of wall time) that launches were billed for since `at`."""
    later = [(price, [(max(at, since), to) for since, to in spans if to > at]) for price, spans in priced]
    union = _union_length(sorted(span for _, spans in later for span in spans))
    return sum(price * _length(spans) for price, spans in later) / 3600, union / 3600


def _untold_sessions(report: Report, bills: Sequence[Bill]) -> tuple[str, ...]:
    """Return sessions on rented machines that began after the last control record, and whose launch the log lacks."""
    billed = {f"{b.executor}/{b.slot}.{b.attempt}" for b in bills}
    told_until = max(report.wanted.spent.at, report.wanted.spent.until)
    rented = [x for x in report.sessions if launch_of(x.host, x.slot) and not x.host.startswith(f"{SUPERVISOR}/")]
    return tuple(x.name for x in rented if x.host not in billed and x.claimed > told_until)


def _per_launch(events: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """Return (slot, attempt, id on its platform) -> the launch and its later events, in the order of time.

    A launch whose answer was lost may have several processes, and each is billed.  An event without an id is about the
    newest process.
    """
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    newest: dict[str, int] = {}
    process: dict[tuple[str, int], str] = {}
    for e in events:
        slot = e["slot"]
        native = native_of(e)
        if e["event"] in LAUNCH_BEGINS:
            newest[slot] = e.get("attempt", 1)
            process[slot, newest[slot]] = native or ""
            found.setdefault((slot, newest[slot], native or ""), [e])
        else:
            launch = (slot, e.get("attempt", newest.get(slot, 0)))
            key = (*launch, process.get(launch, "") if native is None else native)
            if key in found:
                found[key].append(e)
    return found


def _by_process(sessions: Iterable[SessionSummary]) -> Mapping[Process, list[SessionSummary]]:
    """Return (slot, host) and (slot, pid) -> sessions.  An index, because a long run has thousands of sessions."""
    found = defaultdict[Process, list[SessionSummary]](list)
    for session in sessions:
        for key in (session.host, session.pid):
            found[session.slot, key].append(session)
    return found


def _sessions_of(sessions: Mapping[Process, list[SessionSummary]], launch: Mapping[str, Any]) -> list[SessionSummary]:
    """Return the sessions of this launch, in order; there are several if the platform restarted it."""
    slot = launch["slot"]
    pid = launch.get("pid", 0)
    place = f"{launch.get('executor', 'local')}/{slot}.{launch.get('attempt', 1)}"
    own = [*sessions.get((slot, place), ()), *(sessions.get((slot, pid), ()) if pid else ())]
    return [session for _, session in sorted({x.generation: x for x in own}.items())]


def _end_time(
    events: Sequence[Mapping[str, Any]], newest: Sequence[SessionSummary], report: Report, now: float
) -> float | None:
    """Return the end time of a launch; None while it may run.   newest: the launch's last session, if any."""
    began = _begin_time(events[0])
    end = next((e for e in events if e["event"] in ENDS), None)
    found = [] if end is None else [end["at"], *([number_in(end, "ended_at")] if number_in(end, "ended_at") else [])]
    told = list[float]()  # ends told by the replica, whose clock may be wrong
    for session in newest:
        beat = report.beats.get(session.slot)
        own = beat if beat is not None and beat.generation == session.generation else None
        if own is not None and own.phase == "left":
            told.append(at if (at := written_at(own, report, now)) >= began else report.wanted.until)
        elif session.how in ("left", "done") and session.ended is not None:
            told.append(session.ended)
        elif own is not None and end is not None and end.get("unseen") is True:
            told.append(written_at(own, report, now))
        elif own is not None and end is None and (over := _lease_end(own, report, began, now)) < now:
            told.append(over)
    found += [min(at, now) for at in told if at >= began]
    return min(found, default=None)


def _lease_end(beat: Beat, report: Report, began: float, now: float) -> float:
    """Return the time at which a replica's lease is over, by its last heartbeat and by the newest control record."""
    written = written_at(beat, report, now)
    return max(written + LEASE_S if written >= began else 0.0, report.wanted.until)


def _told_span(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return the interval in which the launch ran, as the platform reports it; [] without a report."""
    told = [(number_in(e, "began_at"), number_in(e, "ended_at")) for e in events if e["event"] in ENDS][:1]
    return [(began, ended) for began, ended in told if 0 < began <= ended]


def number_in(event: Mapping[str, Any], name: str) -> float:
    """Return a field; 0 for an implausible number, because any writer may have written the log."""
    value = event.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def _billed_spans(
    events: Sequence[Mapping[str, Any]], sessions: Sequence[SessionSummary], end: float
) -> list[tuple[float, float]]:
    """Return the intervals in which a launch was billed.  A claim of the launch's slot shows that the launch has a
    machine, even without a "running" event."""
    since: float | None = _begin_time(events[0])  # None during a wait for a machine
    spans: list[tuple[float, float]] = []
    claims = [{"event": "running", "at": x.claimed} for x in sessions]
    for e in sorted([*events[1:], *claims], key=lambda e: e["at"]):
        if e["event"] == "pending" and since is not None:
            if not e.get("first"):  # a first "pending" event: the launch has waited from the start
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
        slot=e["slot"], attempt=e.get("attempt", 1), executor=e.get("executor", "local"),
        usd_per_hour=e.get("usd_per_hour", 0.0),
        began=_begin_time(e), seconds=seconds, ended=ended, pending=waits and ended is None,
    )  # fmt: skip


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(to - since for since, to in spans)


def _union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of sorted intervals."""
    total = 0.0
    until = float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total
