"""Makes an executor with options as a user typed them; an option of the wrong type is named.

    {"cores": "abc"}, takes: cores: float  ──▶ ExecutorError: modal cannot use --option cores='abc': 'abc', not a number

Not promised: a check of options that are no numbers; the executor's constructor may refuse them, or a later request.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from executors.platforms.base import ExecutorError
from rendezvous.records.schema import check_of

NUMBERS = (int, float, float | None)


def make_with(kind: Callable[..., Any], options: Mapping[str, Any], name: str, typed: Mapping[str, Any]) -> Any:
    """Return kind(**options).   Raise ExecutorError if a value is of the wrong type.   typed: the user's options."""
    takes = signature(kind).parameters
    try:
        for key in options.keys() & takes.keys():
            if takes[key].annotation in NUMBERS:
                check_of(takes[key].annotation)(options[key])
        return kind(**options)
    except ExecutorError:
        raise
    except (TypeError, ValueError) as error:
        given = " --option ".join(f"{key}={value!r}" for key, value in typed.items())
        raise ExecutorError(f"{name} cannot use --option {given}: {error}. Give another value") from error
