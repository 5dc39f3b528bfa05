"""Untrusted text, without characters that steer a terminal or hide its meaning.

    controls (C0, C1), what turns text round, lone surrogates ──▶ U+FFFD
    every kind of white space                                 ──▶ a blank

Not promised: that letters which look alike are the same.
"""

import re

_ODD = re.compile(r"[^ -~]")


def printable(text: str, keep: str = "") -> str:
    """Return the text; what stands in `keep` ("\\n" where lines are meant) stays."""
    return _ODD.sub(lambda found: found[0] if found[0] in keep else _plain(found[0]), text)


def _plain(character: str) -> str:
    return character if character.isprintable() else " " if character.isspace() else "\ufffd"
