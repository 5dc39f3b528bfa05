"""Makes an executor from options that a user typed; the error names an unknown option, or a value of the wrong type.

    {"regoin": "us"}   ──▶ ExecutorError: local takes no option regoin; it takes …
    {"cores": "abc"}   ──▶ ExecutorError: modal cannot use --option cores='abc': 'abc', not a number
    {}                 ──▶ ExecutorError: toy needs --option folder=…    (its constructor has no default for it)

Not promised: a check of options that are not numbers; the executor's constructor or a later request may refuse them.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from executors.platforms.base import ExecutorError
from rendezvous.records.schema import check_of

NUMBERS = (int, float, float | None)


def make_with(kind: Callable[..., Any], options: Mapping[str, Any], name: str, typed: Mapping[str, Any]) -> Any:
    """Return kind(**options).   typed: the user's options.

    Raise ExecutorError for an option that `kind` does not take, and for one that it needs and does not get.
    """
    takes = signature(kind).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not anything and (wrong := sorted(options.keys() - takes.keys())):
        raise ExecutorError(f"{name} takes no option {', '.join(wrong)}; it takes {', '.join(takes)}")
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if missing := [name for name in needed if name not in options]:
        raise ExecutorError(f"{name} needs {' '.join(f'--option {key}=…' for key in missing)}. Add it to the command")
    try:
        for key in options.keys() & takes.keys():
            if takes[key].annotation in NUMBERS:
                check_of(takes[key].annotation)(options[key])
        return kind(**options)
    except ExecutorError:
        raise
    except (TypeError, ValueError) as error:
        if not typed:  # the fault of the platform's module
            raise
        given = " --option ".join(f"{key}={value!r}" for key, value in typed.items())
        raise ExecutorError(f"{name} cannot use --option {given}: {error}. Give another value") from error
