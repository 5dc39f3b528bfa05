"""Anthropic's Messages as chat completions, for agents with the SDK `anthropic` and what is built on it.

    system, user [tool_result, text]  ──▶ system, tool, user          assistant [text, tool_use] ──▶ tool_calls
    content, tool_calls               ──▶ [text, tool_use]            length ──▶ max_tokens, stop ──▶ end_turn

Thoughts that a client sends back are left out, as chat completions have none.  A later system message is the user's.
Not promised: images, documents, Anthropic's own tools, token counts.  cache_control and metadata change nothing.
"""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from inner.extras.agents.forms import NAME, Body, Form, RequestRefused, events, inside, listed, text_of

THOUGHTS = ("thinking", "redacted_thinking")
CHOICES = {"any": "required"}  # -> OpenAI's word; `tool` names a function, which the replica refuses, too
STOPS = {"length": "max_tokens", "tool_calls": "tool_use"}


def _read(body: Body) -> dict[str, Any]:
    system = text_of(body.get("system"), ("text",), "`system`")
    messages = [{"role": "system", "content": system}] if system else []
    for at, message in enumerate(listed(body, "messages")):
        for turn in _turns(message, f"messages[{at}]"):
            _add(messages, turn)
    choice = inside(body, "tool_choice").get("type")
    return {
        "messages": messages,
        "tools": [_tool(tool) for tool in listed(body, "tools")],
        "tool_choice": CHOICES.get(str(choice), choice),
        "max_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
    }


def _add(messages: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Add a turn. The Claude Agent SDK sends system messages behind the user's, and many templates refuse those."""
    is_note = turn["role"] == "system" and bool(messages)
    if is_note and messages[-1]["role"] == "user":
        messages[-1]["content"] += f"\n\n{turn['content']}"
    else:
        messages.append({**turn, "role": "user"} if is_note else turn)


def _turns(message: Body, where: str) -> Iterator[dict[str, Any]]:
    """Yield a message's turns: the results of tools, then the text with its calls."""
    content = message.get("content")
    parts = listed(message, "content") if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    for part in (part for part in parts if part.get("type") == "tool_result"):
        result = text_of(part.get("content"), ("text",), where)
        failed = part.get("is_error") is True and not result.startswith(("Error", '{"error"'))  # hints look for these
        told = f"Error: {result}" if failed else result
        yield {"role": "tool", "tool_call_id": str(part.get("tool_use_id")), "content": told}
    calls = [_call(part) for part in parts if part.get("type") == "tool_use"]
    said = [part for part in parts if part.get("type") not in ("tool_result", "tool_use", *THOUGHTS)]
    if said or calls:
        own = {"tool_calls": calls} if calls else {}
        yield {"role": message.get("role"), "content": text_of(said, ("text",), where), **own}


def _call(part: Body) -> dict[str, Any]:
    function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {}, ensure_ascii=False)}
    return {"id": str(part.get("id")), "type": "function", "function": function}


def _tool(tool: Body) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise RequestRefused(f"the tool {tool.get('type')!r} runs at Anthropic. Send a tool of your own, with a schema")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    told = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {**function, **told}}


def _write(completion: dict[str, Any], body: Body) -> dict[str, Any]:
    (choice,), usage = completion["choices"], completion["usage"]
    text, calls = choice["message"].get("content") or "", choice["message"].get("tool_calls") or ()
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}] if text or not calls else []
    for call in calls:
        parts.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input(call)})
    return {
        "id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant", "model": NAME, "content": parts,
        "stop_reason": STOPS.get(choice["finish_reason"], "end_turn"), "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }  # fmt: skip


def _input(call: Body) -> dict[str, Any]:
    written = call["function"]["arguments"]
    try:
        found = json.loads(written)
    except ValueError:
        found = written
    return found if isinstance(found, dict) else {"arguments": found}


def _stream(reply: dict[str, Any]) -> str:
    return events(_events(reply))


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"type": "message_start", "message": {**reply, "content": [], "stop_reason": None}}
    for at, part in enumerate(reply["content"]):
        if part["type"] == "text":
            empty, delta = {**part, "text": ""}, {"type": "text_delta", "text": part["text"]}
        else:
            empty = {**part, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(part["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": at, "content_block": empty}
        yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    ended = {"stop_reason": reply["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": reply["usage"]}
    yield {"type": "message_stop"}


def _fail(refusal: RequestRefused) -> dict[str, Any]:
    text = str(refusal)
    if refusal.code == "context_length_exceeded":
        text = f"prompt is too long: {text}"  # the words by which Anthropic's clients know it
    return {"type": "error", "error": {"type": refusal.code, "message": text}}


MESSAGES = Form(_read, _write, _stream, _fail)
