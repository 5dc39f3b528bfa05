"""Wanted slots that neither run nor are being started, for any reason, found in the run's records.

    wanted ─ fresh heartbeats ─ launches without an end ─ announced waits ──▶ "r02: not running for 3 min; …"

A launch does not count if its replica has left since.
The reason is the text of the supervisor's newest event of a kind in REASONS.

Not promised: anything about a run without a supervisor; `status` has a separate line for that.
"""

from diloco.runlog.reader import SUPERVISOR, Report
from diloco.units import duration
from diloco.views.overview import silent_s
from executors.supervision.slots.slot_state import History, past
from rendezvous.records.records import Beat

AFTER_S = 120.0  # time for a supervisor's look, a pause before the second start, and the budget's check
ABOUT = ("launched", "found", "lost", "ended", "killed")
REASONS = ("refused", "platform_silent")


def unserved(report: Report, now: float) -> list[str]:
    """Return one line about all of these slots; [] if there are none.   now: Unix time."""
    started = [e["at"] for e in report.of_kind("started") if e["who"].startswith(SUPERVISOR)][-1:]
    if report.done or report.stopped or not started:
        return []
    before = past(report.events)
    if before.get("publish", History()).open:  # replicas start once the model is published
        return []
    wanted = [slot for slot in report.wanted.slot_names if not report.wanted.is_to_leave(slot)]
    wanted = [slot for slot in wanted if _is_idle(report, slot, before.get(slot, History()), now)]
    idle = {slot: now - max(started[0], _idle_since(report, slot)) for slot in wanted}
    idle = {slot: seconds for slot, seconds in idle.items() if seconds >= AFTER_S and not _waits(report, slot, now)}
    if not idle:
        return []
    words = ", ".join(f"{slot} for {duration(seconds)}" for slot, seconds in sorted(idle.items()))
    return [f"wanted, but neither running nor being started: {words}; {_reason(report)}"]


def _is_idle(report: Report, slot: str, before: History, now: float) -> bool:
    beat = report.beats.get(slot)
    if beat is not None and beat.phase != "left" and now - beat.at <= silent_s(report.url):
        return False
    return all(_said_goodbye(beat, h.launched_at) for h in before.open)


def _said_goodbye(beat: Beat | None, launched_at: float) -> bool:
    return beat is not None and beat.phase == "left" and beat.at > launched_at


def _idle_since(report: Report, slot: str) -> float:
    beat = report.beats.get(slot)
    return max([e["at"] for e in report.of_kind(*ABOUT) if e["slot"] == slot] + [beat.at if beat else 0.0])


def _waits(report: Report, slot: str, now: float) -> bool:
    """Whether the wait announced by the slot's newest event (reward_waits.py), plus AFTER_S, is not over yet."""
    newest = [e for e in report.of_kind(*ABOUT) if e["slot"] == slot][-1:]
    return any(e["at"] + e.get("again_in_s", 0.0) + AFTER_S > now for e in newest)


def _reason(report: Report) -> str:
    told = [e for e in report.of_kind(*REASONS) if e["who"].startswith(SUPERVISOR)][-1:]
    return str(told[0].get("text")) if told else "no supervisor has said why"
