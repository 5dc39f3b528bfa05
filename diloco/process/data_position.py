"""The position from which a replacement goes on in its slot's data: the counted inner steps, read from the chain.

    commit   0          1          2          3                      F = 1: the sum of the slot's h
    r01      1: h 100   –          1: h 60    2: h 100  ──▶ 260      generation: inner steps inside its Δ
                                                                     –: its work of that step is lost, and is read again

    of several fragments each Δ holds the inner steps since its fragment's last, so each tells how far its session was:
    the farthest counts.  While a fragment travels, `delay` steps are taken that no Δ of it holds.

The chain alone: outer steps × sync_every would count what a slow replica, or one with sync_seconds, has never read.

Not promised: rows of an offer that came too late to be listed; as much is read once more.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.background import Together, fetch_together
from rendezvous.records.records import Commit, Listed, decode_or_none
from rendezvous.store import Readable

if TYPE_CHECKING:
    from diloco.run.config import OuterConfig


def read_offers(store: Readable, until: int, together: Together) -> dict[str, list[Listed]]:
    """Slot -> its offers that the commits before outer step `until` list, in their order."""
    keys = [layout.commit_key(t) for t in range(until)]
    bodies = fetch_together(together, store.get, keys)
    found: dict[str, list[Listed]] = {}
    for commit in (decode_or_none(Commit, bodies[key] or b"") for key in keys):
        for offer in commit.offers if commit is not None else ():
            found.setdefault(offer.slot, []).append(offer)
    return found


def counted_inner_steps(offers: Iterable[Listed], outer: "OuterConfig") -> int:
    """Return how many inner steps of its data one slot's counted offers cover."""
    began = reached = generation = 0
    at: dict[int, int] = {}  # where this generation stood with its last counted offer of each fragment
    for offer in offers:
        if offer.generation != generation:
            began, at, generation = reached, {}, offer.generation
        fragment = offer.step % outer.fragments
        before = at[fragment] + outer.fragment_sync_delay if fragment in at else began
        at[fragment] = before + offer.h
        reached = max(reached, at[fragment])
    return reached


def farthest(offers: Mapping[str, Iterable[Listed]], outer: "OuterConfig") -> int:
    """Return the same number for the slot that has come farthest."""
    return max((counted_inner_steps(of_slot, outer) for of_slot in offers.values()), default=0)
