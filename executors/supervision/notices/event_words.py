"""Formats an event of a run's log as a line of key=value, for people and for grep.

    {"event": "lost", "slot": "r01", …} ──▶ event=lost at=12.31 slot=r01 …

Not promised: every field; fields that only programs need are left out.
"""

from typing import Any

SAID = (
    "at", "event", "slot", "who", "generation", "tail", "handle", "launched_at", "useful", "own_fault", "by_reward",
    "began_at", "ended_at",
)  # fmt: skip


def event_line(event: dict[str, Any], began: float) -> str:
    return key_values(event_fields(event, began))


def event_fields(event: dict[str, Any], began: float) -> dict[str, Any]:
    about = {"slot": event["slot"]} if event["slot"] else {}
    rest = {k: v for k, v in event.items() if k not in SAID and v is not None}
    generation = {"generation": event["generation"]} if event["generation"] else {}
    return {"event": event["event"], "at": round(event["at"] - began, 2), **about, **generation, **rest}


def key_values(fields: dict[str, Any]) -> str:
    return " ".join(f"{k}={_value_in_words(v)}" for k, v in fields.items())


def _value_in_words(value: Any) -> str:
    text = " ".join(str(value).split())
    return '"' + text.replace('"', "'") + '"' if " " in text or not text else text
