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

from collections.abc import Callable, Iterable

from rendezvous import layout, rules
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.digests import is_digest, needed
from rendezvous.errors import BadCommit
from rendezvous.membership import Membership, Wanted, claims, read_claim, refuse_lower_quorum
from rendezvous.records import Commit, Listed, Offer, WireError, nonce
from rendezvous.rules import Rules, Timing
from rendezvous.store import VOID, Store, put_once


class Vigil:
    """How long a replica has watched one step.  Its own pauses do not count: a sleeper has not waited.

    idle: seconds since it began to look.   waited: since it saw m fresh offers.   again: no attempt before this `idle`.
    """

    def __init__(self, clock: Clock, timing: Timing) -> None:
        self._clock, self._timing = clock, timing
        self._looked_at, self._elapsed = clock.now(), 0.0
        self._since: float | None = None  # `idle` when m fresh offers were last seen
        self._long = 0.0  # `idle` when `long` was last true
        self.idle, self.waited, self.again = 0.0, 0.0, 0.0

    @property
    def pause(self) -> float:
        """An eighth of what was waited so far: polling adds little to any wait, and little is asked of the store."""
        return min(4 * self._timing.poll, max(self._timing.poll / 8, self.idle / 8))

    def look(self) -> None:
        now = self._clock.now()
        self._elapsed, self._looked_at = min(now - self._looked_at, 4 * max(self.pause, self._timing.poll)), now
        self.idle += self._elapsed

    def quorum(self, reached: bool) -> None:
        gap = self._elapsed if self._since is None else self.idle - self._since
        self.waited = self.waited + gap if reached else 0.0
        self._since = self.idle if reached else None

    def long(self, normal: float = 0.0) -> bool:
        """Are the others long in coming?  True once in every `dead_after`, or `normal` if that is more."""
        if self.idle - self._long <= max(self._timing.dead_after, normal):
            return False
        self._long = self.idle
        return True

    def sleep(self) -> None:
        self._clock.sleep(self.pause)


class Closer:
    """One replica's eyes on the open step, and its hand.

    alien(offer): called when somebody's offer for the open step started from another θ than ours.
    skipped(key, why): called once for each record that lies where an offer belongs and is none.
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
        skipped: Callable[[str, str], None],
    ) -> None:
        self._store, self._clock, self._chain, self._members = store, clock, chain, members
        self._rules, self._timing, self._alien, self._skipped = rules_, timing, alien, skipped
        self._odd, self._claimed = set[str](), set[tuple[str, int]]()
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
        rank = rules.rank(self.step, layout.slot_index(self._members.slot), wishes.universe)
        apart = rules.stagger(rank, wishes.universe) * self._timing.poll
        if vigil.idle < max(apart, vigil.again):
            return "lets others close first"
        vigil.again = vigil.idle + apart if wishes.universe > rules.CROWD and rank == 3 else 0.0
        fresh = self._fresh(wishes)
        vigil.quorum(len(fresh) >= wishes.min_replicas)
        why_not = self._why_not(fresh, wishes, vigil.waited) or self._news(wishes)
        if not why_not:
            self._chain.refuse_gap(self.step)
            self.refuse_lower_quorum()
            commit = self._proposal(fresh, wishes, snapshot)
            _, stands = put_once(self._store, self._clock, layout.commit(self.step), commit.encode())
            self._chain.accept(self.step, stands)
        return why_not

    def refuse_lower_quorum(self) -> None:
        """Raises RecordsLost if wishes that earlier closers went by are gone."""
        members, commits = self._members, self._chain.recent(self.step, self._rules.window)
        if any(commit.m > members.wanted.min_replicas for commit in commits):
            members.listen(self._store)
            refuse_lower_quorum(self._store, members.wanted, commits)

    # ------------------------------------------------------------------ offers

    def mine(self, offer: Offer) -> None:
        """Ours is durable and eligible."""
        self._offers[offer.step, offer.slot] = offer

    def standing(self, s: int, slot: str) -> Offer | None:
        """A slot's offer for step s: its first eligible record.  Which one is eligible depends on the chain alone."""
        attempt = 0
        while (s, slot) not in self._offers:
            key = layout.offer(s, slot, attempt)
            body = self._store.get(key)
            if body is None:
                return None
            if (offer := self.read(key, body, s, slot)) is not None:
                self._judge(offer)
            attempt += 1
        return self._offers[s, slot]

    def read(self, key: str, body: bytes, s: int, slot: str) -> Offer | None:
        """The offer that lies where slot's for step s belong; None, and a word, if no replica of this run made it."""
        if body == VOID:
            return None
        try:
            offer = Offer.decode(body)
            why = rules.flaw(offer, s, slot, self._rules) or self._weak(offer) or self._unclaimed(offer)
        except WireError as error:
            why = str(error)
        else:
            if not why:
                return offer
        if key not in self._odd:
            self._odd.add(key)
            self._skipped(key, why)
        return None

    def _weak(self, offer: Offer) -> str:
        """A digest that is none, or one that does not find forgers where there may be some."""
        kind = needed(self._store)
        odd = [d for d in (offer.digest, *offer.shards) if not is_digest(d, kind)]
        return f"its blob's digest is {odd[0]!r}, this run needs {kind}" if odd else ""

    def _unclaimed(self, offer: Offer) -> str:
        """A made-up generation must not count: its number would fence those who hold the slot."""
        name = offer.slot, offer.generation
        if name not in self._claimed:
            if read_claim(self._store, *name) is None:
                return f"nobody claimed generation {offer.generation} of {offer.slot}"
            self._claimed.add(name)
        return ""

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
        members.awaited = expected - set(fresh)
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
        offers = [o for _, o in sorted(fresh.items())]
        for age in range(1, self._rules.max_carry + 1):
            offers += self._late(t - age * self._rules.fragments, wishes)
        listed = rules.weighed([_listed(o) for o in offers], t, r)
        return Commit(
            t, self._chain.digest(t - 1), self.base, listed, self._fence(listed, wishes), wishes.min_replicas,
            rules.pace(tooks, self._timing.poll), snapshot, self._members.name, nonce(), self._clock.wall(),
            "sharded" if owners else "direct", owners,
        )  # fmt: skip

    def _fence(self, listed: Iterable[Listed], wishes: Wanted) -> dict[str, int]:
        """Nobody below the newest claim of its slot may offer after this step."""
        fence = dict(self._chain.fence(self.step))
        for o in listed:
            fence[o.slot] = max(fence.get(o.slot, 0), o.generation)
        for slot in self._slots(wishes):
            known = fence.get(slot, 0)
            newest = max((c.generation for c in claims(self._store, slot, known)), default=known)
            if newest:
                fence[slot] = newest
        return fence


def _listed(o: Offer) -> Listed:
    """Not weighed yet."""
    return Listed(
        o.step, o.slot, o.generation, o.nonce, o.blob, o.size, o.digest, o.h, 0.0, o.zero, o.leaving, o.shards,
        o.samples, o.norm, o.scale,
    )  # fmt: skip


def refuse_misweighed(commit: Commit, rules_: Rules) -> None:
    """Every reader weighs a commit's offers again, before it averages anything."""
    for found, due in zip(commit.offers, rules.weighed(commit.offers, commit.t, rules_), strict=True):
        if found != due:
            raise BadCommit(
                f"commit {commit.t} by {commit.by} gives {found.slot}'s offer for step {found.step} the weight "
                f"{found.weight} (factor {found.factor}), by the run's rules it is {due.weight} (factor {due.factor}). "
                "Nothing was averaged: replicas of different releases must not share a run. Export an earlier step, "
                "and start a new run from it"
            )
