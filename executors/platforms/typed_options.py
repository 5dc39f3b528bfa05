"""Makes an executor from options that a user typed; the error names an unknown option, or a value of the wrong type.

    {"regoin": "us"}   ──▶ ExecutorError: local takes no option regoin; it takes …
    {"cores": "abc"}   ──▶ ExecutorError: modal cannot use --option cores='abc': 'abc', not a number
    {"cores": -2}      ──▶ ExecutorError: modal cannot use --option cores=-2: it is below 0
    {}                 ──▶ ExecutorError: toy needs --option folder=…    (its constructor has no default for it)

Not promised: a check of options whose annotation is Any; the executor's constructor or a later request may refuse them.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from executors.platforms.base import ExecutorError
from rendezvous.records.schema import check_of

TEXTS = (str, str | None, str | Path | None, str | Path)
CHECKED = (int, float, float | None, bool, Mapping[str, float] | None, Mapping[str, str] | None)
LISTS = (Sequence[str], str | Sequence[str])  # a text is a list of one, or of words with commas between them


def make_with(kind: Callable[..., Any], options: Mapping[str, Any], name: str, typed: Mapping[str, Any]) -> Any:
    """Return kind(**options).   typed: the user's options.

    Raise ExecutorError for an option that `kind` does not take, and for an option that `kind` needs and does not get.
    """
    takes = {key: p for key, p in signature(kind).parameters.items() if key != "clock"}  # tests replace the clock
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not anything and (wrong := sorted(options.keys() - takes.keys())):
        raise ExecutorError(f"{name} takes no option {', '.join(wrong)}; it takes {', '.join(takes)}")
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [name for name in needed if name not in options]:
        raise ExecutorError(f"{name} needs {' '.join(f'--option {key}=…' for key in missing)}. Add it to the command")
    for key in sorted(typed.keys() & takes.keys()):
        if why := _value_fault(takes[key].annotation, typed[key]):
            raise ExecutorError(f"{name} cannot use --option {key}={typed[key]!r}: {why}. Give another value")
    try:
        return kind(**options)
    except ExecutorError:
        raise
    except (TypeError, ValueError) as error:
        if not typed:  # the fault of the platform's module
            raise
        given = " --option ".join(f"{key}={value!r}" for key, value in typed.items())
        raise ExecutorError(f"{name} cannot use --option {given}: {error}. Give another value") from error


def _value_fault(annotation: Any, value: Any) -> str:
    """Return why a value does not fit the annotation, or "".   No number of an executor may be below 0, nor a price."""
    try:
        if annotation in TEXTS and not isinstance(value, Path):
            check_of(str | None)(value)
        elif annotation in CHECKED:
            check_of(annotation)(value)
        elif annotation in LISTS and not isinstance(value, str):
            check_of(list[str])(list(value) if isinstance(value, tuple) else value)
    except ValueError as error:
        return str(error)
    numbers = value.values() if isinstance(value, Mapping) else [value]
    return "it is below 0" if any(isinstance(number, int | float) and number < 0 for number in numbers) else ""
