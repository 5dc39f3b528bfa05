"""Choose the part of a run that a live view's next look reads, so that a view sends at most RATE requests a second.

    name            every    costs                           overdue = (now − asked) / every; the most overdue go first,
    newest commit   LOOK_S   1, and SAMPLED offers of a new  as long as the budget lasts:  RATE × seconds since the last
    supervisor      10 s     2   its log, a new claim of it  look, less the real cost of that look
    control         60 s     2   desired state, supervisor's heartbeat
    beat of a slot   5 s     1   a replica writes one every 5 s
    log of a slot   60 s     6   if its heartbeat is at another outer step than at the last read of its log; the length
                                 of the log is found by probing
    sessions        20 s     7   claims, leave records, log: if a heartbeat is of a new session, is the last, or is old

If the most overdue part is too expensive now, the other parts wait, so that the budget grows.

    4 replicas, a step in 43 s:   each beat every ten seconds, each log every other minute
    32 replicas:                  each beat after a minute or two, each log every quarter of an hour: its newest objects
    64 replicas:                  twice as long

Pure functions.  Not promised: all of a large fleet's logs; `diloco report` reads them all.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from diloco.runlog.reader import Report
from diloco.runlog.scope import SAMPLED, Focus
from diloco.runlog.sessions import SessionSummary
from diloco.views.overview import silent_s, written_at
from rendezvous.records.records import Beat

RATE = 1.0  # requests per second; a month of these costs a dollar at S3's price
LOOK_S = 5.0  # seconds from one look to the next
BURST_S = 2 * LOOK_S  # the longest time for which an unused budget grows
EVERY = {"supervisor": 10.0, "control": 60.0, "beat": 5.0, "log": 60.0, "sessions": 20.0}
COSTS_OF = {"supervisor": 2, "control": 2, "beat": 1, "log": 6, "sessions": 7}


@dataclass(frozen=True)
class AskedSoFar:
    """Times of requests, by (kind, slot); "" for no slot.   log_steps: slot -> its heartbeat's step at that time."""

    at: Mapping[tuple[str, str], float]
    log_steps: Mapping[str, int]


def next_focus(report: Report, asked: AskedSoFar, *, now: float, budget: float) -> Focus | None:
    """Choose the next look's focus; None: wait.   now: Unix time.   budget: requests that are allowed now."""
    left = budget - 1  # one request reads the newest commit
    if left < 0:
        return None
    chosen = set[tuple[str, str]]()
    due = [((now - asked.at.get(item, 0.0)) / EVERY[item[0]], item) for item in _items(report, asked, now)]
    for overdue, item in sorted(due, key=lambda pair: (-pair[0], pair[1])):
        if overdue < 1 or COSTS_OF[item[0]] > left:
            break
        chosen.add(item)
        left -= COSTS_OF[item[0]]
    return Focus(
        control=("control", "") in chosen,
        supervisor=("supervisor", "") in chosen,
        beats=_slots_of("beat", chosen),
        sessions=_slots_of("sessions", chosen),
        logs=_slots_of("log", chosen),
        most=SAMPLED,
    )


def items_of(focus: Focus, report: Report) -> list[tuple[str, str]]:
    """Return the (kind, slot) pairs that a look with this focus requests."""
    slots = report.wanted.member_names
    found = [("control", "")] * focus.control + [("supervisor", "")] * focus.supervisor
    found += [("beat", slot) for slot in slots if focus.reads_beat(slot)]
    found += [("sessions", slot) for slot in slots if focus.reads_sessions(slot)]
    return found + [("log", slot) for slot in slots if slot in focus.logs or focus.reads_sessions(slot)]


def _slots_of(kind: str, chosen: set[tuple[str, str]]) -> frozenset[str]:
    return frozenset(slot for name, slot in chosen if name == kind)


def _items(report: Report, asked: AskedSoFar, now: float) -> Iterator[tuple[str, str]]:
    """Yield all (kind, slot) pairs that may have new records."""
    yield from (("control", ""), ("supervisor", ""))
    newest = {session.slot: session for session in report.sessions}
    for slot in report.wanted.member_names:
        yield ("beat", slot)
        beat = report.beats.get(slot)
        session = newest.get(slot)
        read_at = asked.at.get(("beat", slot), now)
        if (
            beat is None
            or session is None
            or not _is_settled(beat, session)
            or read_at - written_at(beat, report, now) > silent_s(report)
        ):
            yield ("sessions", slot)
        elif beat.step != asked.log_steps.get(slot):
            yield ("log", slot)


def _is_settled(beat: Beat, session: SessionSummary) -> bool:
    """Whether the heartbeat is of the known running session."""
    return beat.generation == session.generation and session.how == "running" and beat.phase != "left"
