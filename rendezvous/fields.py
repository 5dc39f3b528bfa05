"""What a record's fields may hold, read from their annotations.

    slot: Slot   step: Step   took: Seconds   offers: tuple[Listed, ...]   fence: dict[Slot, Generation]   stop: bool
      └─────────── checked(Offer, json object) ──▶ an Offer, or a ValueError that names the field ───────────┘

    int      never a bool or 1.0, in the range that is annotated      float    finite; an int will do
    str      no half of a surrogate pair, at most so many characters  Any      JSON, nested at most DEPTH deep
    unknown  fields of a newer release pass, if they are such JSON

The rules look at the value alone, so that all readers take or refuse the same objects.  `parsed` turns bytes into JSON
by the same principle: one spelling (UTF-8), no key twice, no NaN, and nothing that hangs on how deep our own stack is.

Not promised: that a value makes sense beside the others; that is the record's own `check`, or its reader's.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
Check = Callable[[Any], Any]  # -> the value as the field holds it; raises ValueError

DEPTH = 16  # of free-form values; configs nest 4 deep.  json gives up at some hundreds, where our stack lets it
WIDEST = 1 << 63  # of integers whose field names no range: what other languages can hold
LONGEST = 4096  # characters of a text whose field names no length


@dataclass(frozen=True)
class Within:
    """A number from `low` to `high`, both included."""

    low: float
    high: float


@dataclass(frozen=True)
class Longest:
    """A text of at most so many characters."""

    characters: int


@dataclass(frozen=True)
class Where:
    """Of the annotated type, and `holds(value)`; words: for a value that is refused, "is …, which is no {words}"."""

    holds: Callable[[Any], bool]
    words: str


def parsed(body: bytes | bytearray | memoryview, most: int) -> Any:
    """The JSON in `body`, of at most `most` bytes.   Raises ValueError."""
    if len(body) > most:
        raise ValueError(f"it has {len(body)} bytes, at most {most} make sense")
    try:
        return json.loads(str(body, "utf-8"), object_pairs_hook=_object, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it names a field twice")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def checked(kind: type[T], raw: Any) -> T:
    """The dataclass `kind` from a JSON object.   Raises ValueError with the field and what stands there."""
    return checker(kind)(raw)


@cache
def checker(hint: Any) -> Check:
    """What turns a JSON value into one of this annotation."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(args[0], args[1:])
    if origin in (Union, UnionType):
        return _optional(args)
    if origin is tuple:
        return _sequence(checker(args[0]), tuple)
    if origin is list:
        return _sequence(checker(args[0]), list)
    if origin is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return _mapping(checker(args[0]), checker(args[1]))
    if hint in _PLAIN:
        return _PLAIN[hint]
    return _dataclass(hint)


def _annotated(hint: Any, marks: Iterable[Any]) -> Check:
    check = checker(hint)
    for mark in marks:
        if isinstance(mark, Within):
            check = _whole(mark) if hint is int else _real(mark)
        elif isinstance(mark, Longest):
            check = _text(mark.characters)
        elif isinstance(mark, Where):
            check = _where(check, mark)
    return check


def _whole(within: Within) -> Check:
    low, high = within.low, within.high

    def check(value: Any) -> int:
        if type(value) is not int:
            raise ValueError(f"{brief(value)}, not a whole number")
        if not low <= value <= high:
            raise ValueError(f"{brief(value)}, not in {low:g} … {high:g}")
        return value

    return check


def _real(within: Within) -> Check:
    low, high = within.low, within.high

    def check(value: Any) -> float:
        if type(value) is not float and type(value) is not int:
            raise ValueError(f"{brief(value)}, not a number")
        if not low <= value <= high:  # nor is NaN
            raise ValueError(f"{brief(value)}, not in {low:g} … {high:g}")
        return float(value)

    return check


def _text(longest: int) -> Check:
    def check(value: Any) -> str:
        if type(value) is not str:
            raise ValueError(f"{brief(value)}, not a text")
        if len(value) > longest:
            raise ValueError(f"{len(value)} characters long, at most {longest} make sense")
        if not value.isascii() and not _encodable(value):
            raise ValueError(f"{brief(value)}, which has half of a surrogate pair")
        return value

    return check


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{brief(value)}, not true or false")
    return value


def _where(check: Check, mark: Where) -> Check:
    def narrowed(value: Any) -> Any:
        value = check(value)
        if not mark.holds(value):
            raise ValueError(f"{brief(value)}, which is no {mark.words}")
        return value

    return narrowed


def _optional(args: tuple[Any, ...]) -> Check:
    """X | None is the only union that a record has."""
    (hint,) = [a for a in args if a is not NoneType]
    check = checker(hint)
    return lambda value: None if value is None else check(value)


def _sequence(check: Check, make: Callable[[list[Any]], Any]) -> Check:
    def each(value: Any) -> Any:
        if type(value) is not list:
            raise ValueError(f"{brief(value)}, not a list")
        return make([check(item) for item in cast("list[Any]", value)])

    return each


def _mapping(key: Check, item: Check) -> Check:
    def each(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise ValueError(f"{brief(value)}, not an object")
        return {key(k): item(v) for k, v in cast("dict[Any, Any]", value).items()}

    return each


def anything(value: Any, depth: int = DEPTH) -> Any:
    """JSON of which nothing is known."""
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
            anything(item, depth - 1)
    else:
        for name, item in cast("dict[str, Any]", value).items():
            _PLAIN[str](name)
            anything(item, depth - 1)
    return cast("Any", value)


def _dataclass(kind: Any) -> Check:
    hints = get_type_hints(kind, include_extras=True)
    known = [(f.name, checker(hints[f.name]), f.default is f.default_factory is MISSING) for f in fields(kind)]
    names = {name for name, _, _ in known}

    def check(raw: Any) -> Any:
        if type(raw) is not dict:
            raise ValueError(f"{brief(raw)}, not an object")
        values: dict[str, Any] = {}
        for name, field_check, needed in known:
            if name in raw:
                try:
                    values[name] = field_check(raw[name])
                except ValueError as error:
                    raise ValueError(f"its {name} is {error}") from None
            elif needed:
                raise ValueError(f"it has no {name}")
        anything({name: value for name, value in cast("dict[str, Any]", raw).items() if name not in names})
        return kind(**values)

    return check


def brief(value: Any) -> str:
    """A value as an error shows it."""
    if isinstance(value, int) and abs(value) >= WIDEST:
        return "a number of more than 19 digits"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


_PLAIN: dict[Any, Check] = {
    int: _whole(Within(-WIDEST, WIDEST)),
    float: _real(Within(-sys.float_info.max, sys.float_info.max)),
    str: _text(LONGEST),
    bool: _flag,
    Any: anything,
}
