"""One platform that does not answer (outage.py): the next request, the events for the log, and the words for the user.

Not promised: that the platform's processes run; heartbeats show that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executors.platforms.base import LAUNCH

REPORT_S = 60.0  # seconds from the first lost answer to a report, and between two reports
FRESH_S = 1.5 * REPORT_S  # age up to which a reported outage counts as still open
FIRST_PAUSE_S = 1.0
LOST_PAUSE_S = 4.0
REFUSED_PAUSE_S = 15.0


@dataclass
class Outage:
    """One platform without an answer.   since: start per launch.   ask_at: next request.   reported_at: None: never."""

    since: dict[str, float] = field(default_factory=dict)
    why: str = ""
    refused: bool = False
    pause: float = 0.0
    ask_at: float = float("-inf")
    reported_at: float | None = None

    def again(self, now: float, why: str, refused: bool) -> None:
        """Count one more request without an answer, and set the time of the next request."""
        most = REFUSED_PAUSE_S if refused else LOST_PAUSE_S
        self.pause = min(most, 2 * self.pause) if self.pause else FIRST_PAUSE_S
        self.why = why
        self.refused = refused
        self.ask_at = now + self.pause

    def due(self, now: float) -> bool:
        """Whether a report is due."""
        if self.reported_at is not None:
            return now - self.reported_at >= REPORT_S
        return self.refused or now - self.began >= REPORT_S

    @property
    def began(self) -> float:
        return min(self.since.values())

    def event(self, name: str, now: float) -> dict[str, Any]:
        """Return the event for the log.   name: the platform's name."""
        about = {"event": "platform_silent", "platform": name, "slots": sorted(self.since)}
        return {**about, "seconds": round(now - self.began, 1), "refused": self.refused, "text": self.why}

    def in_words(self, name: str, now: float) -> str:
        return outage_in_words(self.event(name, now))


def outage_in_words(event: Mapping[str, Any]) -> str:
    """Return a line for the user."""
    slots = ", ".join(map(str, event.get("slots", ())))
    seconds = event.get("seconds", 0)
    launches = event.get("platform") == LAUNCH
    name = "the platform" if launches else event.get("platform")
    what = f"{'cannot start' if launches else 'no news of'} {slots}"
    verb = "refuses us" if event.get("refused") else "gives no answer"
    return f"{name} {verb}, for {seconds:.0f} s: {what}; {event.get('text', '')}"


def open_outages(events: Sequence[Mapping[str, Any]], now: float) -> list[str]:
    """Return lines on outages that the log reports and that have not ended.   now: Unix time."""
    newest = {e.get("platform"): e for e in events if e["event"] in ("platform_silent", "platform_answers")}
    silent = [e for e in newest.values() if e["event"] == "platform_silent" and now - e["at"] < FRESH_S]
    return [outage_in_words(e) for e in silent]
