"""Import a module of an optional package, or say what it is needed for and how to install it.

Not promised: that the installed version works.
"""

from importlib import import_module
from typing import Any

from inner.errors import InnerError


def optional(module: str, absent: str) -> Any:
    """Import a module of an optional package.   absent: the InnerError's text without it; "{}" is what was missing."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InnerError(absent.format(error)) from error
