"""Make a Python method with type hints and a docstring from an MCP tool with a JSON schema.

    {"name": "move", "input_schema":                    def move(self, *, steps: int, to: Literal["up", "down"] = "up"):
       {"properties": {"steps": {"type": "integer"}, ──▶    '''…
                       "to": {"enum": [...], …}}}}              Args:
                                                                    steps: …'''
                                                            return self._call("move", steps=steps, to=to)

    JSON schema                              hint
    type, a list of types, nullable          int, float, str, bool, None, and unions of them
    enum, const                              Literal
    anyOf, oneOf, one allOf, $ref            unions; the schema that $ref names
    array of X, object of X                  list[X], dict[str, X]
    object with properties                   dict; the schema itself, with those it names, in the argument's description
    all others                               Any

TRL makes a schema from the hints (transformers' `get_json_schema`), and the server gets the arguments under its own
names. The model sees another name only if Python or TRL cannot use the server's name.

Not promised: limits (minimum, pattern, …), or that the model follows the schema; the server checks.
"""

import inspect
import json
import keyword
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, Union

from inner.errors import InnerError

Schema = Mapping[str, Any]
DEEPEST = 8  # the limit of a schema's levels to read, because a recursive schema has no end
_TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "null": None, "array": list, "object": dict,
}  # fmt: skip
_REFERENCE = re.compile(r'"\$ref": "#/\$defs/([^"/]+)"')
_SECTION = re.compile(r"\b(Args|Returns|Raises|(?i:choices)):")  # transformers gives these words a meaning


def tool_methods(tools: Sequence[Schema], taken: Collection[str]) -> dict[str, Callable[..., Any]]:
    """Return {method's name: method that calls the tool}.   taken: names that the class already has."""
    methods: dict[str, Callable[..., Any]] = {}
    for tool in tools:
        name = method_name(tool["name"], taken)
        if name in methods:
            other = next(one["name"] for one in tools if method_name(one["name"], taken) == name)
            raise InnerError(
                f"two tools of the server, {other!r} and {tool['name']!r}, would both have the Python name {name!r}. "
                "Rename one of them."
            )
        methods[name] = tool_method(tool, name)
    return methods


def method_name(tool: str, taken: Collection[str]) -> str:
    """Return the tool's name, or "tool_…" if TRL would ignore or misread a method with that name."""
    return f"tool_{tool.lstrip('_')}" if tool.startswith("_") or tool in taken else tool


def tool_method(tool: Schema, name: str | None = None) -> Callable[..., Any]:
    """Return a method that calls the tool, with types and docstring from its JSON schema."""
    schema: Schema = tool.get("input_schema") or tool.get("inputSchema") or {}
    properties: dict[str, Schema] = {
        given: spec if isinstance(spec, Mapping) else {} for given, spec in (schema.get("properties") or {}).items()
    }
    names = _argument_names(properties)  # ours -> the server's

    def method(self: Any, /, **arguments: Any) -> Any:
        return self._call(tool["name"], **{names.get(given, given): value for given, value in arguments.items()})

    types = {ours: type_hint(properties[theirs], schema) for ours, theirs in names.items()}
    described = [
        f"    {ours}: {_describe_argument(theirs, resolve_reference(properties[theirs], schema), schema)}"
        for ours, theirs in names.items()
    ]
    method.__name__ = method.__qualname__ = name or tool["name"]
    text = _without_sections(tool.get("description") or tool["name"])
    method.__doc__ = "\n".join([text, *(["", "Args:", *described] if types else [])])
    method.__annotations__ = types
    required = {ours for ours, theirs in names.items() if theirs in (schema.get("required") or ())}
    defaults = {ours: properties[names[ours]].get("default") for ours in names if ours not in required}
    method.__signature__ = _signature(types, defaults)  # pyright: ignore[reportFunctionMemberAccess]
    return method


def type_hint(spec: Schema, root: Schema) -> Any:
    """Return the hint from which transformers makes the schema again; Any if no hint can, or below DEEPEST levels."""
    return _hint_at(spec, root, 0, {})


def _hint_at(spec: Schema, root: Schema, depth: int, known: dict[tuple[str, int], Any]) -> Any:
    """Return a hint.   known: hints by schema and depth; without them, a doubly recursive schema costs 2^DEEPEST."""
    if depth > DEEPEST:
        return Any
    key = json.dumps(spec, sort_keys=True, default=str), depth
    if key not in known:
        known[key] = _new_hint(resolve_reference(spec, root), lambda part: _hint_at(part, root, depth + 1, known))
    return known[key]


def _new_hint(spec: Schema, below: Callable[[Schema], Any]) -> Any:
    parts = spec.get("anyOf") or spec.get("oneOf") or spec.get("allOf")
    if "enum" in spec or "const" in spec:
        hint = _literal(spec["enum"] if "enum" in spec else [spec["const"]])
    elif parts and (len(parts) == 1 or "allOf" not in spec):
        hint = _union([below(part) for part in parts])
    elif isinstance(kind := spec.get("type"), list):
        hint = _union([below({**spec, "type": one}) for one in kind])
    elif kind == "array" and isinstance(spec.get("items"), Mapping):
        hint = list[below(spec["items"])]
    elif kind == "object" and isinstance(spec.get("additionalProperties"), Mapping):
        hint = dict[str, below(spec["additionalProperties"])]
    else:
        hint = _TYPES.get(kind, Any) if isinstance(kind, str) else Any
    return _union([hint, None]) if spec.get("nullable") else hint


def _literal(values: Sequence[Any]) -> Any:
    plain = bool(values) and all(value is None or isinstance(value, str | int | float | bool) for value in values)
    return Literal[tuple(values)] if plain else Any


def _union(hints: Sequence[Any]) -> Any:
    return Union[tuple(hints)] if hints else Any  # noqa: UP007  pyright: ignore[reportInvalidTypeArguments]


def resolve_reference(spec: Schema, root: Schema) -> Schema:
    """Return the schema that `{"$ref": "#/$defs/Point"}` names, with the keys beside "$ref"."""
    for _ in range(DEEPEST):
        path = spec.get("$ref")
        if not isinstance(path, str):
            return spec
        target: Any = root
        for part in path.removeprefix("#/").split("/"):
            target = target.get(part) if isinstance(target, Mapping) else None
        spec = {**(target if isinstance(target, Mapping) else {}), **{k: v for k, v in spec.items() if k != "$ref"}}
    return {}


def _argument_names(properties: Schema) -> dict[str, str]:
    """Return {an identifier: the server's name}: "from" becomes "from_", "x-y" becomes "x_y"."""
    names: dict[str, str] = {}
    for theirs in properties:
        ours = re.sub(r"\W", "_", theirs, flags=re.ASCII)
        ours = f"_{ours}" if not ours or ours[0].isdigit() else ours
        while keyword.iskeyword(ours) or ours in ("self", "return") or ours in names:
            ours += "_"
        names[ours] = theirs
    return names


def _describe_argument(name: str, spec: Schema, root: Schema) -> str:
    """Describe an argument in one line: transformers' parser reads a new line "word:" as the next argument."""
    text = " ".join(str(spec.get("description") or spec.get("title") or name).split())
    text += f" (default {json.dumps(spec['default'], ensure_ascii=False, default=str)})" if spec.get("default") else ""
    nested = _nested_schema(spec, root)
    return _without_sections(f"{text} (JSON schema: {json.dumps(nested, ensure_ascii=False)})" if nested else text)


def _nested_schema(spec: Schema, root: Schema) -> Schema | None:
    """Return the schema without its own description, if type hints cannot express it; else None."""
    text = json.dumps(spec, default=str)
    if '"properties"' not in text and '"$ref"' not in text:
        return None
    named = _named_schemas(text, root.get("$defs") or {})
    return {
        **{key: value for key, value in spec.items() if key not in ("description", "title", "default")},
        **({"$defs": named} if named else {}),
    }


def _named_schemas(text: str, known: Schema) -> dict[str, Any]:
    """Return {name: schema} of all schemas that the text refers to, also indirectly."""
    named: dict[str, Any] = {}
    texts = [text]
    while texts:
        for name in _REFERENCE.findall(texts.pop()):
            if name in known and name not in named:
                named[name] = known[name]
                texts.append(json.dumps(known[name], default=str))
    return named


def _without_sections(text: str) -> str:
    return _SECTION.sub(r"\1 -", text)


def _signature(types: Mapping[str, Any], defaults: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature (self, *, required …, optional = default …)."""
    parameters = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults.get(name, inspect.Parameter.empty)
        )
        for name, hint in types.items()
    ]
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return inspect.Signature([itself, *sorted(parameters, key=lambda p: p.default is not inspect.Parameter.empty)])
