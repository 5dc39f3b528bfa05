"""The parts of a commit that views need: its time, its writer and its listed offers.

    bytes ── read_commit ──▶ Decision        every rule of the protocol is checked (rendezvous/records/records.py)
    bytes from the cache ── kept_commit ──▶  the same without checks, because the cache has only checked bytes: a
                                             second read of 1,000 outer steps decodes 1,000 commits

Not promised: the parts of a commit that a replica needs: weights, digests, fences.
"""

import json
from typing import NamedTuple

from rendezvous.records.records import Commit


class Counted(NamedTuple):
    """One offer that a commit lists.   factor: the norm gate's factor.   samples: how many it learned from.

    zero: its pseudogradient is zero."""

    step: int
    slot: str
    generation: int
    nonce: str
    factor: float = 1.0
    samples: float = 0.0
    zero: bool = False


class Decision(NamedTuple):
    """One commit.   prev: digest of the commit before.   snapshot: step of the newest snapshot that its writer knew."""

    t: int
    at: float
    by: str
    prev: str | None
    offers: tuple[Counted, ...]
    snapshot: int

    @property
    def fresh(self) -> tuple[Counted, ...]:
        return tuple(o for o in self.offers if o.step == self.t)

    @property
    def carried(self) -> tuple[Counted, ...]:
        return tuple(o for o in self.offers if o.step < self.t)


def read_commit(body: bytes) -> Decision:
    """Decode and check a commit's bytes.   Raises only WireError for bad bytes."""
    c = Commit.decode(body)
    offers = tuple(Counted(*(getattr(o, name) for name in Counted._fields)) for o in c.offers)
    return Decision(c.t, c.at, c.by, c.prev, offers, c.snapshot)


def kept_commit(body: bytes) -> Decision:
    """Decode a commit from the cache.   Raises WireError for another release's format."""
    try:
        raw = json.loads(body)
        offers = tuple(Counted(**{k: v for k, v in o.items() if k in Counted._fields}) for o in raw["offers"])
        return Decision(raw["t"], raw["at"], raw["by"], raw["prev"], offers, raw["snapshot"])
    except (ValueError, KeyError, TypeError):
        return read_commit(body)
