"""Warnings about objects of a run that are left out, as notes of the command.

    /path/of/late_rewards.py:86: TraceWarning: rollouts/… ──▶ warning: rollouts/…: it is of another run. It is left out.

Not promised: warnings of other kinds.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from executors.cli.answers import say
from inner import TraceWarning


@contextmanager
def warnings_said() -> Iterator[None]:
    """Print each TraceWarning of the block once, without the place in the source that gave it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", TraceWarning)
        yield
    for one in found:
        if not issubclass(one.category, TraceWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    for text in dict.fromkeys(str(one.message) for one in found if issubclass(one.category, TraceWarning)):
        say(f"warning: {text}")
