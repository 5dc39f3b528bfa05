"""Clean untrusted text of characters that control a terminal or hide its meaning.

    controls (C0, C1), marks that reverse text, lone surrogates ──▶ U+FFFD
    every kind of white space                                 ──▶ a space
    an error of a library                                     ──▶ its first line

Not promised: to tell similar letters apart.
"""

import re

_ODD = re.compile(r"[^ -~]")


def printable(text: str, keep: str = "") -> str:
    """Return the clean text. Characters in `keep` ("\\n" for line breaks) stay."""
    return _ODD.sub(lambda found: found[0] if found[0] in keep else _plain(found[0]), text)


def _plain(character: str) -> str:
    return character if character.isprintable() else " " if character.isspace() else "\ufffd"


def first_line(error: BaseException) -> str:
    """Return the first line of what a library's error says; the kind of error if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
