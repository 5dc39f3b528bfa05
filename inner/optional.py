"""Import a module of an optional package, or say what needs this package and how to install it.

Not promised: that the installed version works.
"""

from importlib import import_module
from typing import Any

from inner.errors import InnerError


def optional(module: str, absent: str) -> Any:
    """Import a module of an optional package.   absent: text of the InnerError if that fails; "{}": Python's reason."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InnerError(absent.format(error)) from error
