"""An action as one string, and the test whether two actions are the same.

    {"content": "Let me look.", "tool_calls": [{"function": {"name": "ls", "arguments": "{\\"path\\": \\".\\"}"}}]}
        action_text     ──▶   Let me look.
                              <tool_call>
                              {"name": "ls", "arguments": {"path": "."}}
                              </tool_call>
        action_message  ◀──   (arguments as an object, as chat templates want them)
        action_key      ──▶   [["ls", {"path": "."}]]        what is compared: the calls, not the words around them

Without a tool call the text itself is compared, line by line, with runs of blanks as one and line starts kept. Turns
that are thoughts and a command in some other form are compared by commands.py.

JSON that is deeper than untrusted.py allows is not a call: it stays the text that it is.

Not promised: meaning. `cat a` and `cat ./a` are two actions, and so are "yes" and "Yes".
"""

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from inner.replay.untrusted import load_json

Message = dict[str, Any]

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # what an endpoint gets to see of a message


def action_text(message: Mapping[str, Any]) -> str:
    """The assistant's turn as one string. Tool calls in the form that Qwen and Hermes models write them."""
    calls = [_call_text(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(part for part in (plain_text(message.get("content")).strip(), *calls) if part)


def action_message(text: str) -> Message:
    """The assistant's turn that `action_text` wrote down. Text that only looks like a call stays text."""
    calls = [call for body in _CALL.findall(text) if (call := _parse_call(body)) is not None]
    if not calls:
        return {"role": "assistant", "content": text}
    words = _CALL.sub(lambda found: found[0] if _parse_call(found[1]) is None else "", text).strip()
    return {"role": "assistant", "content": words, "tool_calls": [{"type": "function", "function": c} for c in calls]}


def action_key(text: str) -> str:
    """Return an action's key: two actions are the same if their keys are. "" is not an action."""
    calls = action_message(text).get("tool_calls")
    if calls:
        return calls_key([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    return text_key(text)


def calls_key(calls: Sequence[tuple[str, Any]]) -> str:
    """Return the key of calls, by names and arguments."""
    named = [[name, _canonical_value(arguments)] for name, arguments in calls]
    return json.dumps(named, sort_keys=True, ensure_ascii=False)


def text_key(text: str) -> str:
    """Line by line, runs of blanks as one, line starts kept."""
    lines = unicodedata.normalize("NFC", text).strip().splitlines()
    return "\n".join(line[: len(line) - len(line.lstrip())] + " ".join(line.split()) for line in lines)


def plain_text(content: Any) -> str:
    """A message's content, whether it is a string, a list of parts or missing."""
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def wire_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages as an OpenAI-compatible endpoint takes them: arguments as JSON text, every call with an id."""
    wired: list[Message] = []
    open_ids: list[str] = []  # calls still without an answer, oldest first
    for message in messages:
        sent = {key: message[key] for key in _SENT if key in message}
        if sent.get("tool_calls"):
            sent["tool_calls"] = [
                _wire_call(call, f"call_{len(wired)}_{i}") for i, call in enumerate(sent["tool_calls"])
            ]
            open_ids = [call["id"] for call in sent["tool_calls"]]
            sent.setdefault("content", None)
        elif sent.get("role") == "tool":
            oldest = open_ids.pop(0) if open_ids else f"call_{len(wired)}"
            sent["tool_call_id"] = sent.get("tool_call_id") or oldest
            sent["content"] = plain_text(sent.get("content"))
        wired.append(sent)
    return wired


def _call_text(function: Mapping[str, Any]) -> str:
    body = json.dumps({"name": function["name"], "arguments": _parse_arguments(function)}, ensure_ascii=False)
    return "<tool_call>\n" + body.replace("</", "<\\/") + "\n</tool_call>"  # the same JSON, and no early end


def _parse_arguments(function: Mapping[str, Any]) -> Any:
    """Parse a call's arguments as JSON; a model's broken JSON stays a text."""
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
    return {"name": call["name"], "arguments": _parse_arguments(call)}


def _wire_call(call: Mapping[str, Any], spare_id: str) -> Message:
    function = call["function"]
    arguments = call["function"].get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call.get("id") or spare_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }


def _canonical_value(value: Any) -> Any:
    """Arguments as they count: 1.0 is 1, null is not given, blanks around a string do not matter."""
    if isinstance(value, dict):
        return {key: _canonical_value(v) for key, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_canonical_value(v) for v in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return text_key(value) if isinstance(value, str) else value
