"""Whether a tool's result is an error, and what it says.

    {'error': text, …}  as TRL writes it, the same in JSON      "Error: …"      a traceback      ──▶ {"error": text, …}

What the environment may add, error_kind and hint_template_key, goes to the hint as it is.

Not promised: that every text is read as a person would read it.
"""

import ast
import json
import re
from typing import Any

_SAYS_ERROR = re.compile(r"(?:Error|ERROR): |Unknown action |Traceback \(most recent call last\)")


def error_record(content: object) -> dict[str, Any] | None:
    """{"error": text, and what else the environment says}"""
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
        except (ValueError, SyntaxError, KeyError, TypeError):  # a tool printed what only looks like it
            continue
    return None
