"""Explains a mistyped command in one line, with the nearest known word.

    diloco trian run.toml          ──▶  diloco: there is no VERB 'trian'; did you mean train?
    diloco train c --run r --gpus  ──▶  diloco train: there is no option --gpus; did you mean --gpu?
    diloco status -mine            ──▶  …: RUN must be given; write a name that begins with a dash as ./-mine
    diloco logs r01 --run r        ──▶  as `diloco logs r r01`: the run may be written as for `train`

Not promised: that the nearest word is the word that you meant.
"""

import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice

_CHOICE = re.compile(r"argument (.+?): invalid choice: '?(.*?)'? \(choose from (.*)\)", re.DOTALL)

RUNS = {"run", "old", "store"}  # positional arguments that name a run


def run_first(words: Sequence[str], positional: Sequence[str]) -> list[str]:
    """Return a verb's words with the values of --run as its first arguments.   positional: the verb's."""
    if not RUNS.intersection(positional[:1]):
        return [*words]
    runs, rest, left = list[str](), list[str](), iter(words)
    for word in left:
        if word == "--run":
            runs += islice(left, 1)
        elif word.startswith("--run="):
            runs.append(word.removeprefix("--run="))
        else:
            rest.append(word)
    return [*rest[:1], *runs, *rest[1:]]


def unknown_words(unknown: Sequence[str], options: Iterable[str]) -> str:
    """Return a message about the first word of `unknown`; if the word looks like an option, name the nearest option."""
    first, options = unknown[0].partition("=")[0], list(options)
    if first in options:
        if "--" in sys.argv:
            return f"{first} is behind `--`, which ends the options; leave the `--` out"
        return f"{first} is before the verb; write the verb first, then its options"
    if not first.startswith("-"):
        return f"{first!r} is one word too many; words with blanks need quotes"
    return f"there is no option {first}{nearest_hint(first, options) or _dash_hint()}"


def nearest_hint(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?", or "" if no known word is near."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def in_words(message: str, prog: str) -> str:
    """Return argparse's message, with the nearest choice or the next thing to do."""
    message = re.sub(r", maybe you meant '[^']*'\?", "", message)  # Python 3.15 names a choice of its own
    if (choice := _CHOICE.fullmatch(message)) is not None:
        name, word, listed = choice.groups()
        known = re.findall(r"[\w.-]+", listed)
        first = "; the verb comes first, then its options" if name == "VERB" else ""
        near = [*known, "--help", "--version"] if name == "VERB" else known
        return f"there is no {name} {word!r}" + (nearest_hint(word, near) or f"{first}; there are {', '.join(known)}")
    if message.startswith("the following arguments are required"):
        missing = message.partition(": ")[2].removesuffix(", ARGUMENTS")  # a script's own: it may have none
        return f"{missing} must be given{_dash_hint()}; `{prog} --help` explains it"
    return message.removeprefix("argument ") + (_dash_hint() if message.endswith("expected one argument") else "")


def _dash_hint() -> str:
    """Return how to write a first word that begins with one dash and is too long for an option, or ""."""
    word = next((word for word in sys.argv[2:] if re.match("-[^-].", word)), "")
    return f"; write a name that begins with a dash as ./{word}" if word else ""
