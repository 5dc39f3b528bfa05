"""Supersede a run without a trained step by another run under the same URL (decision 024).

    RUN/steps/0000000000/commit.json   Superseded, by put_once: step 0 was not committed, and never will be
    RUN/again/                         the run that counts now, an ordinary run; it may be superseded too

    current(RUN) = RUN, or current(RUN/again) if a Superseded is there

One object decides.  A replica that would commit step 0 of the old run, however late, reads the Superseded
instead.  In a sealed run, a Superseded without the tag is ignored.
Nothing is deleted.

Not promised: a run at current(RUN), as the superseding process may have died before it created the run.
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
    """The record in place of commit 0: the run that counts is below `again`."""

    kind: ClassVar[str] = "superseded"
    nonce: Word
    at: UnixTime


def is_superseded(store: Readable) -> bool:
    """Whether the store has a Superseded of any writer."""
    body = store.get(layout.commit_key(0))
    if body is None or b'"superseded"' not in body[: Superseded.most]:
        return False
    try:
        return json.loads(body).get("kind") == Superseded.kind
    except (ValueError, AttributeError):
        return False


def leads_on(store: Store, answers: Readable) -> bool:
    """Whether the store has the run's own Superseded.   answers: the same store, or its earlier answers.

    A sealed run's Superseded must have the tag. Otherwise any writer to the bucket could keep the paying user
    from ending the fleet.  Raises WrongRun without the key of a sealed run."""
    if not is_superseded(answers):
        return False
    sealed = signed_store(store, run_key(), answers.get(layout.SEAL))
    try:
        return sealed is store or is_superseded(sealed)
    except Forged:
        return False


def current_url(url: str) -> str:
    """Return the current URL of the run that the user calls `url`."""
    while leads_on(store := open_store(url, make=False), store):
        url = url_below(url)
    return url


def url_below(url: str) -> str:
    """Convert "s3://b/x?region=r" -> "s3://b/x/again?region=r"."""
    path, mark, query = url.partition("?") if "://" in url else (url, "", "")
    return f"{path.rstrip('/')}/{layout.AGAIN}{mark}{query}"
