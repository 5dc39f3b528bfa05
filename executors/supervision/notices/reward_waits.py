"""Slots that wait because their reward failed: number of failures, time of the next start, and costs.

    lost, by_reward, reward_failures, again_in_s ──▶ "! the reward failed: r00 2 of 6 times in a row, again in 3 min; …"

Not promised: the exact time of the start, which needs a running supervisor.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.runlog.reader import SUPERVISOR, Report
from diloco.units import dollars, duration
from executors.supervision.money.bills import costs

SETTLES = ("launched", "found", "lost", "ended")


def reward_waits(report: Report, now: float) -> list[str]:
    """Return one line if any slot waits, else [].   now: Unix time."""
    if report.done or report.stopped:
        return []
    waiting = {slot: e for slot, e in _newest_events(report).items() if e["event"] == "lost" and e.get("again_in_s")}
    waiting = {slot: e for slot, e in waiting.items() if slot in report.wanted.slot_names}
    if not waiting:
        return []
    slots = ", ".join(_wait_in_words(slot, e, now) for slot, e in sorted(waiting.items()))
    return [f"the reward failed: {slots}{_cost_in_words(waiting, report, now)}"]


def _newest_events(report: Report) -> dict[str, Mapping[str, Any]]:
    """Return per slot a supervisor's newest event about its launches."""
    return {e["slot"]: e for e in report.of_kind(*SETTLES) if e["who"].startswith(SUPERVISOR)}


def _wait_in_words(slot: str, end: Mapping[str, Any], now: float) -> str:
    left = max(0.0, end["at"] + end["again_in_s"] - now)
    row = f"{end.get('reward_failures', 1)} of {end.get('reward_limit', 1)} times in a row"
    return f"{slot} {row}, again in {duration(left)}"


def _cost_in_words(waiting: Mapping[str, Mapping[str, Any]], report: Report, now: float) -> str:
    """Return a phrase with the cost of the sessions that the reward ended; "" if it is 0."""
    ended = {(slot, e["attempt"]) for slot, e in waiting.items() for e in _streak(report.of_kind("lost"), slot, e)}
    usd = sum(bill.usd for bill in costs(report, now).bills if (bill.slot, bill.attempt) in ended)
    return f"; those sessions cost {dollars(usd)}" if usd else ""


def _streak(lost: Sequence[Mapping[str, Any]], slot: str, newest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return this slot's consecutive ends by its reward, up to `newest`."""
    own = [e for e in lost if e["slot"] == slot and e.get("by_reward") and e["at"] <= newest["at"]]
    return own[-newest.get("reward_failures", 1) :]
