"""Compute the position at which a replacement continues its slot's data: the inner steps that commits count.

    commit   0          1          2          3                      F = 1: the sum of the slot's h
    r01      1: h 100   –          1: h 60    2: h 100  ──▶ 260      generation: inner steps inside its Δ
                                                                     –: its work of that step is lost; rows read again

    With several fragments, a Δ has the inner steps since its fragment's last Δ. So each Δ gives a position, and the
    largest counts.  During a fragment's transfer, `delay` steps are taken that no Δ of this fragment contains.

The position uses only commits. Outer steps × sync_every would count rows that a slow replica, or a replica with
sync_seconds, never read.

Not promised: the rows of an offer that came too late to be listed; they are read again.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from rendezvous.background import AT_ONCE, Together, fetch_together, together_on
from rendezvous.records.records import Commit, Listed, decode_or_none
from rendezvous.store import Readable

if TYPE_CHECKING:
    from diloco.run.config import OuterConfig


UNLUCKY = 2  # sessions of a slot without counted work, after which the next session makes its own rollouts


def read_offers(store: Readable, until: int, together: Together, since: int = 0) -> dict[str, list[Listed]]:
    """Return slot -> its offers in the commits from outer step `since` to before `until`, in order."""
    keys = [layout.commit_key(t) for t in range(since, until)]
    bodies = fetch_together(together, store.get, keys)
    found: dict[str, list[Listed]] = {}
    for commit in (decode_or_none(Commit, bodies[key] or b"") for key in keys):
        for offer in commit.offers if commit is not None else ():
            found.setdefault(offer.slot, []).append(offer)
    return found


def uncounted_sessions(offers: Iterable[Listed], generation: int) -> int:
    """Return how many sessions of a slot ended before `generation`, one after the other, without a counted offer.

    offers: the slot's offers that commits count."""
    return generation - 1 - max((offer.generation for offer in offers if offer.generation < generation), default=0)


def is_unlucky(store: Readable, slot: str, generation: int) -> bool:
    """Whether the UNLUCKY sessions of a slot before `generation` ended without counted work."""
    if generation <= UNLUCKY:
        return False
    earlier = list[Listed]()  # the newest offers of its sessions before
    end = first_open_step(store)
    while end and not earlier:
        before, end = end, max(0, end - AT_ONCE)
        found = read_offers(store, before, together_on(store), since=end).get(slot, ())
        earlier = [offer for offer in found if offer.generation < generation]
    return uncounted_sessions(earlier, generation) >= UNLUCKY


def counted_inner_steps(offers: Iterable[Listed], outer: "OuterConfig") -> int:
    """Return the number of inner steps of a slot's data that the slot's counted offers cover."""
    began = reached = generation = 0
    at: dict[int, int] = {}  # fragment -> this generation's position at its last counted offer
    for offer in offers:
        if offer.generation != generation:
            began, at, generation = reached, {}, offer.generation
        fragment = offer.step % outer.fragments
        before = at[fragment] + outer.fragment_sync_delay if fragment in at else began
        at[fragment] = before + offer.h
        reached = max(reached, at[fragment])
    return reached


def farthest(offers: Mapping[str, Iterable[Listed]], outer: "OuterConfig") -> int:
    """Return the largest number of counted inner steps of any slot."""
    return max((counted_inner_steps(of_slot, outer) for of_slot in offers.values()), default=0)
