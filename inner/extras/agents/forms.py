"""The forms in which agents' clients ask and are answered: each is translated into chat completions and back.

    POST /v1/chat/completions   OpenAI's chat completions       here: every other form goes through this one
    POST /v1/responses          OpenAI's Responses              responses_form.py
    POST /v1/messages           Anthropic's Messages            messages_form.py

    request ── read ──▶ chat request ──▶ replica ──▶ completion ── write ──▶ reply ── stream ──▶ server-sent events

Not promised: fields of a request that the model cannot heed, and that are not refused by name.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

NAME = "policy"  # the model's name in replies; a request may name any
Body = Mapping[str, Any]


class RequestRefused(Exception):
    """A request that gets an HTTP error.   status: its number.   code: OpenAI's word for it."""

    def __init__(self, text: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Form:
    """One form of requests and replies.   write: takes the completion and the form's own request.

    stream: returns the reply's server-sent events, as one text.   read: may raise RequestRefused."""

    read: Callable[[Body], dict[str, Any]]
    write: Callable[[dict[str, Any], Body], dict[str, Any]]
    stream: Callable[[dict[str, Any]], str]
    fail: Callable[[RequestRefused], dict[str, Any]]


def completion(reply: Body, *, ended: str, read: int, written: int) -> dict[str, Any]:
    """Return a chat completion.   ended: its finish_reason.   read, written: tokens of the prompt and of the reply."""
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    choice = {"index": 0, "message": dict(reply), "finish_reason": ended, "logprobs": None}
    return {
        "id": f"chatcmpl-{uuid4().hex}", "object": "chat.completion", "created": int(time.time()), "model": NAME,
        "choices": [choice], "usage": usage,
    }  # fmt: skip


def openai_error(refusal: RequestRefused) -> dict[str, Any]:
    return {"error": {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code, "param": None}}


def events(named: Iterable[Body]) -> str:
    """Return events that clients know by their type, as a stream."""
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in named)


def text_of(content: Any, kinds: tuple[str, ...], where: str) -> str:
    """Return the text of a message's content: a text, or a list of parts of these kinds.   Raises RequestRefused."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise RequestRefused(f"{where} has a part of the type {kind!r}. This model reads text alone; leave it out")
    return "".join(part["text"] for part in parts)


def listed(body: Body, key: str) -> list[Any]:
    """Return the list of objects under a request's key.   Raises RequestRefused."""
    found = body.get(key) or []
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise RequestRefused(f"`{key}` must be a list of objects")
    return found


def inside(body: Body, key: str) -> Body:
    """Return the object under a request's key, {} if there is none.   Raises RequestRefused."""
    found = body.get(key) or {}
    if not isinstance(found, Mapping):
        raise RequestRefused(f"`{key}` must be an object")
    return found


def _chat_stream(reply: dict[str, Any]) -> str:
    """Return the reply as one event, and its end as another."""
    (choice,) = reply["choices"]
    calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls") or ())]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {**reply, "object": "chat.completion.chunk"}
    first = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
    last = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    return "".join(f"data: {event}\n\n" for event in [json.dumps(first), json.dumps(last), "[DONE]"])


CHAT = Form(read=dict, write=lambda reply, _: reply, stream=_chat_stream, fail=openai_error)
