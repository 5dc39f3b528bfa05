"""Sentences at the width of a terminal; elsewhere one line each, for `grep` and for programs.

    step 3 was closed by r01-1 at 2026-11-23 23:44:35.233 UTC: 2 fresh and 0 late
      pseudogradients, min_replicas 2, …              ◀── its own indent and two more

Not promised: columns of a table; what is wider than the terminal loses its alignment.
"""

import shutil
import textwrap
from collections.abc import Iterable
from typing import TextIO

NARROWEST = 20  # below this a terminal that names its width wrongly would get a word per line


def fit_lines(lines: Iterable[str], out: TextIO) -> list[str]:
    """The lines as they are to be printed there."""
    if not out.isatty():
        return [*lines]
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    return [piece for line in lines for piece in wrap_line(line, width)]


def wrap_line(line: str, width: int) -> list[str]:
    """Wrap between words alone: a path or command that is longer than the terminal stays whole, to be copied."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
