"""Mask secrets in texts that a run keeps: rollouts, events, notes, last lines of a log.

    JUDGE_API_KEY=AIza…      "HTTPError: … for url: https://api/score?key=AIza…"  ──▶  "… ?key=***"

A secret is the value of an environment variable with KEY, TOKEN, SECRET, PASSWORD or CREDENTIAL in its name, unless
that is the word TOKENIZER, or the name ends with _PATH, _FILE or _DIR; or a login (NAME:PASSWORD@) in a variable's URL.

Not promised: that a text has no other secret, such as a number, or a secret that user code reads from a file.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping

_SECRET = re.compile(r"(KEY|TOKEN(?!IZER)|SECRET|PASSWORD|CREDENTIAL)(?!.*_(PATH|FILE|DIR)$)", re.I)
_LOGIN = re.compile(r"://([^/@\s]*:([^/@\s]+))@")  # of a URL
_NUMBER = re.compile(r"[-+.\d]+(e[-+]?\d+)?", re.I)


def secrets_here(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the values to mask: secrets of 8 characters or more that are not numbers."""
    named = [value for name, value in environ.items() if _SECRET.search(name)]
    named += [part for value in environ.values() for login in _LOGIN.findall(value) for part in login]
    return [value for value in named if len(value) >= 8 and not _NUMBER.fullmatch(value)]


def secret_masker(secrets: Iterable[str]) -> Callable[[str], str]:
    """Return a function that replaces each of the secrets in a JSON text by ***, and leaves escape sequences whole."""
    found = sorted({json.dumps(s)[1:-1] for s in secrets if s}, key=len, reverse=True)
    pattern = re.compile(rf"({'|'.join(map(re.escape, found))})|\\(?:u....|.)") if found else None
    return (lambda text: pattern.sub(lambda at: "***" if at[1] else at[0], text)) if pattern else (lambda text: text)


def mask_secrets(text: str) -> str:
    """Mask the secrets of this process's environment in a plain text."""
    return json.loads(secret_masker(secrets_here())(json.dumps(text)))
