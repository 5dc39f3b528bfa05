"""Closing the open step: who has offered, is it time, and what the decision says.

    at every look   fresh offers ── fewer than m ──────────────────▶ wait
                         │ m or more
                    is anybody worth waiting for? ── yes ──────────▶ wait          rules.waiting_for
                         │ no
                    did the operator's wishes change? ── yes ──────▶ look again
                         │ no
                    put_once commit.json: fresh and late offers, weights, fence, pace

Every replica whose own offer is durable looks at once; the one that came last finds all others, and closes.  Three
lead: they look again when it may be time (rules.resolved_in).  The others ask by one LIST whether a look is worth it,
and from then on only for commit.json.  LIST is a hint: before a commit every absent offer is asked for by GET.
put_once picks one of several that close.

Not promised: that the closer lives to read its own decision.  Nobody needs it for that.
"""

from collections.abc import Callable, Iterable
from statistics import median

from rendezvous import layout, rules
from rendezvous.background import Together, fetch_together, in_turn
from rendezvous.chain import Chain
from rendezvous.clock import Clock
from rendezvous.digests import is_digest, required_digest_kind
from rendezvous.errors import BadCommit
from rendezvous.membership import Membership, Wanted, claims_above, read_claim, refuse_lower_quorum
from rendezvous.records import Commit, Listed, Offer, WireError, new_nonce
from rendezvous.rules import Rules, Timing
from rendezvous.store import VOID, Store, put_once

FEW = 2  # missing offers that are worth a look of those who do not lead
LED_BEATS = 4  # until they look all the same, about `dead_after`; in a crowd, where a look costs more, twice as many


class StepWait:
    """How long a replica has watched one step.  Its own pauses do not count: a sleeper has not waited.

    due: seconds until the decision, if this step lasts as long as the one before; 0 if that is not known.
    idle: seconds since it began to look.   waited: since it saw m fresh offers.   again: no attempt before this `idle`.
    why: what spoke against closing at the last attempt.
    """

    def __init__(self, clock: Clock, timing: Timing, due: float = 0.0) -> None:
        self._clock = clock
        self._timing = timing
        self._due = due
        self._looked_at = clock.now()
        self._elapsed = 0.0
        self._since: float | None = None  # `idle` when m fresh offers were last seen
        self._ripe_since: float | None = None  # `idle` since when nothing speaks against closing
        self._overdue_at = 0.0  # `idle` when `is_overdue` was last true
        self.idle = 0.0
        self.waited = 0.0
        self.next_attempt = 0.0
        self.why = "waits"

    @property
    def pause_s(self) -> float:
        """An eighth of what was waited so far: polling adds little to any wait, and little is asked of the store.

        Where it is known when the decision is due: half of what is left until then, and then twice as often.
        """
        poll = self._timing.poll
        often = self.idle / 16 if self._due > 0 else self.idle / 8
        pause = min(4 * poll, max(poll / 8, often, (self._due - self.idle) / 2))
        return min(pause, max(poll / 8, self.next_attempt - self.idle)) if self.next_attempt > self.idle else pause

    @property
    def least_pause_s(self) -> float:
        """The least seconds between two looks for offers, when one was in vain: an eighth of the wait so far."""
        return max(self._timing.poll, self.idle / 8)

    def attempt_in(self, seconds: float, at_most: float) -> None:
        """Set `next_attempt`; 0 seconds: it is not known when something changes."""
        self.next_attempt = self.idle + min(max(seconds or self.least_pause_s, self._timing.poll / 8), at_most)

    def ripe_for(self, seconds: float) -> bool:
        """Does nothing speak against closing since so many seconds?  If not yet, then comes the next attempt."""
        if self._ripe_since is None:
            self._ripe_since = self.idle
        if self.idle < self._ripe_since + seconds:
            self.next_attempt = self._ripe_since + seconds
        return self.idle >= self._ripe_since + seconds

    def not_ripe(self) -> None:
        self._ripe_since = None

    def count_time(self) -> None:
        now = self._clock.now()
        self._elapsed = min(now - self._looked_at, 4 * max(self.pause_s, self._timing.poll))
        self._looked_at = now
        self.idle += self._elapsed

    def count_quorum(self, reached: bool) -> None:
        gap = self._elapsed if self._since is None else self.idle - self._since
        self.waited = self.waited + gap if reached else 0.0
        self._since = self.idle if reached else None

    def is_overdue(self, normal: float = 0.0) -> bool:
        """Are the others long in coming?  True once in every `dead_after`, or `normal` if that is more."""
        if self.idle - self._overdue_at <= max(self._timing.dead_after, normal):
            return False
        self._overdue_at = self.idle
        return True

    def sleep(self) -> None:
        self._clock.sleep(self.pause_s)


class Committer:
    """One replica's eyes on the open step, and its hand.

    alien(offer): called when somebody's offer for the open step started from another θ than ours.
    skipped(key, why): called once for each record that lies where an offer belongs and is none.
    together: runs requests that go together.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        chain: Chain,
        members: Membership,
        rules_: Rules,
        timing: Timing,
        on_foreign_base: Callable[[Offer], None],
        on_rejected: Callable[[str, str], None],
        together: Together = in_turn,
    ) -> None:
        self._together = together
        self._store = store
        self._clock = clock
        self._chain = chain
        self._members = members
        self._rules = rules_
        self._timing = timing
        self._on_foreign_base = on_foreign_base
        self._on_rejected = on_rejected
        self._rejected_keys, self._known_claims = set[str](), set[tuple[str, int]]()
        self.step = 0
        self.base = ""
        self._offers: dict[tuple[int, str], Offer] = {}  # eligible ones: they can never become anything else

    def open_step(self, step: int, base: str) -> None:
        """From now on `step` is the open one; it starts from the state with digest `base`."""
        self.step = step
        self.base = base
        self._offers = {k: o for k, o in self._offers.items() if k[0] >= step - self._rules.window}

    def try_to_commit(self, vigil: StepWait, snapshot: int) -> str:
        """Close the step if it is time; -> why not yet, or "" when it is decided.

        snapshot: step of the newest one known.
        """
        if vigil.idle < vigil.next_attempt:
            return vigil.why
        wishes, first = (
            self._members.wanted,
            vigil.next_attempt == 0.0,
        )  # at the first look the last to come sees everybody
        rank = rules.commit_rank(self.step, layout.slot_index(self._members.slot), wishes.replicas or wishes.universe)
        if rank == rules.LED and not self._looks_though_led(vigil, wishes):
            vigil.why = "lets others close first"
            return vigil.why
        fresh, vigil.why = self._look_for_offers(vigil, wishes)
        if vigil.why:
            vigil.not_ripe()
        elif not first and not vigil.ripe_for(rank * self._timing.poll / 2):
            vigil.why = "lets others close first"
        else:
            vigil.why = self._check_wishes(wishes) or self._write_commit(fresh, wishes, snapshot)
        return vigil.why

    def _looks_though_led(self, vigil: StepWait, wishes: Wanted) -> bool:
        """When nearly everybody has offered; or when the leaders had time enough to find out that somebody is dead."""
        patience = LED_BEATS * self._timing.beat * (1 + self._is_large_fleet(wishes))
        if vigil.idle >= patience or self._nearly_complete(wishes):
            return True
        vigil.attempt_in(patience, at_most=patience)
        return False

    def _nearly_complete(self, wishes: Wanted) -> bool:
        """Are at most a few missing of those that are expected?  One request; nobody's beat is asked for."""
        recent = self._chain.recent_commits(self.step, 2)
        dead_after = self._timing.dead_after
        wanted = wishes.slot_names[: wishes.replicas]
        expected = rules.slots_to_expect(self.step, recent, self._members.peers, dead_after, wanted)
        return len(expected - self._listed_slots()) <= FEW

    def _listed_slots(self) -> set[str]:
        """Slots that have offered the open step, as far as LIST knows, which may be late."""
        known = {slot for step, slot in self._offers if step == self.step}
        return known | {layout.offer_slot(key) for key in self._store.list(layout.offers_prefix(self.step))}

    def _look_for_offers(self, vigil: StepWait, wishes: Wanted) -> tuple[dict[str, Offer], str]:
        """Fresh offers, and what speaks against closing; "" only if the absent were asked for by GET."""
        crowd = self._is_large_fleet(wishes)
        fresh, why_not, soon = self._assess_offers(
            self._listed_offers(wishes) if crowd else self._fresh_offers(wishes), vigil, wishes
        )
        if crowd and soon == 0.0:
            fresh, why_not, soon = self._assess_offers(self._fresh_offers(wishes), vigil, wishes)
        vigil.attempt_in(0.0 if crowd else soon, at_most=2 * self._timing.beat)
        return fresh, why_not

    def _assess_offers(
        self, fresh: dict[str, Offer], vigil: StepWait, wishes: Wanted
    ) -> tuple[dict[str, Offer], str, float]:
        """-> the offers, what speaks against closing with them, and for how long (0: nothing, or nobody knows)."""
        vigil.count_quorum(len(fresh) >= wishes.min_replicas)
        awaited = self._awaited_slots(fresh, wishes)
        why_not = self._why_not(fresh, awaited, wishes, vigil.waited)
        return fresh, why_not, self._may_close_in(fresh, awaited, wishes, vigil) if why_not else 0.0

    def _is_large_fleet(self, wishes: Wanted) -> bool:
        return wishes.universe > rules.LARGE_FLEET

    def _write_commit(self, fresh: dict[str, Offer], wishes: Wanted, snapshot: int) -> str:
        self._chain.refuse_gap(self.step)
        self.refuse_lower_quorum()
        commit = self._propose_commit(fresh, wishes, snapshot)
        _, stands = put_once(self._store, self._clock, layout.commit_key(self.step), commit.encode())
        self._chain.accept_commit(self.step, stands)
        return ""

    def refuse_lower_quorum(self) -> None:
        """Raises RecordsLost if wishes that earlier closers went by are gone."""
        members = self._members
        commits = self._chain.recent_commits(self.step, self._rules.window)
        if any(commit.m > members.wanted.min_replicas for commit in commits):
            members.hear_wishes(self._store)
            refuse_lower_quorum(self._store, members.wanted, commits)

    # ------------------------------------------------------------------ offers

    def count_own_offer(self, offer: Offer) -> None:
        """Count this replica's own offer: it is durable, and eligible."""
        self._offers[offer.step, offer.slot] = offer

    def standing_offer(self, s: int, slot: str) -> Offer | None:
        """A slot's offer for step s: its first eligible record.  Which one is eligible depends on the chain alone."""
        return self._standing_offers(s, [slot]).get(slot)

    def _standing_offers(self, s: int, slots: Iterable[str]) -> dict[str, Offer]:
        """The same of several slots, of those who have one; their first records are asked for together."""
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

    def read_offer(self, key: str, body: bytes, s: int, slot: str) -> Offer | None:
        """The offer that lies where slot's for step s belong; None, and a word, if no replica of this run made it."""
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
        """A digest that is none, or one that does not find forgers where there may be some."""
        kind = required_digest_kind(self._store)
        odd = [d for d in (offer.digest, *offer.shards) if not is_digest(d, kind)]
        return f"its blob's digest is {odd[0]!r}, this run needs {kind}" if odd else ""

    def _claim_flaw(self, offer: Offer) -> str:
        """A made-up generation must not count: its number would fence those who hold the slot."""
        name = offer.slot, offer.generation
        if name not in self._known_claims:
            if read_claim(self._store, *name) is None:
                return f"nobody claimed generation {offer.generation} of {offer.slot}"
            self._known_claims.add(name)
        return ""

    def is_eligible(self, offer: Offer) -> bool:
        base = self.base
        if offer.step != self.step:
            commit = self._chain.known_commit(offer.step)
            base = commit.base if commit else ""
        return rules.is_eligible(offer, base, self._chain.fence_before(offer.step))

    def _count_if_eligible(self, offer: Offer) -> None:
        if self.is_eligible(offer):
            self._offers[offer.step, offer.slot] = offer
        elif offer.step == self.step and offer.base != self.base:
            self._on_foreign_base(offer)

    def _fresh_offers(self, wishes: Wanted) -> dict[str, Offer]:
        """Eligible offers for the open step, by slot, as far as they are durable now."""
        return self._offers_of(self._possible_slots(wishes))

    def _offers_of(self, slots: Iterable[str]) -> dict[str, Offer]:
        known = {slot for step, slot in self._offers if step == self.step}
        found = self._standing_offers(self.step, slots)
        for slot in found.keys() - known:
            self._members.note_offer(found[slot])
        return found

    def _listed_offers(self, wishes: Wanted) -> dict[str, Offer]:
        """The same as far as LIST knows, which may be late: one request says who has offered, new ones are read."""
        there = self._listed_slots()
        return self._offers_of(slot for slot in self._possible_slots(wishes) if slot in there)

    def _late_offers(self, s: int, wishes: Wanted) -> list[Offer]:
        """Eligible offers for step s that no commit has listed.  Each may be listed once, by the chain alone."""
        if s < 0:
            return []
        since = self._chain.recent_commits(self.step, self.step - s)
        missing = [slot for slot in self._possible_slots(wishes) if not any(c.lists_offer(s, slot) for c in since)]
        return [*self._standing_offers(s, missing).values()]

    def _possible_slots(self, wishes: Wanted) -> list[str]:
        """All slots that can exist, ours at least."""
        return sorted({*wishes.slot_names, self._members.slot})

    # ------------------------------------------------------------------ is it time?

    def _awaited_slots(self, fresh: dict[str, Offer], wishes: Wanted) -> set[str]:
        """Slots that have not offered and are expected to; their beats are looked at."""
        members = self._members
        wanted = wishes.slot_names[: wishes.replicas]
        recent = self._chain.recent_commits(self.step, 2)
        dead_after = self._timing.dead_after
        needed = set(wanted) if len(fresh) < wishes.min_replicas else set[str]()
        expected = rules.slots_to_expect(self.step, recent, members.peers, dead_after, wanted)
        members.read_beats((expected | needed) - set(fresh))
        expected = rules.slots_to_expect(self.step, recent, members.peers, dead_after, wanted)
        return expected - set(fresh) - {members.slot}

    def _why_not(self, fresh: dict[str, Offer], awaited: set[str], wishes: Wanted, waited: float) -> str:
        """Say why the step should not be closed now; "" if it may be."""
        members = self._members
        m = wishes.min_replicas
        if members.slot not in fresh:
            return "has no offer of its own that counts"  # only who has one knows the θ that the step is about
        if len(fresh) < m:
            missing = self._describe_missing(fresh, wishes)
            return f"has offers of {', '.join(sorted(fresh))}, needs min_replicas={m}; {missing}"
        reasons = rules.waiting_for(
            t=self.step,
            fresh=fresh,
            expected_slots=awaited,
            peers=members.peers,
            waited=waited,
            rules=self._rules,
            timing=self._timing,
        )
        return "; ".join(f"{slot} {why}" for slot, why in sorted(reasons.items()))

    def _may_close_in(self, fresh: dict[str, Offer], awaited: set[str], wishes: Wanted, vigil: StepWait) -> float:
        """Seconds until looking again is of use, if all goes on as it does; 0 for at once, or not known."""
        mine = fresh.get(self._members.slot)
        status = self._members.status
        missing = wishes.min_replicas - len(fresh)
        if self.step == 0 or mine is None or len(awaited) < missing:
            return 0.0
        upload = min(mine.took / 2, max(0.0, mine.took - status.inner * status.rate))
        wait = rules.WaitState(vigil.waited, median(o.took for o in fresh.values()), upload, vigil.least_pause_s)
        peers = [self._members.by_now(slot) for slot in awaited]
        times = rules.resolved_in(self.step, peers, wait, self._rules, self._timing)
        return times[missing - 1] if missing > 0 else max(times, default=0.0)

    def _describe_missing(self, fresh: dict[str, Offer], wishes: Wanted) -> str:
        """Name the slots that are missing, each with the last sign of it."""
        missing = [s for s in wishes.slot_names[: wishes.replicas] if s not in fresh]
        peers = self._members.peers
        limit = self._timing.dead_after
        words = [f"{s} {peers[s].in_words(limit)}" if s in peers else f"{s} was never seen" for s in missing]
        return ", ".join(words) or "no other replica is wanted"

    def _check_wishes(self, wishes: Wanted) -> str:
        """A commit goes by every wish that was durable before its closer looked: there may be a new slot, or m."""
        heard = self._members.hear_wishes(self._store)
        return "" if heard.records == wishes.records else "the operator has new wishes"

    # ------------------------------------------------------------------ the decision

    def _propose_commit(self, fresh: dict[str, Offer], wishes: Wanted, snapshot: int) -> Commit:
        t = self.step
        tooks = [o.took for o in fresh.values()]
        sizes = [o.size for o in fresh.values()]
        r = self._rules
        sharded = rules.reduces_sharded(sizes, r.codec, r.shard_from) and all(o.shards for o in fresh.values())
        owners = tuple(s for s, o in sorted(fresh.items()) if not o.leaving) if sharded else ()
        offers = [o for _, o in sorted(fresh.items())]
        for age in range(1, self._rules.max_carry + 1):
            offers += self._late_offers(t - age * self._rules.fragments, wishes)
        listed = rules.with_weights([_as_listed(o) for o in offers], t, r)
        return Commit(
            t=t,
            prev=self._chain.commit_digest(t - 1),
            base=self.base,
            offers=listed,
            fence=self._raise_fence(listed, wishes),
            m=wishes.min_replicas,
            pace=rules.step_pace(tooks, self._timing.poll),
            snapshot=snapshot,
            by=self._members.name,
            nonce=new_nonce(),
            at=self._clock.wall(),
            mode="sharded" if owners else "direct",
            owners=owners,
        )

    def _raise_fence(self, listed: Iterable[Listed], wishes: Wanted) -> dict[str, int]:
        """Nobody below the newest claim of its slot may offer after this step."""
        fence = dict(self._chain.fence_before(self.step))
        for o in listed:
            fence[o.slot] = max(fence.get(o.slot, 0), o.generation)
        slots = self._possible_slots(wishes)
        later = fetch_together(
            self._together, self._store.get, (layout.claim_key(s, fence.get(s, 0) + 1) for s in slots)
        )
        for slot in slots:
            known = fence.get(slot, 0)
            taken = later[layout.claim_key(slot, known + 1)] is not None
            newest = (
                max((c.generation for c in claims_above(self._store, slot, known)), default=known) if taken else known
            )
            if newest:
                fence[slot] = newest
        return fence


def _as_listed(o: Offer) -> Listed:
    """Not weighed yet."""
    return Listed(
        step=o.step,
        slot=o.slot,
        generation=o.generation,
        nonce=o.nonce,
        blob=o.blob,
        size=o.size,
        digest=o.digest,
        h=o.h,
        weight=0.0,
        zero=o.zero,
        leaving=o.leaving,
        shards=o.shards,
        samples=o.samples,
        norm=o.norm,
        scale=o.scale,
    )


def refuse_misweighed(commit: Commit, rules_: Rules) -> None:
    """Every reader weighs a commit's offers again, before it averages anything."""
    for found, due in zip(commit.offers, rules.with_weights(commit.offers, commit.t, rules_), strict=True):
        if found != due:
            raise BadCommit(
                f"commit {commit.t} by {commit.by} gives {found.slot}'s offer for step {found.step} the weight "
                f"{found.weight} (factor {found.factor}), by the run's rules it is {due.weight} (factor {due.factor}). "
                "Nothing was averaged: replicas of different releases must not share a run. Export an earlier step, "
                "and start a new run from it"
            )
