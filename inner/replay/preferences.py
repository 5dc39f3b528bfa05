"""Read a row of TRL's preference format as a pair.

    {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}                     texts: the prompt is a user's message
    {"prompt": [user], "chosen": [assistant], "rejected": [assistant]}       messages
    {"chosen": [user, assistant], "rejected": [user, assistant]}             the prompt is their common beginning
        ──▶  state_messages │ chosen │ rejected

`tools` and `weight` stay. All other columns are ignored.

Not promised: sides that differ in more than one turn; a chat within one text (HH-RLHF).
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from inner.replay.actions import Message, action_text
from inner.replay.untrusted import load_json

SIDES = ("chosen", "rejected")
NAMES = ("state_id", "id", "prompt_id")
FORMS = 'state_messages, chosen and rejected, or {"prompt": "…", "chosen": "…", "rejected": "…"}'


def as_pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row in the form that `save_pairs` writes.   Raises ValueError if it has neither form."""
    if "state_messages" in row:
        return {**row}
    if missing := [side for side in SIDES if side not in row]:
        raise ValueError(f"no {missing[0]!r}; a pair has {FORMS}. This row has {', '.join(map(repr, row)):.200}")
    sides = [_messages(row[side], "assistant") for side in SIDES]
    before = (side[:-1] for side in sides)  # the last message is the turn
    common = [one for one, _ in takewhile(lambda both: both[0] == both[1], zip(*before, strict=False))]
    prompt = _prompt(row.get("prompt"), common)
    if not prompt:
        raise ValueError(f"no prompt; a pair has {FORMS}")
    turns = [_only_turn(name, side[len(common) :]) for name, side in zip(SIDES, sides, strict=True)]
    name = next((str(row[key]) for key in NAMES if row.get(key)), f"{str(prompt[-1].get('content'))!r:.40}")
    kept = {key: row[key] for key in ("tools", "weight") if row.get(key) is not None}
    if isinstance(kept.get("tools"), str):
        kept["tools"] = load_json(kept["tools"])
    pair = {"state_id": name, "state_messages": prompt, "n_teachers_agreeing": 1, **kept}
    return pair | dict(zip(SIDES, turns, strict=True))


def _prompt(prompt: Any, common: list[Message]) -> list[Message]:
    """Return the messages before the turn, of the column `prompt` and of what both sides begin with."""
    if common and not isinstance(prompt, list):
        return common
    before = _messages(prompt, "user") if prompt else []
    return common if common[: len(before)] == before and common else before + common


def _messages(value: Any, role: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    found = [value] if isinstance(value, dict) else value
    if not isinstance(found, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found):
        raise ValueError(f"{value!r:.60} is neither a text nor messages with a role and a content")
    return found


def _only_turn(name: str, rest: list[Message]) -> str:
    if len(rest) != 1 or rest[0]["role"] != "assistant":
        roles = ", ".join(str(message["role"]) for message in rest) or "none"
        raise ValueError(f"{name} must have one message of the assistant after the prompt; it has: {roles}")
    return action_text(rest[0])
