"""Closing the open step: who has offered, is it time, and what the decision says.

    at every poll   fresh offers ── fewer than m ──────────────────▶ wait
                         │ m or more
                    is anybody worth waiting for? ── yes ──────────▶ wait          rules.waiting_for
                         │ no
                    did the operator's wishes change? ── yes ──────▶ look again
                         │ no
                    put_once commit.json: fresh and late offers, weights, fence, pace

Everybody whose own offer is durable does this, staggered by rank; put_once picks one of them.

Not promised: that the closer lives to read its own decision.  Nobody needs it for that.
"""

from collections.abc import Callable

from rendezvous import layout, rules
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.membership import Membership, Wanted
from rendezvous.records import Commit, Listed, Offer, nonce
from rendezvous.rules import Rules, Timing
from rendezvous.store import Store, put_once


class Vigil:
    """How long a replica has watched one step.  Its own pauses do not count: a sleeper has not waited.

    idle: seconds since it began to look.   waited: seconds since it saw m fresh offers.
    """

    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock, self._timing = clock, timing
        self._looked_at, self._elapsed = clock.now(), 0.0
        self.polls, self.idle, self.waited = 0, 0.0, 0.0

    @property
    def pause(self) -> float:
        """Polls come slower the longer a step stands open."""
        return self._timing.poll * min(4.0, 1 + self.polls / 20)

    def look(self) -> None:
        now = self._clock.now()
        self._elapsed, self._looked_at = min(now - self._looked_at, 4 * self.pause), now
        self.idle += self._elapsed

    def quorum(self, reached: bool) -> None:
        self.waited = self.waited + self._elapsed if reached else 0.0

    def sleep(self) -> None:
        self.polls += 1
        self._clock.sleep(self.pause)


class Closer:
    """One replica's eyes on the open step, and its hand.

    alien(offer): called when somebody's offer for the open step started from another θ than ours.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chain: Chain,
        members: Membership,
        rules_: Rules,
        timing: Timing,
        alien: Callable[[Offer], None],
    ) -> None:
        self._store, self._clock, self._chain, self._members = store, clock, chain, members
        self._rules, self._timing, self._alien = rules_, timing, alien
        self.step, self.base = 0, ""
        self._offers: dict[tuple[int, str], Offer] = {}  # eligible ones: they can never become anything else

    def turn(self, step: int, base: str) -> None:
        """From now on `step` is the open one; it starts from the state with digest `base`."""
        self.step, self.base = step, base
        self._offers = {k: o for k, o in self._offers.items() if k[0] >= step - self._rules.window}

    def attempt(self, vigil: Vigil, snapshot: int) -> str:
        """Close the step if it is time; -> why not yet, or "" when it is decided.

        snapshot: step of the newest one known.
        """
        wishes = self._members.wanted
        if vigil.polls < 2 * rules.rank(self.step, layout.slot_index(self._members.slot), wishes.universe):
            return "lets others close first"
        fresh = self._fresh(wishes)
        vigil.quorum(len(fresh) >= wishes.min_replicas)
        why_not = self._why_not(fresh, wishes, vigil.waited) or self._news(wishes)
        if not why_not:
            commit = self._proposal(fresh, wishes, snapshot)
            _, stands = put_once(self._store, self._clock, layout.commit(self.step), commit.encode())
            self._chain.accept(self.step, stands)
        return why_not

    # ------------------------------------------------------------------ offers

    def mine(self, offer: Offer) -> None:
        """Ours is durable and eligible."""
        self._offers[offer.step, offer.slot] = offer

    def standing(self, s: int, slot: str) -> Offer | None:
        """A slot's offer for step s: its first eligible record.  Which one is eligible depends on the chain alone."""
        attempt = 0
        while (s, slot) not in self._offers:
            body = self._store.get(layout.offer(s, slot, attempt))
            if body is None:
                return None
            self._judge(Offer.decode(body))
            attempt += 1
        return self._offers[s, slot]

    def eligible(self, offer: Offer) -> bool:
        base = self.base
        if offer.step != self.step:
            commit = self._chain.known(offer.step)
            base = commit.base if commit else ""
        return rules.eligible(offer, base, self._chain.fence(offer.step))

    def _judge(self, offer: Offer) -> None:
        if self.eligible(offer):
            self._offers[offer.step, offer.slot] = offer
        elif offer.step == self.step and offer.base != self.base:
            self._alien(offer)

    def _fresh(self, wishes: Wanted) -> dict[str, Offer]:
        """Eligible offers for the open step, by slot, as far as they are durable now."""
        found: dict[str, Offer] = {}
        for slot in self._slots(wishes):
            known = (self.step, slot) in self._offers
            offer = self.standing(self.step, slot)
            if offer is not None:
                found[slot] = offer
                if not known:
                    self._members.arrived(offer)
        return found

    def _late(self, s: int, wishes: Wanted) -> list[Offer]:
        """Eligible offers for step s that no commit has listed.  Each may be listed once, by the chain alone."""
        if s < 0:
            return []
        since = self._chain.recent(self.step, self.step - s)
        missing = [slot for slot in self._slots(wishes) if not any(c.lists(s, slot) for c in since)]
        return [o for slot in missing if (o := self.standing(s, slot)) is not None]

    def _slots(self, wishes: Wanted) -> list[str]:
        """All slots that can exist, ours at least."""
        return sorted({*wishes.slots, self._members.slot})

    # ------------------------------------------------------------------ is it time?

    def _why_not(self, fresh: dict[str, Offer], wishes: Wanted, waited: float) -> str:
        """What speaks against closing now; "" when nothing does."""
        members, m = self._members, wishes.min_replicas
        if members.slot not in fresh:
            return "has no offer of its own that counts"  # only who has one knows the θ that the step is about
        if len(fresh) < m:
            return f"has offers of {', '.join(sorted(fresh))}, needs min_replicas={m}; {self._silence(fresh, wishes)}"
        recent, wanted = self._chain.recent(self.step, 2), wishes.slots[: wishes.replicas]
        expected = rules.expected(self.step, recent, members.peers, self._timing.dead_after, wanted)
        reasons = rules.waiting_for(
            self.step, fresh, expected - {members.slot}, members.peers, waited, self._rules, self._timing
        )
        return "; ".join(f"{slot} {why}" for slot, why in sorted(reasons.items()))

    def _silence(self, fresh: dict[str, Offer], wishes: Wanted) -> str:
        """Who is missing, and what was last seen of them."""
        missing = [s for s in wishes.slots[: wishes.replicas] if s not in fresh]
        peers, limit = self._members.peers, self._timing.dead_after
        words = [f"{s} {peers[s].words(limit)}" if s in peers else f"{s} was never seen" for s in missing]
        return ", ".join(words) or "no other replica is wanted"

    def _news(self, wishes: Wanted) -> str:
        """A commit goes by every wish that was durable before its closer looked: there may be a new slot, or m."""
        heard = self._members.listen(self._store)
        return "" if heard.records == wishes.records else "the operator has new wishes"

    # ------------------------------------------------------------------ the decision

    def _proposal(self, fresh: dict[str, Offer], wishes: Wanted, snapshot: int) -> Commit:
        t, tooks = self.step, [o.took for o in fresh.values()]
        sizes, r = [o.size for o in fresh.values()], self._rules
        sharded = rules.reduces_sharded(sizes, r.codec, r.shard_from) and all(o.shards for o in fresh.values())
        owners = tuple(s for s, o in sorted(fresh.items()) if not o.leaving) if sharded else ()
        listed = [self._listed(o, 0) for _, o in sorted(fresh.items())]
        for age in range(1, self._rules.max_carry + 1):
            listed += [self._listed(o, age) for o in self._late(t - age * self._rules.fragments, wishes)]
        return Commit(
            t, self._chain.digest(t - 1), self.base, tuple(listed), self._fence(listed, wishes), wishes.min_replicas,
            rules.pace(tooks, self._timing.poll), snapshot, self._members.name, nonce(), self._clock.wall(),
            "sharded" if owners else "direct", owners,
        )  # fmt: skip

    def _listed(self, o: Offer, age: int) -> Listed:
        w = rules.weight(o.h, self._rules.sync_every, age, self._rules.age_discount)
        return Listed(
            o.step, o.slot, o.generation, o.nonce, o.blob, o.size, o.digest, o.h, w, o.zero, o.leaving, o.shards
        )  # fmt: skip

    def _fence(self, listed: list[Listed], wishes: Wanted) -> dict[str, int]:
        """Nobody below the newest claim of its slot may offer after this step."""
        fence = dict(self._chain.fence(self.step))
        for o in listed:
            fence[o.slot] = max(fence.get(o.slot, 0), o.generation)
        for slot in self._slots(wishes):
            generation = fence.get(slot, 0)
            while self._store.get(layout.claim(slot, generation + 1)) is not None:
                generation += 1
            if generation:
                fence[slot] = generation
        return fence
