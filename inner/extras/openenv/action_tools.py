"""Make tools from the JSON schema of an action, for an OpenEnv server without MCP tools.

    GET /schema                                              a tool `step`, in MCP's form
    {"action": {"description": "Play a move.",        ──▶    {"name": "step", "description": "Play a move.",
                "properties": {"move": …, "metadata": …,      "input_schema": {"properties": {"move": …}},
                               "kind": {"const": "m"}}}}      "fixed": {"kind": "m"}}          in every action

    {"action": {"oneOf": [Look, Go],                  ──▶    tools `look` and `go`, by the discriminator's values or by
                "discriminator": {…}}}                       the schemas' titles

`metadata` is a field of every action of OpenEnv, and is not for the model. A field with only one possible value does
not become an argument.

Not promised: that an environment says in its schema which actions it takes: the model learns it by playing.
"""

import re
from collections.abc import Mapping
from typing import Any

from inner.extras.openenv.mcp_tools import resolve_reference

Schema = Mapping[str, Any]
CALL = ("tool_name", "arguments")  # the fields of an action that calls an MCP tool


def action_tools(action: Schema) -> list[dict[str, Any]]:
    """Return a tool per kind of action."""
    kinds = action.get("oneOf") or action.get("anyOf")
    if not kinds:
        return [_action_tool(action, action, "step")]
    chosen_by = (action.get("discriminator") or {}).get("propertyName")
    found = [resolve_reference(kind, action) for kind in kinds]
    return [_action_tool(kind, action, _tool_name(kind, chosen_by, i)) for i, kind in enumerate(found)]


def calls_tools(action: Schema) -> bool:
    """Return whether this is the action of an MCP environment."""
    return all(name in (action.get("properties") or {}) for name in CALL)


def _action_tool(kind: Schema, root: Schema, name: str) -> dict[str, Any]:
    fields: Schema = kind.get("properties") or {}
    fixed = {field: spec["const"] for field, spec in fields.items() if "const" in spec}
    required = [field for field in kind.get("required") or () if field not in fixed]
    asked = {f: spec for f, spec in fields.items() if f in required or (f != "metadata" and f not in fixed)}
    title = kind.get("title") or "an action"
    return {
        "name": name,
        "description": kind.get("description") or f"Take one step in the environment ({title}).",
        "input_schema": {"$defs": root.get("$defs") or {}, "properties": asked, "required": required},
        "fixed": fixed,
    }


def _tool_name(kind: Schema, chosen_by: str | None, index: int) -> str:
    """Return the discriminator's value, or the title in small letters: "GoNorthAction" becomes "go_north"."""
    value = ((kind.get("properties") or {}).get(chosen_by) or {}).get("const")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", str(kind.get("title") or "").removesuffix("Action"))
    return str(value or "_".join(words).lower() or f"step_{index + 1}")
