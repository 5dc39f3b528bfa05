"""Write an action as one string, and test whether two actions are the same.

    {"content": "Let me look.", "tool_calls": [{"function": {"name": "ls", "arguments": "{\\"path\\": \\".\\"}"}}]}
        action_text     ──▶   Let me look.
                              <tool_call>
                              {"name": "ls", "arguments": {"path": "."}}
                              </tool_call>
        action_message  ◀──   (arguments as an object, as chat templates need them)
        action_key      ──▶   [["ls", {"path": "."}]]        to compare: only the calls, not the text around them

Without a tool call, texts are compared line by line: a run of spaces counts as one, and indentation is kept. If turns
contain thoughts and a command in another form, use commands.py to compare these turns.

JSON that is nested deeper than untrusted.py allows is not a call; it stays text.

Not promised: a comparison of meaning. `cat a` and `cat ./a` are two actions, and so are "yes" and "Yes".
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from inner.replay.untrusted import load_json

Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def action_text(message: Mapping[str, Any]) -> str:
    """Return the assistant's turn as one string. Tool calls are written as Qwen and Hermes models write them."""
    calls = [_call_text(call.get("function", call)) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (plain_text(message.get("content")).strip(), *calls) if part)


def action_message(text: str) -> Message:
    """Return the assistant's turn from action_text's string. Text that only looks like a call stays text."""
    calls = [call for body in _CALL.findall(text) if (call := _parse_call(body)) is not None]
    if not calls:
        return {"role": "assistant", "content": text}
    words = _CALL.sub(lambda found: found[0] if _parse_call(found[1]) is None else "", text).strip()
    return {"role": "assistant", "content": words, "tool_calls": [{"type": "function", "function": c} for c in calls]}


def action_key(text: str) -> str:
    """Return an action's key. Two actions are the same if their keys are equal. "" means no action."""
    calls = action_message(text).get("tool_calls")
    if calls:
        return calls_key([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    return text_key(text)


def calls_key(calls: Sequence[tuple[str, Any]]) -> str:
    """Return the key of calls, from names and arguments."""
    named = [[name, _canonical_value(arguments)] for name, arguments in calls]
    return json.dumps(named, sort_keys=True, ensure_ascii=False)


def text_key(text: str) -> str:
    """Return a text's key: line by line, runs of spaces as one, indentation kept."""
    lines = unicodedata.normalize("NFC", text).strip().splitlines()
    return "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines)


def plain_text(content: Any) -> str:
    """Return a content (a string, a list of parts, or None) as a string. Images become `[image]`."""
    if isinstance(content, list):
        return "".join(_part_text(part) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _part_text(part: Mapping[str, Any]) -> str:
    return "[image]" if "image" in str(part.get("type")) else str(part.get("text") or "")


def _call_text(function: Mapping[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": parse_arguments(function)}, ensure_ascii=False)
    return "<tool_call>\n" + body.replace("</", "<\\/") + "\n</tool_call>"  # same JSON; cannot end the tag early


def parse_arguments(function: Mapping[str, Any]) -> Any:
    """Parse a call's arguments as JSON. Broken JSON of a model stays text."""
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return load_json(arguments or "{}")
    except ValueError:
        return arguments


def _parse_call(body: str) -> Message | None:
    try:
        call = load_json(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    return {"name": call["name"], "arguments": parse_arguments(call)}


def _canonical_value(value: Any) -> Any:
    """Return arguments as they are compared: 1.0 equals 1, null equals a missing key, outer spaces do not count."""
    if isinstance(value, dict):
        return {key: _canonical_value(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_canonical_value(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return text_key(value) if isinstance(value, str) else value
