"""Checks of a record's fields, made from their type annotations.

    slot: Slot   step: Step   took: Seconds   offers: tuple[Listed, ...]   fence: dict[Slot, Generation]   stop: bool
      └─────────── from_json(Offer, json object) ──▶ an Offer, or a ValueError that names the field ───────────┘

    int      not a bool, not 1.0, within the annotated range          float    finite; an int is accepted
    str      no half of a surrogate pair, not longer than annotated   Any      JSON, nested at most DEPTH deep
    unknown  fields of a newer release are accepted if they are such JSON

The rules look only at the value, so all readers accept or refuse the same objects.  `parse_json` follows the same
principle: only UTF-8, no key twice, no NaN, and no dependence on the depth of Python's stack.

Not promised: that the values fit together; the record's `check_consistency`, or its reader, checks that.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
N = TypeVar("N", int, float)
Check = Callable[[Any], Any]  # returns the value of the field; raises ValueError

DEPTH = 16  # the deepest nesting of free-form values.  Configs have 4 levels; Python's json fails at some hundreds
WIDEST = 1 << 63  # the limit of integers in a field without a range: other languages can hold such integers
LONGEST = 1 << 16  # maximal number of characters in a text field without a length: a setting may be a long prompt


@dataclass(frozen=True)
class Within:
    """Annotation of a number from `low` to `high`, both included."""

    low: float
    high: float

    def checked(self, value: N) -> N:
        """Return the value.   Raise ValueError if it is outside, or NaN."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{brief_repr(value)}, not in {self.low:g} … {self.high:g}")
        return value


@dataclass(frozen=True)
class Longest:
    """Annotation of a text with at most so many characters."""

    characters: int


@dataclass(frozen=True)
class Where:
    """Annotation of a value with holds(value).   words: its name in the error "is …, which is not a {words}"."""

    holds: Callable[[Any], bool]
    words: str


def parse_json(body: bytes | bytearray | memoryview, most: int) -> Any:
    """Return the JSON value in `body`.   Raise ValueError if it has more than `most` bytes or is no such JSON."""
    if len(body) > most:
        raise ValueError(f"it has {len(body)} bytes; at most {most} are allowed")
    try:
        return json.loads(str(body, "utf-8"), object_pairs_hook=_unique_fields, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names a field twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def from_json(kind: type[T], raw: Any) -> T:
    """Return the dataclass `kind` from a JSON object.   Raise ValueError with the field and its value."""
    return check_of(kind)(raw)


@cache
def check_of(hint: Any) -> Check:
    """Return a function that turns a JSON value into a value of the type `hint`, or raises ValueError."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin is Annotated:
        return _annotated_check(args[0], args[1:])
    if origin in (Union, UnionType):
        return _optional_check(args)
    if origin is tuple:
        return _sequence_check(check_of(args[0]), tuple)
    if origin is list:
        return _sequence_check(check_of(args[0]), list)
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping_check(check_of(args[0]), check_of(args[1]))
    if hint in _PLAIN:
        return _PLAIN[hint]
    return _dataclass_check(hint)


def _annotated_check(hint: Any, marks: Iterable[Any]) -> Check:
    check = check_of(hint)
    for mark in marks:
        if isinstance(mark, Within):
            check = _int_check(mark) if hint is int else _float_check(mark)
        elif isinstance(mark, Longest):
            check = _text_check(mark.characters)
        elif isinstance(mark, Where):
            check = _where_check(check, mark)
    return check


def _int_check(within: Within) -> Check:
    def check_int(value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"{brief_repr(value)}, not a whole number")
        return within.checked(value)

    return check_int


def _float_check(within: Within) -> Check:
    def check_float(value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise ValueError(f"{brief_repr(value)}, not a number")
        return float(within.checked(value))

    return check_float


def _text_check(longest: int) -> Check:
    def check_text(value: Any) -> str:
        if type(value) is not str:
            raise ValueError(f"{brief_repr(value)}, not a text")
        if len(value) > longest:
            raise ValueError(f"{len(value)} characters long; at most {longest} are allowed")
        if not value.isascii() and not _is_encodable(value):
            raise ValueError(f"{brief_repr(value)}, which has half of a surrogate pair")
        return value

    return check_text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{brief_repr(value)}, not true or false")
    return value


def _where_check(check: Check, mark: Where) -> Check:
    def check_narrowed(value: Any) -> Any:
        value = check(value)
        if not mark.holds(value):
            raise ValueError(f"{brief_repr(value)}, which is not a {mark.words}")
        return value

    return check_narrowed


def _optional_check(args: tuple[Any, ...]) -> Check:
    """Return the check of X | None, the only kind of union in a record."""
    (hint,) = [a for a in args if a is not NoneType]
    check = check_of(hint)
    return lambda value: None if value is None else check(value)


def _sequence_check(check: Check, make: Callable[[list[Any]], Any]) -> Check:
    def check_items(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{brief_repr(value)}, not a list")
        return make([check(item) for item in cast("list[Any]", value)])

    return check_items


def _mapping_check(key: Check, item: Check) -> Check:
    def check_items(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise ValueError(f"{brief_repr(value)}, not an object")
        return {key(k): item(v) for k, v in cast("dict[Any, Any]", value).items()}

    return check_items


def check_json_value(value: Any, depth: int = DEPTH) -> Any:
    """Return free-form JSON unchanged.   Raise ValueError for other values, or for nesting deeper than `depth`."""
    if isinstance(value, str):
        return _PLAIN[str](value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _PLAIN[int](value)
    if isinstance(value, float):
        return _PLAIN[float](value)
    if not depth:
        raise ValueError(f"nested more than {DEPTH} deep")
    if isinstance(value, list):
        for item in cast("list[Any]", value):
            check_json_value(item, depth - 1)
    else:
        for name, item in cast("dict[str, Any]", value).items():
            _PLAIN[str](name)
            check_json_value(item, depth - 1)
    return cast("Any", value)


def _dataclass_check(kind: Any) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    known = [(f.name, check_of(hints[f.name]), f.default is f.default_factory is MISSING) for f in fields(kind)]
    names = {name for name, _, _ in known}

    def check_fields(raw: Any) -> Any:
        if type(raw) is not dict:
            raise ValueError(f"{brief_repr(raw)}, not an object")
        values: dict[str, Any] = {}
        for name, field_check, needed in known:
            if name in raw:
                try:
                    values[name] = field_check(raw[name])
                except ValueError as error:
                    raise ValueError(f"its {name} is {error}") from None
            elif needed:
                raise ValueError(f"it has no {name}")
        check_json_value({name: value for name, value in cast("dict[str, Any]", raw).items() if name not in names})
        return kind(**values)

    return check_fields


def brief_repr(value: Any) -> str:
    """Return a short text of the value, for an error."""
    if isinstance(value, int) and abs(value) >= WIDEST:
        return "a number of more than 19 digits"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_PLAIN: dict[Any, Check] = {
    int: _int_check(Within(-WIDEST, WIDEST)),
    float: _float_check(Within(-sys.float_info.max, sys.float_info.max)),
    str: _text_check(LONGEST),
    bool: _check_flag,
    Any: check_json_value,
}
