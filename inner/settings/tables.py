"""A table of the config is one frozen dataclass, whose fields are the only declaration of the table's settings.

    weight: float = setting(0.0, "Weight of the distillation; 0 is off.", least=0)
      │       │             │     │                                          └ bounds ─▶ checked at construction
      │       │             │     └ a sentence ────────────────────────────────────────▶ docs/configuration.md
      │       └ type ───────┴ default                                        a float may be an int, not a bool
      └ name ─▶ run.toml, run.json, `--set`

    list_settings(RunConfig) ─▶ {"inner.sdpo.weight": …}   every setting by its dotted name, for "did you mean"

Not promised: contradictions between settings. The class with both settings checks them in `check`.  No torch here.
"""

import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, is_dataclass
from functools import cache
from operator import ge, gt, le, lt
from typing import Any, ClassVar, Self

from inner.errors import InnerError


@dataclass(frozen=True)
class Bounds:
    """Limits: least ≤ value ≤ most, above < value < below, value in one_of.   None is always allowed."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    one_of: tuple[str, ...] = ()

    def find_fault(self, value: Any) -> str:
        """Return the bounds in words for a value outside them, else ""."""
        if self.one_of:
            return "" if value in self.one_of else f"is not known. Use one of: {', '.join(self.one_of)}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        limits = (
            (self.least, ge, "at least {:g}"), (self.above, gt, "greater than {:g}"),
            (self.most, le, "at most {:g}"), (self.below, lt, "below {:g}"),
        )  # fmt: skip
        asked = [(limit, holds, words) for limit, holds, words in limits if limit is not None]
        finite = isinstance(value, int) or math.isfinite(value)  # isfinite fails on an int of 400 digits
        if not asked or (finite and all(holds(value, limit) for limit, holds, _ in asked)):
            return ""
        return f"must be {' and '.join(words.format(limit) for limit, _, words in asked)}"


def setting(default: Any, sentence: str, **bounds: Any) -> Any:
    """Declare a field of a table.   default: a value, or a class to be called for it.   bounds: fields of Bounds."""
    metadata = {"sentence": sentence, "bounds": Bounds(**bounds)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Table:
    """A table.   path: its name in a run.toml.   error: the exception for an invalid value."""

    path: ClassVar[str] = ""
    error: ClassVar[type[Exception]] = InnerError

    def __post_init__(self) -> None:
        hints = field_types(type(self))
        for f in fields(self):
            name = f"{self.path}.{f.name}" if self.path else f.name
            value = as_type(getattr(self, f.name), hints[f.name], name, self.error)
            object.__setattr__(self, f.name, value)  # converted to its declared type: 1 becomes 1.0
            bounds: Bounds = f.metadata.get("bounds", Bounds())
            if value is not None and (fault := bounds.find_fault(value)):
                raise self.error(f"{name} = {_shown(value)} {fault}. Set {name}.")
        self.check()

    def check(self) -> None:
        """Raise `error` if settings of the table contradict each other."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        refuse_unknown(values, cls, error=cls.error)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# -------------------------------------------------------------------- types


def _shown(value: Any) -> str:
    """Return the value as text for a message. Python refuses to print an int of thousands of digits."""
    huge = isinstance(value, int) and value.bit_length() > 256
    return f"an integer of {value.bit_length()} bits" if huge else repr(value)


@cache
def field_types(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def as_type(value: Any, hint: Any, name: str, error: type[Exception]) -> Any:
    """Convert the value to its declared type. A float may be any real number (numpy's, too), but not a bool."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Mapping) and (table := table_class(hint)) is not None:
        return table.from_dict(value)
    if type(value) in options or (value is None and type(None) in options):
        return value
    if int in options and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if float in options and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _as_float(value)
    if table_class(hint) is not None:
        raise error(f"[{name}] must be a table, found {value!r}. Write it as [{name}] with its settings below")
    allowed = " or ".join("nothing" if o is type(None) else o.__name__ for o in options)
    raise error(f"{name} = {value!r} must be {allowed}, not {type(value).__name__}")


def table_class(hint: Any) -> type[Table] | None:
    """Return the table class that a field of this type holds; None for a plain setting."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((o for o in options if isinstance(o, type) and is_dataclass(o)), None)  # type: ignore[return-value]


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:  # an int of 400 digits: out of range, like infinity
        return math.inf


# -------------------------------------------------------------------- names


@cache
def list_settings(cls: type, prefix: str = "") -> Mapping[str, Field[Any]]:
    """Return dotted name -> field of every setting in this table and in the tables below it."""
    found: dict[str, Field[Any]] = {}
    for f in fields(cls):
        below = table_class(field_types(cls)[f.name])
        if below is not None:
            found |= list_settings(below, f"{prefix}{f.name}.")
        elif f.metadata.get("sentence") is not None:
            found[prefix + f.name] = f
    return found


def default_of(f: Field[Any]) -> Any:
    return f.default if f.default is not MISSING else f.default_factory()  # type: ignore[misc]


def refuse_unknown(
    raw: Mapping[str, Any], cls: type, *, error: type[Exception], prefix: str | None = None, known: Iterable[str] = ()
) -> None:
    """Raise `error` for the first key in `raw` that is not a setting. The text names the most similar known key.

    known: dotted names to guess from (default: those of `cls`)."""
    if prefix is None:
        prefix = f"{cls.path}." if issubclass(cls, Table) and cls.path else ""
    known = known or list_settings(cls, prefix)
    own = {f.name: table_class(field_types(cls)[f.name]) for f in fields(cls)}
    for key, value in raw.items():
        name = prefix + key
        below = own.get(key)
        if key not in own or (below is None and name not in known):
            from inner.settings.flat_names import unknown_text

            raise error(unknown_text(name, known))
        if below is not None and isinstance(value, Mapping):
            refuse_unknown(value, below, error=error, prefix=f"{name}.", known=known)
