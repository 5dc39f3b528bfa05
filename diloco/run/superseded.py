"""A run in which nothing was trained may make room for another one under the same URL (decision 024).

    RUN/steps/0000000000/commit.json   Superseded, by put_once: step 0 was not committed, and never will be
    RUN/again/                         the run that counts now, an ordinary one; perhaps superseded in its turn

    current(RUN) = RUN, or current(RUN/again) where a Superseded stands

One register decides.  A replica that would have committed step 0 there, however long it slept, reads the Superseded
instead.  In a sealed run one without the tag counts as none.
Nothing is deleted.

Not promised: that a run stands at current(RUN): the superseding process may have died before founding it.
"""

import json
from dataclasses import dataclass
from typing import ClassVar

from rendezvous import layout
from rendezvous.errors import Forged
from rendezvous.records.records import Record, UnixTime, Word
from rendezvous.store import Readable, Store
from rendezvous.stores.open import open_store
from rendezvous.stores.signed import run_key, signed_store


@dataclass(frozen=True)
class Superseded(Record):
    """Stands where commit 0 would: the run that counts is below `again`."""

    kind: ClassVar[str] = "superseded"
    nonce: Word
    at: UnixTime


def is_superseded(store: Readable) -> bool:
    """Whether a Superseded stands there, from any writer."""
    body = store.get(layout.commit_key(0))
    if body is None or b'"superseded"' not in body[: Superseded.most]:
        return False
    try:
        return json.loads(body).get("kind") == Superseded.kind
    except (ValueError, AttributeError):
        return False


def leads_on(store: Store, answers: Readable) -> bool:
    """Whether the run's own Superseded stands there.   answers: the same store, or its earlier answers.

    In a sealed run one without the tag counts as none; otherwise any writer to the bucket could keep the paying user
    from ending the fleet.  Raises WrongRun without the key of a sealed run."""
    if not is_superseded(answers):
        return False
    sealed = signed_store(store, run_key(), answers.get(layout.SEAL))
    try:
        return sealed is store or is_superseded(sealed)
    except Forged:
        return False


def current_url(url: str) -> str:
    """Return the present URL of the run that people call `url`."""
    while leads_on(store := open_store(url, make=False), store):
        url = url_below(url)
    return url


def url_below(url: str) -> str:
    """ "s3://b/x?region=r" -> "s3://b/x/again?region=r" """
    path, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{path.rstrip('/')}/{layout.AGAIN}{mark}{query}"
