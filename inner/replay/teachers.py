"""One teacher: its price, its request, and how its response reads.

    worst case = (bytes of the request + 1024) · prompt price + max_tokens · completion price    reserved before sending
    cost       = usage.cost, or the tokens of `usage` at our prices, or the worst case           settled afterwards

    response                                    verdict    cost counted
    a choice with text or a tool call           answer     what it says
    402 with Retry-After, 409, 425, 429, 503    again      nothing
    408, 5xx, a dropped connection              again      the worst case: the work may have been done
    200 with an error in the body               by its code; usage.cost if given, else the worst case
    an answer without text or call              failed     what it says
    400, 413, 422, flagged input                failed     nothing
    401, 402, 403, 404, HTML                    stop       nothing (an HTML 200: the worst case)

A token is at least one byte, so a prompt has no more tokens than bytes. Our prices travel along as OpenRouter's
`max_price`: it refuses a provider that asks more.

Not promised: a bound on images, or on what an endpoint charges beyond its own prices.
"""

import email.utils
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, Literal, NotRequired, TypedDict

from inner.base import InnerError
from inner.replay.actions import Message, action_text, wire_messages
from inner.replay.states import TraceState

OPENROUTER = "https://openrouter.ai/api/v1"
NANO = 1_000_000_000  # money is counted in whole nano-dollars: sums are exact
HIDDEN_TOKENS = 1024  # what a provider's chat template and tool prompt may add to what we send

FREE = {402, 409, 425, 429, 503}
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529}
STOP = {401, 402, 403, 404}
Verdict = Literal["answer", "again", "failed", "stop"]


class TeacherAction(TypedDict):
    """One teacher's answer in one state. `action` is "" and `error` says why where there is none."""

    state_id: str
    teacher: str
    action: str
    cost_usd: float
    estimated: bool  # the endpoint stated no cost
    seconds: float  # of the attempt that was answered
    attempts: int
    model: str | None  # that says it answered
    error: NotRequired[str]


@dataclass(frozen=True)
class Teacher:
    """A model behind an OpenAI-compatible endpoint. Prices in USD per million tokens: the most you agree to pay."""

    model: str
    prompt_usd: float
    completion_usd: float
    tier: int = 0  # tier 1 is asked only where tier 0 disagrees
    base_url: str = OPENROUTER
    key_env: str | None = "OPENROUTER_API_KEY"  # the environment variable that holds the key; None: no key
    max_tokens: int = 2048  # reasoning included
    temperature: float | None = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt_usd", "completion_usd"):
            price = getattr(self, name)
            if not (isfinite(price) and price >= 0):
                raise InnerError(f"Teacher({self.model!r}): {name} is {price}. Give USD per million tokens, 0 or more.")
        if not self.base_url.startswith(("http://", "https://")):
            raise InnerError(
                f"Teacher({self.model!r}): base_url is {self.base_url!r}. It starts with http:// or https://."
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
        return {"Authorization": f"Bearer {key}"}


# List prices of spring 2026. A provider that asks more is refused by OpenRouter; then raise the price here.
DEFAULT_TEACHERS = (
    Teacher("anthropic/claude-opus-4.7", prompt_usd=5.0, completion_usd=25.0),
    Teacher("openai/gpt-5", prompt_usd=1.25, completion_usd=10.0),
    Teacher("deepseek/deepseek-v4-pro", prompt_usd=1.74, completion_usd=3.48),
)


@dataclass(frozen=True)
class Reading:
    """What a response means. cost_nano None: nobody can say, count the worst case."""

    verdict: Verdict
    why: str = ""
    cost_nano: int | None = None
    estimated: bool = True
    after_s: float | None = None
    action: str = ""
    model: str | None = None
    unreachable: bool = False  # it never got there


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
    sent = len(json.dumps([body["messages"], body.get("tools")], ensure_ascii=False).encode())
    return tokens_nano(teacher, sent + HIDDEN_TOKENS, teacher.max_tokens)


def tokens_nano(teacher: Teacher, prompt: float, completion: float) -> int:
    return ceil((prompt * teacher.prompt_usd + completion * teacher.completion_usd) * NANO / 1e6)


def read_response(teacher: Teacher, status: int, headers: Mapping[str, str], text: str, now: float) -> Reading:
    """Pure: a response -> what to do next and what it cost. `now` in Unix seconds, for a dated Retry-After."""
    after_s = retry_after(headers, now)
    if status != 200:
        return _refused(status, _error_of(text), after_s)
    try:
        doc = json.loads(text)
        if not isinstance(doc, dict):
            raise ValueError(f"a {type(doc).__name__}")
    except ValueError as error:
        return _not_json(text, error)
    cost, estimated = stated_cost(teacher, doc.get("usage"))
    if doc.get("error"):
        reading = _refused(_code(doc["error"]), _error_of(text), after_s)
        return Reading(reading.verdict, f"200 with error {reading.why}", cost, estimated, after_s)
    return _choice(doc, cost, estimated)


def stated_cost(teacher: Teacher, usage: Any) -> tuple[int | None, bool]:
    """(nano-dollars or None, whether they are our estimate)"""
    if not isinstance(usage, dict):
        return None, True
    upstream = (usage.get("cost_details") or {}).get("upstream_inference_cost") if usage.get("is_byok") else 0
    if _amount(usage.get("cost")) is not None:  # with a key of your own, `cost` is the router's fee alone
        return ceil((usage["cost"] + (_amount(upstream) or 0)) * NANO), False
    prompt, completion = _amount(usage.get("prompt_tokens")), _amount(usage.get("completion_tokens"))
    if prompt is None or completion is None:
        return None, True
    return tokens_nano(teacher, prompt, completion), True


def retry_after(headers: Mapping[str, str], now: float) -> float | None:
    """Seconds to wait, from either form of Retry-After: a number or an HTTP date."""
    value = headers.get("retry-after")
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    return max(0.0, seconds) if isfinite(seconds) else None


def _choice(doc: Message, cost: int | None, estimated: bool) -> Reading:
    served = doc["model"] if isinstance(doc.get("model"), str) else None
    try:
        choice = doc["choices"][0]
        action, finish = action_text(choice["message"]), choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        return Reading("again", f"no choices in {json.dumps(doc)[:120]}", cost, estimated)
    if finish == "error" or choice.get("error"):
        return Reading("again", f"the choice is an error: {json.dumps(choice.get('error'))[:120]}", cost, estimated)
    if not action:
        more = " Raise the teacher's max_tokens." if finish == "length" else ""
        return Reading("failed", f"an empty answer (finish_reason {finish}).{more}", cost, estimated, model=served)
    return Reading("answer", "", cost, estimated, action=action, model=served)


def _refused(status: int, why: str, after_s: float | None) -> Reading:
    cost = None if status in AGAIN - FREE else 0
    why = f"{status} {why}".strip()
    flagged = status == 403 and "flagged" in why  # this input was refused, not this key
    if status in AGAIN or (status == 402 and after_s is not None):
        return Reading("again", why, cost, after_s=after_s)
    stop = status in STOP or 300 <= status < 400 or "<html" in why.lower()
    return Reading("stop" if stop and not flagged else "failed", why, cost)


def _not_json(text: str, error: ValueError) -> Reading:
    if text.lstrip()[:1] == "<":
        return Reading("stop", f"HTML instead of JSON: {text.strip()[:80]!r}. Does base_url end in /v1?")
    return Reading("again", f"not JSON ({error}): {text[:80]!r}")


def _error_of(text: str) -> str:
    try:
        error = json.loads(text).get("error")
    except (ValueError, AttributeError):
        return text.strip()[:160]
    return str(error.get("message") if isinstance(error, dict) else error)[:300]


def _code(error: Any) -> int:
    code = str(error.get("code", "")) if isinstance(error, dict) else ""
    return int(code) if code.isdigit() else 500


def _amount(value: Any) -> float | None:
    """A finite number, 0 or more; anything else an endpoint may write there is no amount."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if number and isfinite(value) and value >= 0 else None
