"""What to tell the self-teacher at a failed tool call, and when to tell it nothing.

    "Tool t3_9 not found."                      -> which tools there are
    "… got an unexpected keyword argument 'x'"  -> what the tool takes
    anything else                               -> the error itself, as advice

A hint is given only when it would change the action: a hint that recommends just the tool that failed would teach the
model its own mistake with more confidence (with the live teacher that is how runs collapse).

Not promised: that a hint is right. A better one is a function `hint(row, error) -> str | None` next to your
environment.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_TOOL_NAME = re.compile(r"Tool (\S+) not found")
_ARGUMENTS = re.compile(r"(\w+)\(\) (?:got an unexpected|missing \d+ required|takes )")

TEMPLATES = {
    "unknown_tool": "The tool {tool} does not exist. Available tools: {tools}.",
    "bad_arguments": "The tool {tool} takes: {arguments}.",
    "other": "The last call failed: {error} Do something else.",
}


class Hint(Protocol):
    """row of the prompts file, the error's text -> what to tell, or None for nothing."""

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None: ...


def error_kind(error: str) -> str:
    """unknown_tool | bad_arguments | other"""
    if _TOOL_NAME.search(error):
        return "unknown_tool"
    return "bad_arguments" if _ARGUMENTS.search(error) else "other"


def failed_tool(error: str) -> str | None:
    """The tool's name, where the error carries it."""
    found = _TOOL_NAME.search(error) or _ARGUMENTS.search(error)
    return found.group(1).split(".")[-1] if found else None


def template_hint(error: str, schemas: Sequence[Mapping[str, Any]]) -> str | None:
    """A hint from the error's kind and the tools' JSON schemas. None where there is nothing to add."""
    functions = {f["name"]: f for f in (schema["function"] for schema in schemas)}
    kind, tool = error_kind(error), failed_tool(error)
    if kind == "unknown_tool":
        tools = ", ".join(functions)
        return TEMPLATES[kind].format(tool=tool, tools=tools) if tools else None
    if kind == "bad_arguments" and tool in functions:
        arguments = functions[tool].get("parameters", {}).get("properties", {})
        listed = ", ".join(f"{name} ({spec.get('type', 'any')})" for name, spec in arguments.items())
        return TEMPLATES[kind].format(tool=tool, arguments=listed or "nothing")
    return TEMPLATES["other"].format(error=error)


def gate(hint: str | None, recommended: str | None, error: str) -> str | None:
    """The hint, unless the tool it recommends is the one that just failed."""
    return None if hint is None or recommended == failed_tool(error) else hint
