"""Defines a teacher: its prices, its request, and how we read its response.

    worst case = (bytes of the request + 1024) · prompt price + max_tokens · completion price    reserved before sending
    cost       = usage.cost, or the tokens of `usage` at your prices, or the worst case          settled afterwards

    response                                    verdict    cost counted
    a choice with text or a tool call           answer     as stated
    402 with Retry-After, 409, 425, 429, 503    again      nothing
    408, 5xx, not JSON, no choices              again      the worst case: the work may have been done
    200 with an error in the body               by its code; usage.cost if given, else the worst case
    an answer that is empty, cut off, or unfit  failed     as stated
    400, 413, 422, flagged input                failed     nothing
    any other 1xx, 2xx                          failed     the worst case
    401, 402, 403, 404, 3xx, HTML               stop       nothing (an HTML 200: the worst case)

Unfit for training (untrusted.py): lone surrogates, control characters, more than 64 characters per requested token. We
ignore a stated cost that is not a number from 0 to a million dollars: then the worst case counts.

A token has at least one byte, so a prompt has no more tokens than bytes. OpenRouter gets your prices as
`max_price`, and refuses providers that cost more.

`read_response` accepts any bytes and never raises. exchange.py returns a Reading, too, for failures before there is a
response.

Not promised: a bound on the cost of images, or on charges beyond an endpoint's own prices.
"""

import email.utils
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Literal, NotRequired, TypedDict

from inner.replay.actions import Message, action_text
from inner.replay.states import TraceState
from inner.replay.untrusted import load_json, printable_start, unfit_text
from inner.replay.wire import wire_messages
from inner.settings.inner import InnerError

OPENROUTER = "https://openrouter.ai/api/v1"
NANO = 1_000_000_000  # nano-dollars per dollar; amounts are whole, so sums are exact
MOST_USD = 1e6  # the limit of one request's cost, in dollars: a larger number is not a cost
MOST_TOKENS = 1e9  # at most so many tokens of one request
LONGEST_TOKEN = 64  # characters of an action per token; the longest tokens are runs of spaces
HIDDEN_TOKENS = 1024  # limit of what a provider's chat template and tool prompt add to a request

FREE = {402, 409, 425, 429, 503}
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
STOP = {401, 402, 403, 404}
Verdict = Literal["answer", "again", "failed", "stop"]


class TeacherAction(TypedDict):
    """One teacher's answer in one state. Without an answer, `action` is "" and `error` says why."""

    state_id: str
    teacher: str
    action: str
    cost_usd: float
    estimated: bool  # the endpoint stated no cost
    seconds: float  # duration of the attempt that got the answer
    attempts: int
    model: str | None  # as named in the response
    error: NotRequired[str]


@dataclass(frozen=True)
class Teacher:
    """A model behind an OpenAI-compatible endpoint. Prices in USD per million tokens, the most that you would pay."""

    model: str
    prompt_usd: float
    completion_usd: float
    tier: int = 0  # tier 1 is asked only if tier 0 disagrees
    base_url: str = OPENROUTER
    key_env: str | None = "OPENROUTER_API_KEY"  # the environment variable that holds the key; None: no key
    max_tokens: int = 2048  # at most so many tokens of the answer, reasoning included
    temperature: float | None = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_usd", "completion_usd"):
            price = getattr(self, name)
            if not 0 <= price <= MOST_USD:
                raise InnerError(
                    f"Teacher({self.model!r}): {name} is {price}. Give USD per million tokens, 0 or more "
                    f"(at most {MOST_USD:g})."
                )
        if not self.base_url.startswith(("http://", "https://")):
            raise InnerError(
                f"Teacher({self.model!r}): base_url is {self.base_url!r}. It must start with http:// or https://."
            )
        if self.max_tokens < 1:
            raise InnerError(f"Teacher({self.model!r}): max_tokens is {self.max_tokens}; it must be 1 or more.")

    @property
    def url(self) -> str:
        return self.base_url.rstrip("/") + "/chat/completions"

    def headers(self) -> dict[str, str]:
        if self.key_env is None:
            return {}
        key = os.environ.get(self.key_env, "").strip()
        if not key:
            raise InnerError(
                f"the key for {self.base_url} is missing: the environment variable {self.key_env} is not set. "
                f"Run `export {self.key_env}=…`, or give the teacher key_env=None if the endpoint needs no key."
            )
        if not (key.isascii() and key.isprintable()):
            raise InnerError(
                f"{self.key_env} holds a key with characters that no HTTP header can carry. Copy the key again, "
                "without line ends or quotes around it."
            )
        return {"Authorization": f"Bearer {key}"}


# List prices of spring 2026. OpenRouter refuses a provider that costs more; then raise the price here.
DEFAULT_TEACHERS = (
    Teacher("anthropic/claude-opus-4.7", prompt_usd=5.0, completion_usd=25.0),
    Teacher("openai/gpt-5", prompt_usd=1.25, completion_usd=10.0),
    Teacher("deepseek/deepseek-v4-pro", prompt_usd=1.74, completion_usd=3.48),
)


@dataclass(frozen=True)
class Reading:
    """The meaning of a response. cost_nano None: the cost is unknown, so the worst case counts."""

    verdict: Verdict
    why: str = ""
    cost_nano: int | None = None
    estimated: bool = True
    after_s: float | None = None
    action: str = ""
    model: str | None = None
    unreachable: bool = False  # the request did not reach the endpoint


def request_body(teacher: Teacher, state: TraceState) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": teacher.model,
        "messages": wire_messages(state["state_messages"]),
        "max_tokens": teacher.max_tokens,
    }
    if teacher.temperature is not None:
        body["temperature"] = teacher.temperature
    if tools := state.get("tools"):
        body["tools"] = tools
    if teacher.base_url.rstrip("/") == OPENROUTER:
        body["provider"] = {"max_price": {"prompt": teacher.prompt_usd, "completion": teacher.completion_usd}}
    return body


def worst_cost_nano(teacher: Teacher, body: Mapping[str, Any]) -> int:
    written = json.dumps([body["messages"], body.get("tools")], ensure_ascii=False)
    sent = len(written.encode("utf-8", "surrogatepass"))
    return tokens_nano(teacher, sent + HIDDEN_TOKENS, teacher.max_tokens)


def tokens_nano(teacher: Teacher, prompt: float, completion: float) -> int:
    return ceil((prompt * teacher.prompt_usd + completion * teacher.completion_usd) * NANO / 1e6)


def read_response(teacher: Teacher, status: int, headers: Mapping[str, str], body: bytes | str, now: float) -> Reading:
    """Read a response: what to do next, and the cost. Pure.   now: Unix seconds, for a Retry-After with a date."""
    after_s = retry_after(headers, now)
    if status != 200:
        return _read_refusal(status, _error_of(body), after_s)
    try:
        doc = load_json(body)
        if not isinstance(doc, dict):
            raise ValueError(f"not an object, but a {type(doc).__name__}")
    except ValueError as error:
        return _not_json(_body_text(body), error)
    cost, estimated = stated_cost(teacher, doc.get("usage"))
    if doc.get("error"):
        reading = _read_refusal(_error_status(doc["error"]), _error_of(body), after_s)
        return Reading(reading.verdict, f"200 with error {reading.why}", cost, estimated, after_s)
    return _read_choice(teacher, doc, cost, estimated)


def stated_cost(teacher: Teacher, usage: Any) -> tuple[int | None, bool]:
    """Return (nano-dollars or None, whether the cost is our estimate)."""
    if not isinstance(usage, dict):
        return None, True
    if usage.get("cost") is not None:
        billed = _billed_nano(usage)
        return billed, billed is None
    prompt, completion = (_valid_amount(usage.get(f"{side}_tokens"), MOST_TOKENS) for side in ("prompt", "completion"))
    if prompt is None or completion is None:
        return None, True
    return tokens_nano(teacher, prompt, completion), True


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Return the seconds that Retry-After asks to wait (a number or an HTTP date); None without a readable header."""
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value, now)
    return max(0.0, seconds) if seconds is not None and isfinite(seconds) else None


def _seconds_until(date: str, now: float) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - now
    except (ValueError, TypeError, IndexError, OverflowError, OSError):  # parsedate and timestamp raise all of these
        return None


def _billed_nano(usage: Mapping[str, Any]) -> int | None:
    """Return the billed cost. With your own provider key, `cost` is only the router's fee; add the provider's cost."""
    parts = [usage["cost"]]
    if usage.get("is_byok"):
        details = usage.get("cost_details")
        parts.append(details.get("upstream_inference_cost") if isinstance(details, dict) else None)
    amounts = [amount for part in parts if (amount := _valid_amount(part, MOST_USD)) is not None]
    return ceil(sum(amounts) * NANO) if len(amounts) == len(parts) else None


def _read_choice(teacher: Teacher, doc: Message, cost: int | None, estimated: bool) -> Reading:
    served = printable_start(doc["model"], 200) if isinstance(doc.get("model"), str) else None
    try:
        choice = doc["choices"][0]
        finish = choice.get("finish_reason")
        refused = choice.get("error")
        action = "" if finish == "error" or refused else _action_of(choice["message"])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        return Reading(
            "again", f"no choices in {printable_start(json.dumps(doc), 120)} ({error!r:.80})", cost, estimated
        )
    if finish == "error" or refused:
        return Reading("again", f"the choice is an error: {printable_start(json.dumps(refused), 120)}", cost, estimated)
    if why := _why_unusable(action, finish, teacher):
        return Reading("failed", why, cost, estimated, model=served)
    return Reading("answer", "", cost, estimated, action=action, model=served)


def _action_of(message: Any) -> str:
    """Return the action of an assistant's message. Raises ValueError if it is not of chat completions' form."""
    content = message.get("content")
    calls = message.get("tool_calls") or []
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(_is_text_part(part) for part in parts):
        raise ValueError("the content is not text")
    if not all(isinstance(call["function"]["name"], str) and call["function"]["name"] for call in calls):
        raise ValueError("a tool call without a name")
    return action_text(message)


def _is_text_part(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and isinstance(part.get("text"), str | None))


def _why_unusable(action: str, finish: Any, teacher: Teacher) -> str | None:
    """Return why this answer cannot be used for training; None if it can."""
    if finish == "length":
        what = "an answer that was cut off" if action else "an empty answer"
        return f"{what} (finish_reason length). Raise the teacher's max_tokens."
    if not action:
        return f"an empty answer (finish_reason {printable_start(str(finish), 40)})."
    if len(action) > LONGEST_TOKEN * teacher.max_tokens:
        return f"an action of {len(action)} characters for at most {teacher.max_tokens} tokens."
    unfit = unfit_text(action)
    return f"the answer has {unfit}: nothing to train on." if unfit else None


def _read_refusal(status: int, why: str, after_s: float | None) -> Reading:
    why = f"{status} {why}".strip()
    flagged = status == 403 and "flagged" in why  # the endpoint refuses this input, not the key
    if status in AGAIN or status >= 500 or (status == 402 and after_s is not None):
        return Reading("again", why, 0 if status in FREE else None, after_s=after_s)
    if status < 300:
        return Reading("failed", why)
    stop = status in STOP or status < 400 or "<html" in why.lower()
    return Reading("stop" if stop and not flagged else "failed", why, 0)


def _not_json(text: str, error: ValueError) -> Reading:
    if text.lstrip()[:1] == "<":
        return Reading("stop", f"HTML instead of JSON: {printable_start(text, 80)!r}. Does base_url end in /v1?")
    return Reading("again", f"not JSON ({printable_start(str(error), 120)}): {printable_start(text, 80)!r}")


def _error_of(body: bytes | str) -> str:
    try:
        doc = load_json(body)
    except ValueError:
        return printable_start(_body_text(body), 160)
    error = doc.get("error") if isinstance(doc, dict) else doc
    return printable_start(str(error.get("message") if isinstance(error, dict) else error))


def _error_status(error: Any) -> int:
    """Return the error's HTTP status; 500 if it names none. (`isdigit` also accepts "²", which is no digit.)"""
    code = str(error.get("code", "")) if isinstance(error, dict) else ""
    return int(code) if re.fullmatch("[1-5][0-9][0-9]", code) else 500


def _body_text(body: bytes | str) -> str:
    return body if isinstance(body, str) else body.decode("utf-8", "replace")


def _valid_amount(value: Any, most: float) -> float | None:
    """Return a number from 0 to `most`; None for any other value."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and 0 <= value <= most else None
