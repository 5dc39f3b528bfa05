"""The run key, and whether the run at a URL is sealed with it (signed.py, which only such a run imports).

    seal.json   DILOCO_RUN_KEY
      no           no              the store as it is
      yes          yes             SignedStore, if the seal is of this key
      no           yes             if there is no run yet: a seal is written first
      else                         WrongRun: the key is missing, not expected, or wrong

Not promised: that a run key is secret; each process that can read a replica's environment has it.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import WrongRun
from rendezvous.store import KEY, Store, put_once
from rendezvous.stores.open import open_store

if TYPE_CHECKING:
    from rendezvous.stores.signed import SignedStore

LEAST = 16  # characters of a run key: a reader of the bucket can try guesses without limit


def as_sealed(store: object) -> "SignedStore | None":
    """Return the store if its run is sealed, else None."""
    return store if getattr(store, "is_sealed", False) else None  # pyright: ignore[reportReturnType]


def run_key(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the run key in the environment, or None.   Raise WrongRun if it is too short."""
    text = (os.environ if environ is None else environ).get(KEY, "").strip()
    if not text:
        return None
    if len(text) < LEAST:
        raise WrongRun(
            f"the run key in {KEY} has {len(text)} characters; it needs {LEAST}, because it can be guessed offline. "
            "Make one: python -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return text.encode()


def open_signed(url: str) -> Store:
    """Return the store at `url`, sealed if the environment has a run key; without a run there, write its seal."""
    return under_key(open_store(url, make=False), SystemClock(), run_key())


def under_key(store: Store, clock: Clock, secret: bytes | None, *, ask: Store | None = None) -> Store:
    """Return `store`, sealed if it has a run with this run key, or has no run and a key is given.

    Raise WrongRun if the run there has another key or no key, or if its key is missing here.
    ask: the store to which this function sends its requests: the same bucket, perhaps with retries.
    """
    if as_sealed(store) is not None:
        return store
    ask = ask or store
    stands = ask.get(layout.SEAL)
    if stands is None and secret is not None and not _holds_a_run(ask):
        from rendezvous.records.records import new_nonce
        from rendezvous.stores.signed import Seal, sign_record

        mine = sign_record(Seal(new_nonce(), clock.wall()).encode(), secret, "", layout.SEAL)
        _, stands = put_once(ask, clock, layout.SEAL, mine)
    return signed_store(store, secret, stands)


def signed_store(store: Store, secret: bytes | None, stands: bytes | None) -> Store:
    """Return the store of a run with this key, or without a key.   Raise WrongRun if key and seal do not fit.

    stands: the run's seal.json; None if the run has no seal.
    """
    if stands is None and secret is None:
        return store
    from rendezvous.stores.signed import sealed_store

    return sealed_store(store, secret, stands)


def _holds_a_run(store: Store) -> bool:
    first = (layout.RUN, layout.control_key(0), layout.commit_key(0), layout.claim_key(layout.slot_name(0), 1))
    return any(store.get(key) is not None for key in first)
