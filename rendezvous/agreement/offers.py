"""The eligible offers that this replica has read.

    steps/{s}/offer/{slot}.0, .1, …    write-once; a slot's offer for step s is the first eligible one
       │
       ├─ rejected: wrong step, slot or codec; a digest of the wrong kind; a generation that was never claimed
       ├─ not eligible: it started from another θ than the chain's, or an earlier commit fenced its generation
       └─ eligible: an eligible offer never changes, so it is read once

The chain alone decides which record is eligible, so all replicas find the same record.  The attempt number (.0, .1, …)
lets a generation offer although its predecessor left a record that does not count; with one write-once key per slot, it
could not offer.

Not promised: that an unknown offer does not exist.  Only a new GET shows whether it exists.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import read_claim
from rendezvous.agreement.rules import Rules
from rendezvous.background import Together, fetch_together
from rendezvous.clock import Clock
from rendezvous.records.digests import is_digest, required_digest_kind
from rendezvous.records.records import Offer, WireError
from rendezvous.store import VOID, Store, put_once


@dataclass(eq=False, repr=False)
class OfferBook:
    """Eligible offers of the open step, and of earlier steps whose offers a commit may still list.

    on_foreign_base(offer): called if an offer for the open step started from another θ than this replica's.
    on_rejected(key, why): called once for each record under an offer's key that is not a valid offer.
    together: makes several requests at the same time.
    """

    store: Store
    clock: Clock
    chain: Chain
    rules: Rules
    on_foreign_base: Callable[[Offer], None]
    on_rejected: Callable[[str, str], None]
    together: Together
    step: int = 0
    base: str = ""
    _rejected_keys: set[str] = field(default_factory=set[str])
    _known_claims: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    _offers: dict[tuple[int, str], Offer] = field(default_factory=dict[tuple[int, str], Offer])  # offers never change

    def open_step(self, step: int, base: str) -> None:
        """Make `step` the open step.   base: digest of the θ from which the step starts."""
        self.step = step
        self.base = base
        self._offers = {k: o for k, o in self._offers.items() if k[0] >= step - self.rules.window}

    @property
    def known_slots(self) -> set[str]:
        """Slots whose eligible offer for the open step this replica has read."""
        return {slot for step, slot in self._offers if step == self.step}

    def has_offered(self, slot: str) -> bool:
        """Whether a generation of this slot has an eligible offer for the open step."""
        return self.standing_offer(self.step, slot) is not None

    # ------------------------------------------------------------------ our own

    def announce(self, mine: Offer) -> Offer:
        """Write this replica's offer under the first free attempt number, and return the slot's offer that counts.

        If an earlier generation has an eligible offer, return that offer: this replica's offer will then never count.
        """
        body = mine.encode()
        attempt = 0
        while True:
            key = layout.offer_key(mine.step, mine.slot, attempt)
            won, value = put_once(self.store, self.clock, key, body)
            if won:
                self._offers[mine.step, mine.slot] = mine
                return mine
            other = self.read_offer(key, value, mine.step, mine.slot)
            if other is not None and self.is_eligible(other):
                return other
            attempt += 1

    # ------------------------------------------------------------------ of any slot

    def standing_offer(self, s: int, slot: str) -> Offer | None:
        """Return a slot's offer for step s: its first eligible record, by any of its generations, or None."""
        return self.standing_offers(s, [slot]).get(slot)

    def standing_offers(self, s: int, slots: Iterable[str]) -> dict[str, Offer]:
        """Return slot -> offer for step s, for the slots that have one.  Read the slots' first records together."""
        slots = list(slots)
        first = [layout.offer_key(s, slot, 0) for slot in slots if (s, slot) not in self._offers]
        bodies = fetch_together(self.together, self.store.get, first)
        found = {slot: self._first_eligible(s, slot, bodies) for slot in slots}
        return {slot: offer for slot, offer in found.items() if offer is not None}

    def _first_eligible(self, s: int, slot: str, bodies: dict[str, bytes | None]) -> Offer | None:
        attempt = 0
        while (s, slot) not in self._offers:
            key = layout.offer_key(s, slot, attempt)
            body = bodies[key] if key in bodies else self.store.get(key)
            if body is None:
                return None
            if (offer := self.read_offer(key, body, s, slot)) is not None:
                self._count_if_eligible(offer)
            attempt += 1
        return self._offers[s, slot]

    def _count_if_eligible(self, offer: Offer) -> None:
        if self.is_eligible(offer):
            self._offers[offer.step, offer.slot] = offer
        elif offer.step == self.step and offer.base != self.base:
            self.on_foreign_base(offer)

    def is_eligible(self, offer: Offer) -> bool:
        base = self.base
        if offer.step != self.step:
            commit = self.chain.known_commit(offer.step)
            base = commit.base if commit else ""
        return rules.is_eligible(offer, base, self.chain.fence_before(offer.step))

    # ------------------------------------------------------------------ is it an offer at all?

    def read_offer(self, key: str, body: bytes, s: int, slot: str) -> Offer | None:
        """Decode the record under `key` as the slot's offer for step s.

        Return None for VOID, and for a rejected record.  Report a rejected record once.
        """
        if body == VOID:
            return None
        try:
            offer = Offer.decode(body)
            why = rules.offer_flaw(offer, s, slot, self.rules) or self._digest_flaw(offer) or self._claim_flaw(offer)
        except WireError as error:
            why = str(error)
        else:
            if not why:
                return offer
        if key not in self._rejected_keys:
            self._rejected_keys.add(key)
            self.on_rejected(key, why)
        return None

    def _digest_flaw(self, offer: Offer) -> str:
        """Return why a digest of the offer is refused (malformed, or not of the run's kind); "" if all are accepted."""
        kind = required_digest_kind(self.store)
        bad = [d for d in (offer.digest, *offer.shards) if not is_digest(d, kind)]
        return f"its blob's digest is {bad[0]!r}, and this run needs one by {kind}" if bad else ""

    def _claim_flaw(self, offer: Offer) -> str:
        """Return why the offer's generation is refused: it was never claimed, and would fence the slot's holder."""
        name = offer.slot, offer.generation
        if name not in self._known_claims:
            if read_claim(self.store, *name) is None:
                return f"no session claimed generation {offer.generation} of {offer.slot}"
            self._known_claims.add(name)
        return ""
