"""The output of a command: an answer for programs or for people, notes on stderr, and error messages.

    act(args) ──▶ Answer(data, lines, code) ──▶ stdout: lines, or --json: data        stderr: note, say
    an error  ──▶ failures.py

    step 3 was closed by r01-1 at 2026-11-23 23:44:35.233 UTC: 2 fresh and 0 late
      pseudogradients, min_replicas 2, …              ◀── sentences, in a terminal: wrapped, with two more spaces

Not promised: stable texts for people; programs read --json.  Lines wider than the terminal lose their alignment.
"""

import json
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from executors.preflight.quote import Quote

NARROWEST = 20  # columns; a terminal that reports a smaller width would get one word per line
DECLINED = 130


@dataclass(frozen=True)
class Answer:
    """The output of a command.   data: what programs get.   lines: what people see.   note: then printed to stderr.

    sentences: whether to wrap the lines.   A command that has printed its output itself leaves all fields empty.
    """

    data: Mapping[str, Any] = field(default_factory=dict)
    lines: Sequence[str] = ()
    code: int = 0
    note: str = ""
    sentences: bool = False


Act = Callable[[Namespace], Answer]


def print_answer(answer: Answer, as_json: bool) -> int:
    """Print the answer; return its exit code."""
    lines = fit_lines(answer.lines, sys.stdout) if answer.sentences else answer.lines
    if answer.data if as_json else lines:
        print(json.dumps(answer.data, indent=1) if as_json else "\n".join(lines), flush=True)
    if answer.note:
        say(answer.note)
    return answer.code


def say(text: str) -> None:
    """Print a text for the user on stderr."""
    print(text, file=sys.stderr, flush=True)


def agree_on_price(offer: "Quote", yes: bool) -> bool:
    """Show the costs of a start, and ask the user to accept them; return whether the user accepted."""
    from executors.preflight.quote import ask_agreement

    if not offer.free:
        say("\n".join(f"  {line}" for line in offer.lines()))
    return ask_agreement(offer, yes)


# -------------------------------------------------------------------- sentences


def fit_lines(lines: Iterable[str], out: TextIO) -> list[str]:
    """Return the lines, wrapped if `out` is a terminal; else unchanged, for `grep`."""
    if not out.isatty():
        return [*lines]
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    return [piece for line in lines for piece in wrap_line(line, width)]


def wrap_line(line: str, width: int) -> list[str]:
    """Return the line, wrapped only between words, so that you can copy a path or command longer than the terminal."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())] + "  "
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
