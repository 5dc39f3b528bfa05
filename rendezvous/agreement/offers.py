"""The offers that count, as far as this replica has read them.

    steps/{s}/offer/{slot}.0, .1, …    write-once; a slot's offer for step s is the first eligible one
       │
       ├─ none of this run: another step, slot or codec; a digest of another kind; a generation never claimed
       ├─ not eligible: made from another state than the chain's, or by a generation that was fenced before
       └─ eligible, and so for ever: it is read once

Which record is eligible depends on the chain alone, so all replicas find the same one.  The attempt number lets a
generation offer even if its predecessor left a record that does not count.  A single register per slot would not.

Not promised: that an offer which is not known here does not exist.  Only a GET made now tells.
"""

from collections.abc import Callable, Iterable

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import read_claim
from rendezvous.agreement.rules import Rules
from rendezvous.background import Together, fetch_together, in_turn
from rendezvous.clock import Clock
from rendezvous.records.digests import is_digest, required_digest_kind
from rendezvous.records.records import Offer, WireError
from rendezvous.store import VOID, Store, put_once


class OfferBook:
    """Eligible offers of the open step and of those before it that a commit may still list.

    on_foreign_base(offer): called where an offer for the open step started from another θ than ours.
    on_rejected(key, why): called once for each record that lies where an offer belongs and is not one.
    together: runs requests that go together.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chain: Chain,
        rules_: Rules,
        *,
        on_foreign_base: Callable[[Offer], None],
        on_rejected: Callable[[str, str], None],
        together: Together = in_turn,
    ) -> None:
        self._store = store
        self._clock = clock
        self._chain = chain
        self._rules = rules_
        self._on_foreign_base = on_foreign_base
        self._on_rejected = on_rejected
        self._together = together
        self._rejected_keys = set[str]()
        self._known_claims = set[tuple[str, int]]()
        self._offers: dict[tuple[int, str], Offer] = {}  # (step, slot) -> its eligible offer, which never changes
        self.step = 0
        self.base = ""

    def open_step(self, step: int, base: str) -> None:
        """Make `step` the open one; it starts from the state with digest `base`."""
        self.step = step
        self.base = base
        self._offers = {k: o for k, o in self._offers.items() if k[0] >= step - self._rules.window}

    @property
    def known_slots(self) -> set[str]:
        """Slots whose offer for the open step was read."""
        return {slot for step, slot in self._offers if step == self.step}

    def has_offered(self, slot: str) -> bool:
        """Whether this slot has an offer that counts for the open step, by any of its generations."""
        return self.standing_offer(self.step, slot) is not None

    # ------------------------------------------------------------------ our own

    def announce(self, mine: Offer) -> Offer:
        """Write this replica's offer under the first free attempt number; -> the slot's offer that counts.

        That is a predecessor's, if one is eligible: then ours will never count.
        """
        body = mine.encode()
        attempt = 0
        while True:
            key = layout.offer_key(mine.step, mine.slot, attempt)
            won, value = put_once(self._store, self._clock, key, body)
            if won:
                self._offers[mine.step, mine.slot] = mine
                return mine
            other = self.read_offer(key, value, mine.step, mine.slot)
            if other is not None and self.is_eligible(other):
                return other
            attempt += 1

    # ------------------------------------------------------------------ of any slot

    def standing_offer(self, s: int, slot: str) -> Offer | None:
        """A slot's offer for step s: its first eligible record, by any of its generations."""
        return self.standing_offers(s, [slot]).get(slot)

    def standing_offers(self, s: int, slots: Iterable[str]) -> dict[str, Offer]:
        """The offers for step s of those of the slots that have one; their first records are asked for together."""
        slots = list(slots)
        first = [layout.offer_key(s, slot, 0) for slot in slots if (s, slot) not in self._offers]
        bodies = fetch_together(self._together, self._store.get, first)
        found = {slot: self._first_eligible(s, slot, bodies) for slot in slots}
        return {slot: offer for slot, offer in found.items() if offer is not None}

    def _first_eligible(self, s: int, slot: str, bodies: dict[str, bytes | None]) -> Offer | None:
        attempt = 0
        while (s, slot) not in self._offers:
            key = layout.offer_key(s, slot, attempt)
            body = bodies[key] if key in bodies else self._store.get(key)
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
            self._on_foreign_base(offer)

    def is_eligible(self, offer: Offer) -> bool:
        base = self.base
        if offer.step != self.step:
            commit = self._chain.known_commit(offer.step)
            base = commit.base if commit else ""
        return rules.is_eligible(offer, base, self._chain.fence_before(offer.step))

    # ------------------------------------------------------------------ is it an offer at all?

    def read_offer(self, key: str, body: bytes, s: int, slot: str) -> Offer | None:
        """Decode the record under `key` as the slot's offer for step s.

        Returns None for VOID, and for a record that is no such offer.  Reports the latter once.
        """
        if body == VOID:
            return None
        try:
            offer = Offer.decode(body)
            why = rules.offer_flaw(offer, s, slot, self._rules) or self._digest_flaw(offer) or self._claim_flaw(offer)
        except WireError as error:
            why = str(error)
        else:
            if not why:
                return offer
        if key not in self._rejected_keys:
            self._rejected_keys.add(key)
            self._on_rejected(key, why)
        return None

    def _digest_flaw(self, offer: Offer) -> str:
        """The flaw in its digests, "" for none: a text that is not a digest, or a weaker kind than the run needs."""
        kind = required_digest_kind(self._store)
        bad = [d for d in (offer.digest, *offer.shards) if not is_digest(d, kind)]
        return f"its blob's digest is {bad[0]!r}, this run needs {kind}" if bad else ""

    def _claim_flaw(self, offer: Offer) -> str:
        """The flaw in its generation, "" if that was claimed: a made-up number would fence the slot's holder."""
        name = offer.slot, offer.generation
        if name not in self._known_claims:
            if read_claim(self._store, *name) is None:
                return f"no session claimed generation {offer.generation} of {offer.slot}"
            self._known_claims.add(name)
        return ""
