"""A run in which nothing was trained may make room for another one under the same URL (decision 024).

    RUN/steps/0000000000/commit.json   Superseded, by put_once: step 0 was not committed, and never will be
    RUN/again/                         the run that counts now, an ordinary one; perhaps superseded in its turn

    current(RUN) = RUN, or current(RUN/again) where a Superseded stands

One register decides.  Whoever would have committed step 0 there, however long it slept, reads the Superseded instead.
Nothing is deleted.

Not promised: that a run stands at current(RUN): who superseded it may have died before founding it.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

from rendezvous import layout
from rendezvous.records import Record, UnixTime, Word
from rendezvous.store import Store, open_store


@dataclass(frozen=True)
class Superseded(Record):
    """Stands where commit 0 would: the run that counts is below `again`."""

    kind: ClassVar[str] = "superseded"
    nonce: Word
    at: UnixTime


def superseded(store: Store) -> bool:
    """Does a Superseded stand there?  Sealed or not: `again` has a seal of its own, so a forged one leads nowhere."""
    body = store.get(layout.commit(0))
    if body is None or b'"superseded"' not in body[: Superseded.most]:
        return False
    try:
        return json.loads(body).get("kind") == Superseded.kind
    except (ValueError, AttributeError):
        return False


def current(url: str) -> str:
    """Where the run that people call `url` is now."""
    while superseded(open_store(url)):
        url = below(url)
    return url


def below(url: str) -> str:
    """ "s3://b/x?region=r" -> "s3://b/x/again?region=r" """
    path, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{path.rstrip('/')}/{layout.AGAIN}{mark}{query}"
