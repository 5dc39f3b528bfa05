"""Write the hint that the self-teacher reads before a failed turn, and decide when to give no hint.

    hint(row, error) -> text or None        row: the prompt's columns, or a TraceState; and if they are known:
                                            student_action, tools, state_messages, error_kind, hint_template_key

    kind            example errors                                      the hint says
    unknown_tool    "Tool t3_9 not found." "Unknown action x"           which tools exist
    bad_arguments   "f() got an unexpected keyword argument 'x'"        what the tool takes
    timeout         "timed out" "deadline exceeded"                     to ask for less
    test_failure    "2 failed" "AssertionError"                         the test's output
    style           "E501 line too long" "introduced new syntax error"  the checker's output
    refused         "Error: gift card balance is not enough"            the rule that the error states
    exception       a traceback, and everything else                    the error itself

A hint is given only if it would change the action. A hint that recommends the failed action would make the model more
confident in its mistake; with the live teacher, runs collapse in this way.

The teacher reads the hint before the failed turn, so the hint describes the call as still to come.

Not promised: that a hint is right, or that each error gets the kind that a person would choose. An environment can name
the kind in its error (spans.py), or define its own `hint(row, error) -> str | None`. llm_hints.py has hints that a
model writes.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from inner.replay.actions import action_key, action_message

LONGEST = 400  # characters: a hint quotes at most this much of an error

_TOOL_NAME = re.compile(r"Tool (\S+) not found|Unknown (?:action|tool|function):? ['\"]?([\w.-]+)")
_ARGUMENTS = re.compile(r"\b(\w+)\(\) (?:got an unexpected|got multiple values|missing \d+ required|takes )")

# The first match counts. Patterns of program errors come before patterns of rules, because rule words occur in both.
_KINDS = [
    ("unknown_tool", _TOOL_NAME),
    ("bad_arguments", _ARGUMENTS),
    ("bad_arguments", re.compile(r"validation error|field required|required property|invalid (?:argument|json)", re.I)),
    ("timeout", re.compile(r"timed?[ -]?out|deadline exceeded", re.I)),
    (
        "style",
        re.compile(r"introduced new syntax error|:\d+: [CEFW]\d{3,4}\b|[Ll]ine too long|\b[Ll]int|would reformat"),
    ),
    ("test_failure", re.compile(r"\b[1-9]\d* failed(?:,| in |$)|^FAILED |\bAssertionError\b|\btests? failed\b", re.M)),
    ("exception", re.compile(r"^Traceback|\b[A-Z]\w+(?:Error|Exception)\b|^(?:Error: )?'\w+'$", re.M)),
    ("exception", re.compile(r"NoneType|has no attribute|out of range|command not found|no such file", re.I)),
    (
        "refused",
        re.compile(
            r"\bnot (?:found|available|enough|allowed|permitted|eligible|match|add up)\b|\bcannot\b|insufficient|"
            r"\b(?:should|must)\b|\binvalid\b|\balready\b|\bexpired\b|exceeds|denied|forbidden|refused|against the",
            re.I,
        ),
    ),
]

TEMPLATES = {
    "unknown_tool": "The tool {tool} does not exist. Available tools: {tools}.",
    "bad_arguments": "The tool {tool} takes: {arguments}.",
    "timeout": "{call} runs out of time: {error} Ask for less at once.",
    "test_failure": "{call} leaves a test failing: {error} Change what the test checks.",
    "style": "{call} does not pass the checker: {error} Write it so that it does.",
    "refused": "{call} is against the rules: {error} Do what the rules allow, or tell the user why not.",
    "exception": "{call} fails: {error} Do something else.",
}


class Hint(Protocol):
    """A function: (row: facts about the turn, as above; the error's text) -> the hint's text, or None for no hint."""

    def __call__(self, row: Mapping[str, Any], error: str, /) -> str | None: ...


def error_kind(error: str) -> str:
    """Return the kind of an error: a key of TEMPLATES."""
    return next((kind for kind, seen in _KINDS if seen.search(error)), "exception")


def failed_tool(error: str, student_action: str = "") -> str | None:
    """Return the failed tool's name: the tool that the error reports missing, else the called tool or function."""
    if missing := _TOOL_NAME.search(error):
        return next(name for name in missing.groups() if name)
    function = found.group(1) if (found := _ARGUMENTS.search(error)) else None
    names = [call["name"] for call in _parse_calls(student_action)]
    return function if function in names or not names else names[0]


def templates(row: Mapping[str, Any], error: str) -> str | None:
    """Return the hint of TEMPLATES for the error, the action and the tools. This uses no model."""
    named = (row.get("hint_template_key"), row.get("error_kind"))
    kind = next((name for name in named if name in TEMPLATES), None)
    return template_hint(error, row.get("tools") or (), row.get("student_action") or "", kind)


def template_hint(
    error: str, schemas: Sequence[Mapping[str, Any]], student_action: str = "", kind: str | None = None
) -> str | None:
    """Write a hint from the error's kind and the tools' JSON schemas; None if it would not change the action.

    kind  the environment's own name for the error; if TEMPLATES lacks this name, the error's text decides"""
    kind = kind if kind in TEMPLATES else error_kind(error)
    functions = {f["name"]: f for f in (schema.get("function", schema) for schema in schemas)}
    tool = failed_tool(error, student_action)
    if kind == "unknown_tool" and functions:
        others = ", ".join(name for name in functions if name != tool)
        return TEMPLATES[kind].format(tool=tool, tools=others) if others else None
    if (
        kind == "bad_arguments"
        and tool in functions
        and not _fits_schema(_parse_calls(student_action), functions[tool])
    ):
        return TEMPLATES[kind].format(tool=tool, arguments=_list_parameters(functions[tool]))
    if kind in ("unknown_tool", "bad_arguments"):  # a list of tools or arguments would be empty, or would not help
        kind = "exception"
    return TEMPLATES[kind].format(call=f"Calling {tool}" if tool else "The next step", error=_error_sentence(error))


def filter_hint(hint: str | None, recommended: str | None, error: str) -> str | None:
    """Return the hint; None if it recommends the tool that just failed."""
    return None if hint is None or recommended == failed_tool(error) else hint


def same_action(recommended: str, student_action: str) -> bool:
    """Whether two actions, as action_text writes them, make the same calls. Text around the calls does not count."""
    return bool(student_action) and action_key(recommended) == action_key(student_action)


def shorten_middle(text: str, longest: int = LONGEST) -> str:
    """Keep the beginning and the end of a text, because a traceback names its error at the end."""
    text = text.strip()
    head = longest // 4
    return text if len(text) <= longest else f"{text[:head]} […] {text[head + 5 - longest :]}"


def _parameter_schema(function: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[str]]:
    parameters = function.get("parameters") or {}
    return parameters.get("properties") or {}, parameters.get("required") or ()


def _list_parameters(function: Mapping[str, Any]) -> str:
    properties, _ = _parameter_schema(function)
    return ", ".join(f"{name} ({spec.get('type', 'any')})" for name, spec in properties.items()) or "nothing"


def _fits_schema(calls: Sequence[Mapping[str, Any]], function: Mapping[str, Any]) -> bool:
    """Whether the call has exactly the arguments of the schema, so that a hint that lists them would be useless."""
    properties, required = _parameter_schema(function)
    given = next((call["arguments"] for call in calls if call["name"] == function["name"]), None)
    if not isinstance(given, dict) or not set(required) <= set(given) <= set(properties):
        return False
    return all(_has_json_type(value, properties[name].get("type")) for name, value in given.items())


def _has_json_type(value: Any, kind: Any) -> bool:
    return not isinstance(kind, str) or kind not in _TYPES or type(value) is _TYPES[kind]


_TYPES = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


def _parse_calls(student_action: str) -> list[Mapping[str, Any]]:
    """Return the action's calls, [{"name", "arguments"}]; [] if it is text."""
    return [call["function"] for call in action_message(student_action).get("tool_calls") or ()]


def _error_sentence(error: str) -> str:
    text = shorten_middle(error).removeprefix("Error: ")
    return text if text.endswith((".", "!", "?")) else f"{text}."
