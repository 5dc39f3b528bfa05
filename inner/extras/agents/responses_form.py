"""OpenAI's Responses as chat completions: the default of the OpenAI Agents SDK and of Pydantic AI.

    instructions, message, function_call, function_call_output   ──▶ system, user, assistant with tool_calls, tool
    content, tool_calls   ──▶ [message, function_call]           length ──▶ incomplete: max_output_tokens

Reasoning that a client sends back is left out, as chat completions have none.
Not promised: images, tools that run at OpenAI, responses that the server keeps (previous_response_id, conversation).
"""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any
from uuid import uuid4

from inner.extras.agents.forms import NAME, Body, Form, RequestRefused, events, inside, listed, openai_error, text_of

TEXTS = ("input_text", "output_text", "text")
KEPT = ("previous_response_id", "conversation", "background", "prompt")


def _read(body: Body) -> dict[str, Any]:
    if kept := [key for key in KEPT if body.get(key)]:
        raise RequestRefused(f"`{kept[0]}`: this server keeps no responses. Send the whole history as `input`")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    said = body.get("input")
    items = [{"role": "user", "content": said}] if isinstance(said, str) else listed(body, "input")
    for at, item in enumerate(items):
        _add(messages, item, f"input[{at}]")
    wanted = inside(inside(body, "text"), "format")
    return {
        "messages": messages,
        "tools": [_tool(tool) for tool in listed(body, "tools")],
        "tool_choice": body.get("tool_choice"),
        "max_tokens": body.get("max_output_tokens"),
        "response_format": None if wanted.get("type") in (None, "text") else wanted,
    }


def _add(messages: list[dict[str, Any]], item: Body, where: str) -> None:
    """Add an item of the history. A call belongs to the assistant's message before it, if there is one."""
    match item.get("type", "message"):
        case "message":
            messages.append({"role": item.get("role"), "content": text_of(item.get("content"), TEXTS, where)})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            result = text_of(item.get("output"), TEXTS, where)
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": result})
        case "reasoning":
            pass
        case kind:
            raise RequestRefused(f"{where} has the type {kind!r}, which this model cannot read. Leave it out")


def _tool(tool: Body) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestRefused(f"the tool {tool.get('type')!r} runs at OpenAI. Send a function of your own")
    function = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key)}
    return {"type": "function", "function": function}


def _write(completion: dict[str, Any], body: Body) -> dict[str, Any]:
    (choice,), usage = completion["choices"], completion["usage"]
    said, is_cut = choice["message"].get("content") or "", choice["finish_reason"] == "length"
    calls = choice["message"].get("tool_calls") or ()
    output: list[dict[str, Any]] = []
    if said or not calls:
        text = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        output.append({"type": "message", "id": _id("msg"), "role": "assistant", "content": [text]})
    for call in calls:
        output.append({"type": "function_call", "id": _id("fc"), "call_id": call["id"], **call["function"]})
    return {
        "id": _id("resp"), "object": "response", "created_at": int(time.time()), "model": NAME, "error": None,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [{**item, "status": "completed"} for item in output],
        "usage": {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "instructions": body.get("instructions"), "metadata": {}, "parallel_tool_calls": True,
        "tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto",
        "temperature": None, "top_p": None,
    }  # fmt: skip


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"


def _stream(reply: dict[str, Any]) -> str:
    number = count()
    return events({**event, "sequence_number": next(number)} for event in _events(reply))


def _events(reply: dict[str, Any]) -> Iterator[dict[str, Any]]:
    empty = {**reply, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": empty}
    yield {"type": "response.in_progress", "response": empty}
    for at, item in enumerate(reply["output"]):
        here = {"item_id": item["id"], "output_index": at}
        started = {**item, "status": "in_progress", **({"content": []} if "content" in item else {"arguments": ""})}
        yield {"type": "response.output_item.added", "output_index": at, "item": started}
        yield from _text_events(here, item["content"][0]) if "content" in item else _call_events(here, item)
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{reply['status']}", "response": reply}


def _text_events(here: Body, part: Body) -> Iterator[dict[str, Any]]:
    here, text = {**here, "content_index": 0}, part["text"]
    yield {"type": "response.content_part.added", **here, "part": {**part, "text": ""}}
    yield {"type": "response.output_text.delta", **here, "delta": text, "logprobs": []}
    yield {"type": "response.output_text.done", **here, "text": text, "logprobs": []}
    yield {"type": "response.content_part.done", **here, "part": part}


def _call_events(here: Body, item: Body) -> Iterator[dict[str, Any]]:
    written = item["arguments"]
    yield {"type": "response.function_call_arguments.delta", **here, "delta": written}
    yield {"type": "response.function_call_arguments.done", **here, "name": item["name"], "arguments": written}


RESPONSES = Form(_read, _write, _stream, openai_error)
