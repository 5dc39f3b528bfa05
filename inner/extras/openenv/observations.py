"""Read an observation of an OpenEnv server: its text for the model, and its failure for hints.

    {"result": {"content": [{"text": "7"}]}}      7                        an MCP tool's result
    {"text": "higher"}                            higher                   a lone text
    {"board": […], "legal": [1, 2]}               the same, as JSON        without done, reward and metadata
    {"metadata": {"question": "…"}}               its metadata             openenv's own class has no other field
    a screen of numbers, a base64 image           <100800 numbers>, <an image, 48213 characters>

Not promised: images for the model.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# OpenEnv's names of errors (mcp_types.ToolErrorType) -> our names; other names stay. execution_error is too general (a
# wrong type also gives it), so the hint reads the error's text.
KINDS = {"tool_not_found": "unknown_tool", "invalid_args": "bad_arguments"}
# fastmcp's text for arguments that do not fit; OpenEnv 0.10 reports them as execution_error or invalid_args
_MISFIT = re.compile(r"\d+ validation errors? for call\[")
_TEXTS = ("text", "message", "result", "output", "content")  # fields whose value alone is an observation's text
_ASIDE = ("metadata", "done", "reward", "tool_name")  # fields that the model does not read
_FACTS = ("error_kind", "hint_template_key", "t")  # of the metadata: for the trainer, not for the model
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # not 0 and False, which say something
MOST_NUMBERS = 2048  # of one field: a model reads no more of a screen
_IMAGE = re.compile(r"data:(image|audio|video)/|iVBORw0KGgo|/9j/|R0lGOD|UklGR")  # the last four: PNG, JPEG, GIF, WebP


def failure_of(reply: Mapping[str, Any], tools: Collection[str] = ()) -> dict[str, Any] | None:
    """Return {"error", "error_kind", "hint_template_key"} of a server's answer; None if nothing failed.

    A call failed if its metadata have an error_kind, if an MCP tool reports an error, or if the server refused it.
    tools: names of the server's tools.  A failed call of one of these tools is never reported as an unknown tool."""
    observation = reply.get("observation") or {}
    metadata = reply.get("metadata") or observation.get("metadata") or {}
    error = observation.get("error")
    result = observation.get("result")
    broken = isinstance(result, Mapping) and (result.get("is_error") or result.get("isError"))
    kind = metadata.get("error_kind") or (error.get("error_type") if isinstance(error, Mapping) else None)
    if not kind and not broken and "refused" not in reply:
        return None
    text = reply.get("refused") or (error.get("message") if isinstance(error, Mapping) else error)
    text = str(text or metadata.get("error") or observation_text(observation) or kind)
    kind = str(kind or ("bad_arguments" if "refused" in reply else "execution_error"))
    if kind == "tool_not_found" and observation.get("tool_name") in tools:
        kind = "execution_error"  # OpenEnv 0.10 calls any text with "not found" tool_not_found
    if kind == "execution_error" and _MISFIT.match(text):
        kind = "invalid_args"
    failure = {"error": text, "error_kind": KINDS.get(kind, kind)}
    hinted = metadata.get("hint_template_key")
    return {**failure, "hint_template_key": hinted} if hinted else failure


def observation_text(observation: Mapping[str, Any]) -> str:
    """Return an observation's text: an MCP tool's result, else all of it as JSON, or only the text of a lone field.

    If it has only metadata, these are its text: openenv's own class of an observation has no other field for text."""
    result, aside = observation.get("result"), _ASIDE
    others = [value for name, value in observation.items() if name not in (*_ASIDE, "result", "error")]
    if isinstance(result, Mapping) and ("content" in result or "data" in result) and all(o in _EMPTY for o in others):
        content = result["content"] if isinstance(result.get("content"), list) else []
        parts = [text for part in content if isinstance(part, Mapping) and (text := _part_text(part)) is not None]
        return "\n".join(parts) if parts else str(result.get("data", ""))
    if not observation.keys() - {"metadata", "done", "reward"}:
        observation, aside = observation.get("metadata") or {}, _FACTS
    told = {name: value for name, value in observation.items() if name not in aside and value not in _EMPTY}
    name, value = next(iter(told.items()), ("", None))
    if len(told) == 1 and name in _TEXTS and isinstance(value, str | int | float):
        return str(value)
    return json.dumps(_readable(told), ensure_ascii=False) if told else ""


def _part_text(part: Mapping[str, Any]) -> str | None:
    """Return a text of an MCP tool's result, or a note in place of an image; None for other parts."""
    if isinstance(part.get("text"), str):
        return part["text"]
    data = part.get("data")
    return f"<an {part.get('type')}, {len(data)} characters>" if isinstance(data, str) else None


def _readable(value: Any) -> Any:
    """Return the value with a note in place of each screen and image: as text, they fill a context and say nothing."""
    if isinstance(value, Mapping):
        return {name: _readable(one) for name, one in value.items()}
    if isinstance(value, str) and _IMAGE.match(value) and len(value) > 200:
        return f"<an image, {len(value)} characters>"
    if not isinstance(value, list):
        return value
    leaves = list(_leaves(value))
    is_screen = len(leaves) > MOST_NUMBERS and all(isinstance(leaf, int | float) for leaf in leaves)
    return f"<{len(leaves)} numbers>" if is_screen else [_readable(one) for one in value]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what a list of lists has in it."""
    if isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
