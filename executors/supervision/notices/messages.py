"""Collects all messages to the user about a run: its troubles, and the replicas' waits.

    find_troubles (diloco/views/troubles.py) ─┐
    this file: platform, reward, disk, alerts ─┴▶ all_troubles ─┬▶ `--alert URL` (alerts.py)
    newest warnings, notes of replicas ─────────────────────────┴▶ message_lines ─▶ `diloco status`, `diloco watch`

    lost, by_reward, reward_failures, again_in_s ──▶ "! the reward failed: r00 2 of 6 times in a row, again in 3 min; …"
    wanted ─ fresh heartbeats ─ launches without an end ─ announced waits ──▶ "wanted, but neither running …: r02 …"

A launch does not count if its replica has left since.  The reason in the line is the text of the supervisor's newest
event whose kind is in REASONS.

A replica's event that its own disk was full is hidden once the replica has joined.  If the run's disk is full, there is
no room for a heartbeat that reports it, so `full_words` looks at the disk.

Not promised: quotas of a user or a bucket, which replicas report when a write fails; all messages: `message_lines`
returns only the first lines.  Not promised either: the exact time of a start, which needs a running supervisor.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diloco.events import LAUNCH_BEGINS, LAUNCH_ENDS, WARNINGS, event_text
from diloco.runlog.reader import SUPERVISOR, Report
from diloco.runlog.summary import solo_words
from diloco.units import dollars, duration
from diloco.views.overview import is_fresh
from diloco.views.trouble import trouble
from diloco.views.troubles import Spending, Trouble, find_troubles
from executors.supervision.money.bills import ENDS, costs
from executors.supervision.silence import open_outages
from executors.supervision.slots.slot_state import History, past
from rendezvous.records.records import Beat
from rendezvous.stores.open import folder_of

MOST_LINES = 8
SETTLES = (*LAUNCH_BEGINS, *ENDS)
AFTER_S = 120.0  # seconds for a supervisor's look, a pause before the second start, and the check of the budget
ABOUT = (*LAUNCH_BEGINS, *LAUNCH_ENDS)
REASONS = ("refused", "platform_silent")
LEAST = 64 << 10  # free bytes; with fewer bytes, not even heartbeats and logs can be written reliably


def full_words(url: str) -> str:
    """Return a warning if the run is a folder of this machine and its disk is full; else ""."""
    folder = folder_of(url)
    try:
        disk = None if folder is None else os.statvfs(folder)
    except OSError:
        disk = None
    if disk is None:
        return ""
    if disk.f_files and not disk.f_favail:
        return "the run's disk has no inode left (df -i), and all replicas wait: delete some files, and they continue"
    free = disk.f_bavail * disk.f_frsize
    if free >= LEAST or disk.f_blocks == 0:
        return ""
    size = disk.f_blocks * disk.f_frsize
    left = f"{free} bytes left of {size / 1e6:.0f} MB"
    return f"the run's disk is full ({left}), and all replicas wait. Free some space, and they continue"


def found_room(event: Mapping[str, Any], report: Report) -> bool:
    """Whether the event says that a replica's own disk was full, and that replica has joined or ended since."""
    if event["event"] != "disk_full":
        return False
    return any(x.name == event["who"] and (x.joined is not None or x.how != "running") for x in report.sessions)


def disk_full(report: Report, now: float) -> list[Trouble]:
    words = full_words(report.url)
    return [trouble("disk_full", words, "Free some space on it", step=report.head)] if words and not report.done else []


def reward_failed(report: Report, now: float) -> list[Trouble]:
    advice = "`diloco check CONFIG` tries the reward"
    return [trouble("reward_failed", text, advice, step=report.head) for text in reward_waits(report, now)]


def platform_silent(report: Report, now: float) -> list[Trouble]:
    advice = "Replicas continue; a lost replica is replaced when the platform answers again"
    texts = open_outages(report.events, now)
    return [trouble("platform_silent", "; ".join(texts), advice, step=report.head)] if texts else []


def slot_unserved(report: Report, now: float) -> list[Trouble]:
    advice = "`diloco logs RUN supervisor` says why; if no supervisor runs, `diloco resume RUN` starts one"
    return [trouble("slot_unserved", text, advice, step=report.head) for text in unserved(report, now)]


def alerts_failed(report: Report, now: float) -> list[Trouble]:
    """Return a trouble if the newest alert did not reach its webhook."""
    newest = report.of_kind("alerted", "alert_failed")[-1:]
    if not newest or newest[0]["event"] == "alerted":
        return []
    text = f"alerts do not reach {newest[0].get('host')}: {newest[0].get('text')}"
    advice = "Try the webhook's address with curl, then `diloco resume RUN --alert URL`"
    return [trouble("alerts_failed", text, advice, step=report.head)]


HOST_DETECTORS: Mapping[str, Callable[[Report, float], list[Trouble]]] = {
    "disk_full": disk_full,
    "reward_failed": reward_failed,
    "platform_silent": platform_silent,
    "slot_unserved": slot_unserved,
    "alerts_failed": alerts_failed,
}


# These come first: a poisoned run, then a run that does not go on, then the rest.  The rest keep DETECTORS' order.
MOST_URGENT = (
    "diverged", "forged", "disk_full", "platform_silent", "reward_failed", "slot_unserved", "stalled", "slot_lost",
    "budget", "alerts_failed",
)  # fmt: skip


def all_troubles(report: Report, now: float) -> list[Trouble]:
    """Return all troubles of a run, the most urgent first.   now: Unix time."""
    own = [found for detector in HOST_DETECTORS.values() for found in detector(report, now)]
    spent = costs(report, now)
    logged = find_troubles(report, now, Spending(spent.usd, spent.hours, spent.rate_soon))
    rank = {kind: place for place, kind in enumerate(MOST_URGENT)}
    return sorted([*own, *logged], key=lambda found: rank.get(found.kind, len(rank)))


def message_lines(report: Report, now: float) -> list[str]:
    """Return the first MOST_LINES of these lines: damage, troubles, two newest warnings, replicas' notes, others."""
    lines = [f"! {report.damage}"] if report.damage else []
    troubles = all_troubles(report, now)
    lines += [f"! {found.text if found.kind in HOST_DETECTORS else found.line}" for found in troubles]
    loud = [e for e in report.of_kind(*WARNINGS) if not found_room(e, report)]
    lines += [f"! {e['who']}: {e['event'].replace('_', ' ')}: {event_text(e)}" for e in loud[-2:]]
    noted = [b for b in report.beats.values() if b.note and b.phase != "sample" and is_listening(b, report, now)]
    lines += [f"  {b.slot}: {b.note}" for b in noted]
    if report.passed_over:
        lines.append(f"  {report.passed_over} lines or objects under log/ are not events; passed over")
    if words := solo_words(report):
        lines.append(f"! {words}")
    lines += machine_waits(report, now)
    if report.wanted.stop and not report.done:
        lines.append("! `diloco stop` has asked this run to end; `diloco resume` continues it")
    return lines[:MOST_LINES]


def is_listening(beat: Beat, report: Report, now: float) -> bool:
    return beat.phase != "left" and is_fresh(beat, report, now) and not report.done


# -------------------------------------------------------------------- slots that wait for their reward


def reward_waits(report: Report, now: float) -> list[str]:
    """Return one line if any slot waits, else [].   now: Unix time."""
    if report.done or report.stopped:
        return []
    newest = {e["slot"]: e for e in report.of_kind(*SETTLES) if e["who"].startswith(SUPERVISOR)}
    waiting = {slot: e for slot, e in newest.items() if e["event"] == "lost" and e.get("again_in_s")}
    waiting = {slot: e for slot, e in waiting.items() if slot in report.wanted.slot_names}
    if not waiting:
        return []
    slots = ", ".join(_wait_in_words(slot, e, now) for slot, e in sorted(waiting.items()))
    return [f"the reward failed: {slots}{_cost_in_words(waiting, report, now)}"]


def _wait_in_words(slot: str, end: Mapping[str, Any], now: float) -> str:
    left = max(0.0, end["at"] + end["again_in_s"] - now)
    row = f"{end.get('reward_failures', 1)} of {end.get('reward_limit', 1)} times in a row"
    return f"{slot} {row}, again in {duration(left)}"


def _cost_in_words(waiting: Mapping[str, Mapping[str, Any]], report: Report, now: float) -> str:
    """Return a phrase with the cost of the sessions that ended because the reward failed; "" if the cost is 0."""
    ended = {(slot, e["attempt"]) for slot, e in waiting.items() for e in _streak(report.of_kind("lost"), slot, e)}
    usd = sum(bill.usd for bill in costs(report, now).bills if (bill.slot, bill.attempt) in ended)
    return f"; those sessions cost {dollars(usd)}" if usd else ""


def _streak(lost: Sequence[Mapping[str, Any]], slot: str, newest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the slot's consecutive `lost` events that its reward caused, up to `newest`."""
    own = [e for e in lost if e["slot"] == slot and e.get("by_reward") and e["at"] <= newest["at"]]
    return own[-newest.get("reward_failures", 1) :]


# -------------------------------------------------------------------- slots that no replica serves


def machine_waits(report: Report, now: float) -> list[str]:
    """Return one line for each reason for which launches wait for a machine.   now: Unix time."""
    waits: dict[str, tuple[float, str]] = {}  # slot -> since when, and the platform's reason
    told = report.of_kind("pending", "queued", "running", *SETTLES)
    for e in [e for e in told if e["who"].startswith(SUPERVISOR)]:
        before = waits.pop(e["slot"], None)
        if e["event"] == "pending":
            waits[e["slot"]] = (e["at"], "")
        elif e["event"] == "queued" and before is not None:
            waits[e["slot"]] = (before[0], str(e.get("why") or ""))
    claimed = {x.slot: x.claimed for x in report.sessions}
    waits = {slot: wait for slot, wait in waits.items() if claimed.get(slot, 0.0) < wait[0]}
    if report.done or report.stopped:
        return []
    lines = []
    for why in sorted({why for _, why in waits.values()}):
        since = {slot: at for slot, (at, its) in sorted(waits.items()) if its == why}
        words = f"waiting for a machine: {', '.join(since)} for {duration(now - min(since.values()))}"
        lines.append(f"  {words} ({why})" if why else f"  {words}")
    return lines


def unserved(report: Report, now: float) -> list[str]:
    """Return one line about all unserved slots, or [] if there are none.   now: Unix time."""
    started = [e["at"] for e in report.of_kind("started") if e["who"].startswith(SUPERVISOR)][-1:]
    if report.done or report.stopped or not started:
        return []
    before = past(report.events)
    if before.get("publish", History()).open:  # replicas start once the model is published
        return []
    wanted = [slot for slot in report.wanted.slot_names if report.wanted.is_kept(slot)]
    wanted = [slot for slot in wanted if _is_idle(report, slot, before.get(slot, History()), now)]
    idle = {slot: now - max(started[0], _idle_since(report, slot)) for slot in wanted}
    idle = {slot: seconds for slot, seconds in idle.items() if seconds >= AFTER_S and not _waits(report, slot, now)}
    if not idle:
        return []
    words = ", ".join(f"{slot} for {duration(seconds)}" for slot, seconds in sorted(idle.items()))
    return [f"wanted, but neither running nor being started: {words}; {_reason(report)}"]


def _is_idle(report: Report, slot: str, before: History, now: float) -> bool:
    beat = report.beats.get(slot)
    if beat is not None and beat.phase != "left" and is_fresh(beat, report, now):
        return False
    return all(beat is not None and beat.phase == "left" and beat.at > h.launched_at for h in before.open)


def _idle_since(report: Report, slot: str) -> float:
    beat = report.beats.get(slot)
    return max([e["at"] for e in report.of_kind(*ABOUT) if e["slot"] == slot] + [beat.at if beat else 0.0])


def _waits(report: Report, slot: str, now: float) -> bool:
    """Whether the wait that the slot's newest event announces (`again_in_s`), plus AFTER_S, is not over yet."""
    newest = [e for e in report.of_kind(*ABOUT) if e["slot"] == slot][-1:]
    return any(e["at"] + e.get("again_in_s", 0.0) + AFTER_S > now for e in newest)


def _reason(report: Report) -> str:
    told = [e for e in report.of_kind(*REASONS) if e["who"].startswith(SUPERVISOR)][-1:]
    return str(told[0].get("text")) if told else "no supervisor has said why"
