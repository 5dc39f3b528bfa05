"""Read untrusted JSON and text within bounds, or refuse it with a reason.

    bytes ─▶ UTF-8? ─▶ JSON? ─▶ at most DEEPEST levels? ─▶ a value        ValueError for everything else
    text  ─▶ no lone surrogate, no control character?   ─▶ None           else the reason
    text  ─▶ no token of a chat template?               ─▶ None           else the token

A lone surrogate ("\\ud800") is valid JSON but not valid UTF-8, so a program that writes it as UTF-8 fails. Deep nesting
makes recursive readers, such as the standard library's, raise an exception that is not a ValueError.

Not promised: that TEMPLATE_TOKEN matches every model's tokens. If the tokenizer is known, ask it
(inner/channels/reference.py).
"""

import json
import re
from typing import Any

from inner.printable import printable

DEEPEST = 64  # levels of JSON: ten times the depth of schemas and answers, a tenth of Python's recursion limit

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")  # ASCII's, except tab, line ends and form feed
TEMPLATE_TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
)


def load_json(written: bytes | str) -> Any:
    """Parse JSON.   Raises ValueError if `written` is not UTF-8, not JSON, or deeper than DEEPEST levels."""
    text = written.decode("utf-8-sig") if isinstance(written, bytes) else written
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"JSON of more than {DEEPEST} levels") from None
    if is_deeper(value, DEEPEST):
        raise ValueError(f"JSON of more than {DEEPEST} levels")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects nest deeper than `levels`. Do not recurse, as the value may be hostile."""
    level = [value]
    for _ in range(levels + 1):
        level = [child for outer in level for child in _child_values(outer)]
        if not level:
            return False
    return True


def unfit_text(text: str) -> str | None:
    """Return why a text may not go into training data or a prompt; None if it may."""
    if found := lone_surrogate(text):
        return f"a lone surrogate (U+{ord(found):04X}), which no UTF-8 can hold"
    if found := _CONTROL.search(text):
        return f"a control character (U+{ord(found[0]):04X})"
    return None


def lone_surrogate(text: str) -> str | None:
    found = _SURROGATE.search(text)
    return found[0] if found else None


def template_token(text: str) -> str | None:
    """Return the first token in the text with which known chat templates begin or end a turn; None if it has none."""
    found = TEMPLATE_TOKEN.search(text)
    return found[0] if found else None


def printable_start(text: str, longest: int = 300) -> str:
    """Return the beginning of an untrusted text, cleaned and on one line, for messages, logs and the ledger."""
    return printable(" ".join(text[: 4 * longest].split()))[:longest]


def _child_values(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()
