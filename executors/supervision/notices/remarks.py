"""All messages to the user about a run: its troubles, and the replicas' waits.

    find_troubles (diloco/views/troubles.py) ─┐
    platforms, rewards, disk, alerts: here ────┴▶ all_troubles ─┬▶ `--alert URL` (alerts.py)
    newest warnings, notes of replicas ─────────────────────────┴▶ remark_lines ─▶ `diloco status`, `diloco watch`

A replica's event that its own disk was full is hidden once the replica has joined.  A heartbeat cannot say that the
run's disk is full, as there is no room for one: `full_words` looks.

Not promised: quotas of a user or a bucket, which replicas report when a write fails; all messages: `remark_lines`
returns only the most urgent.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from diloco.events import WARNINGS, event_text
from diloco.runlog.reader import Report
from diloco.runlog.summary import solo_words
from diloco.views.overview import silent_s
from diloco.views.trouble import trouble
from diloco.views.troubles import Spending, Trouble, find_troubles
from executors.supervision.money.bills import costs
from executors.supervision.notices.reward_waits import reward_waits
from executors.supervision.outage import open_outages
from executors.supervision.slots.unserved import unserved
from rendezvous.records.records import Beat

MOST_LINES = 8
LEAST = 64 << 10  # bytes of a disk; with fewer, not even heartbeats and logs can be written reliably


def full_words(url: str) -> str:
    """Return a warning if the run is a folder of this machine and its disk is full; else ""."""
    scheme, colon, rest = url.partition("://")
    if colon and scheme != "file":
        return ""
    try:
        disk = os.statvfs(rest if colon else url)
    except OSError:
        return ""
    free = disk.f_bavail * disk.f_frsize
    if free >= LEAST or disk.f_blocks == 0:
        return ""
    size = disk.f_blocks * disk.f_frsize
    return f"the run's disk is full ({free} bytes left of {size / 1e6:.0f} MB): all wait; free some, they go on"


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
    advice = "Replicas go on; none is replaced until it answers"
    texts = open_outages(report.events, now)
    return [trouble("platform_silent", "; ".join(texts), advice, step=report.head)] if texts else []


def slot_unserved(report: Report, now: float) -> list[Trouble]:
    advice = "`diloco logs RUN supervisor` has its words; `diloco resume RUN` where no supervisor lives"
    return [trouble("slot_unserved", text, advice, step=report.head) for text in unserved(report, now)]


def alerts_failed(report: Report, now: float) -> list[Trouble]:
    """Return a trouble if the newest alert did not reach its webhook."""
    newest = report.of_kind("alerted", "alert_failed")[-1:]
    if not newest or newest[0]["event"] == "alerted":
        return []
    text = f"alerts do not reach {newest[0].get('host')}: {newest[0].get('text')}"
    advice = "Try its address with curl, then `diloco resume RUN --alert URL`"
    return [trouble("alerts_failed", text, advice, step=report.head)]


HOST_DETECTORS: Mapping[str, Callable[[Report, float], list[Trouble]]] = {
    "disk_full": disk_full,
    "reward_failed": reward_failed,
    "platform_silent": platform_silent,
    "slot_unserved": slot_unserved,
    "alerts_failed": alerts_failed,
}


def all_troubles(report: Report, now: float) -> list[Trouble]:
    """Return all troubles of a run, the most urgent first.   now: Unix time."""
    own = [found for detector in HOST_DETECTORS.values() for found in detector(report, now)]
    return [*own, *found_in_log(report, now)]


def found_in_log(report: Report, now: float) -> list[Trouble]:
    """Return the troubles that can be found in the log and the run's costs."""
    spent = costs(report, now)
    return find_troubles(report, now, Spending(spent.usd, spent.hours, spent.rate_soon))


def remark_lines(report: Report, now: float) -> list[str]:
    """Return lines on troubles, latest warnings and replicas' notes, the most urgent first; at most MOST_LINES."""
    lines = [f"! {report.damage}"] if report.damage else []
    lines += [f"! {found.text}" for kind in HOST_DETECTORS for found in HOST_DETECTORS[kind](report, now)]
    lines += [f"! {found.line}" for found in found_in_log(report, now)]
    loud = [e for e in report.of_kind(*WARNINGS) if not found_room(e, report)]
    lines += [f"! {e['who']}: {e['event'].replace('_', ' ')}: {event_text(e)}" for e in loud[-2:]]
    lines += [f"  {b.slot}: {b.note}" for b in report.beats.values() if b.note and is_listening(b, report, now)]
    if report.passed_over:
        lines.append(f"  {report.passed_over} lines or objects under log/ are not events; passed over")
    if words := solo_words(report):
        lines.append(f"! {words}")
    if report.wanted.stop and not report.done:
        lines.append("! a stop was asked for; `diloco resume` goes on")
    return lines[:MOST_LINES]


def is_listening(beat: Beat, report: Report, now: float) -> bool:
    return beat.phase != "left" and now - beat.at <= silent_s(report.url) and not report.done
