"""Decide whether a tool's result is an error, and read its message.

    {'error': text, …}  as TRL writes it, the same in JSON      "Error: …"      a traceback      ──▶ {"error": text, …}

The environment may add error_kind and hint_template_key; the hint gets them unchanged.

Not promised: that each text is read as a person would read it.
"""

import ast
import json
import re
from typing import Any

_SAYS_ERROR = re.compile(r"(?:Error|ERROR): |Unknown action |Traceback \(most recent call last\)")


def error_record(content: object) -> dict[str, Any] | None:
    """Return {"error": text, and what the environment added}; None if it is not an error."""
    if not isinstance(content, str):
        return None
    if content.startswith(("{'error':", '{"error":')):
        record = _parse_record(content)
        return record if record is not None and record["error"] else None
    return {"error": content} if _SAYS_ERROR.match(content) else None


def _parse_record(content: str) -> dict[str, Any] | None:
    for parse in (ast.literal_eval, json.loads):
        try:
            record = parse(content)
            _ = record["error"]
            return record
        except (ValueError, SyntaxError, KeyError, TypeError):  # it only looks like a record
            continue
    return None
