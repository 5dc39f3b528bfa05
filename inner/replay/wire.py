"""Converts messages to the form that OpenAI-compatible endpoints accept.

    {"arguments": {"path": "."}}  ──▶  {"id": "call_0_0", "arguments": "{\"path\": \".\"}"}   ids for answers

Not promised: that an endpoint knows each tool.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inner.replay.actions import Message, plain_text

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")  # the fields of a message that an endpoint gets


def wire_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages in the endpoints' form: arguments as JSON text, an id for every call."""
    wired: list[Message] = []
    open_ids: list[str] = []  # calls without a result yet, oldest first
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


def _wire_call(call: Mapping[str, Any], spare_id: str) -> Message:
    function = call["function"]
    arguments = call["function"].get("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {
        "id": call.get("id") or spare_id,
        "type": "function",
        "function": {"name": function["name"], "arguments": written},
    }
