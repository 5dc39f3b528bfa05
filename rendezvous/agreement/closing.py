"""Closing of the open step: the offers that exist, the time to close, and the content of the commit.

    at every look   fresh offers ── fewer than m ──────────────────▶ wait            m = min_replicas
                         │ m or more
                    is a replica worth waiting for? ── yes ────────▶ wait          rules.waiting_for
                         │ no
                    did the desired state change? ── yes ──────▶ look again
                         │ no
                    is it still the store of this run? ── no ──────▶ RecordsLost      Chain.anchors, our own claim
                         │ yes
                    put_once commit.json: fresh and late offers, weights, fence, pace

Every replica looks for offers as soon as its own offer is durable; the last replica finds all other offers, and closes
the step. Before that, three replicas lead (rules.commit_rank): they look again when the decision may have changed
(rules.resolved_in).  All others send one LIST; if more than `FEW` offers are missing, they only poll commit.json for
some time.  A LIST may be out of date, so a closer reads every absent offer by GET.  put_once lets one closer win.

Not promised: that the closer survives to read its own commit.  The other replicas do not need the closer.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields
from statistics import median

from rendezvous import layout
from rendezvous.agreement import rules
from rendezvous.agreement.chain import ANCHORS, Chain, lost_record
from rendezvous.agreement.membership import Membership, Wanted, claims_above, refuse_lost_claim
from rendezvous.agreement.offers import OfferBook
from rendezvous.agreement.rules import Peer, Rules, Timing
from rendezvous.agreement.step_wait import StepWait
from rendezvous.background import Together, fetch_together
from rendezvous.clock import Clock
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Commit, Listed, Offer, new_nonce
from rendezvous.store import Store, put_once

FEW = 2  # a replica that does not lead looks for offers, too, if at most this many are missing
LED_BEATS = 4  # beats until a replica that does not lead looks, too (about `dead_after`); a large fleet: twice as many


@dataclass(eq=False, repr=False)
class Committer:
    """One replica's attempts to close the open step.

    offers: the offers that this replica knows; `offers.step` is the open step.   together: makes requests concurrently.
    """

    store: Store
    clock: Clock
    chain: Chain
    members: Membership
    offers: OfferBook
    rules: Rules
    timing: Timing
    together: Together

    @property
    def _step(self) -> int:
        return self.offers.step

    def try_to_commit(self, wait: StepWait, snapshot: int) -> str:
        """Close the step if the rules allow it.   Return why the step stays open, or "" when its commit is written.

        snapshot: step of the newest known snapshot.
        """
        if wait.idle < wait.next_attempt:
            return wait.why
        wanted = self.members.wanted
        first = wait.next_attempt == 0.0  # the replica that offers last sees all other offers at its first look
        rank = rules.commit_rank(self._step, layout.slot_index(self.members.slot), wanted.replicas or wanted.universe)
        if rank == rules.LED and not self._looks_though_led(wait, wanted):
            wait.why = "lets others close first"
            return wait.why
        fresh, wait.why = self._look_for_offers(wait, wanted)
        if wait.why:
            wait.not_ripe()
        elif not first and not wait.ripe_for(rank * self.timing.poll / 2):
            wait.why = "lets others close first"
        else:
            wait.why = self._check_wanted(wanted) or self._write_commit(fresh, wanted, snapshot)
        return wait.why

    def _looks_though_led(self, wait: StepWait, wanted: Wanted) -> bool:
        """Whether a replica that does not lead looks for offers: few are missing, or the leaders had enough time."""
        patience = LED_BEATS * self.timing.beat * (1 + _is_large_fleet(wanted))
        if wait.idle >= patience or len(self._expected_slots(wanted) - self._listed_slots()) <= FEW:  # reads no beat
            return True
        wait.attempt_in(patience, at_most=patience)
        return False

    def _expected_slots(self, wanted: Wanted) -> set[str]:
        """Return the slots that the step should wait for, judged by the heartbeats read so far."""
        recent = self.chain.recent_commits(self._step, 2)
        kept = wanted.slot_names[: wanted.replicas]
        return rules.slots_to_expect(self._step, recent, self.members.peers, self.timing.dead_after, kept)

    def _listed_slots(self) -> set[str]:
        """Return the slots whose offers LIST shows for the open step; LIST may be out of date."""
        return self.offers.known_slots | {
            layout.offer_slot(key) for key in self.store.list(layout.offers_prefix(self._step))
        }

    def _look_for_offers(self, wait: StepWait, wanted: Wanted) -> tuple[dict[str, Offer], str]:
        """Return the fresh offers, and why the step stays open; "" only after a GET for each absent offer."""
        crowd = _is_large_fleet(wanted)
        if crowd:  # read only new offers, of the slots that one LIST shows
            there = self._listed_slots()
            found = self._offers_of(slot for slot in self._possible_slots(wanted) if slot in there)
        else:
            found = self._fresh_offers(wanted)
        fresh, why_not, soon = self._assess_offers(found, wait, wanted)
        if crowd and soon == 0.0:
            fresh, why_not, soon = self._assess_offers(self._fresh_offers(wanted), wait, wanted)
        wait.attempt_in(0.0 if crowd else soon, at_most=2 * self.timing.beat)
        return fresh, why_not

    def _assess_offers(
        self, fresh: dict[str, Offer], wait: StepWait, wanted: Wanted
    ) -> tuple[dict[str, Offer], str, float]:
        """Return the offers, the reason not to close the step with them, and for how many seconds this reason holds.

        The seconds are 0 if there is no reason, or if they are unknown.
        """
        wait.count_quorum(len(fresh) >= wanted.min_replicas)
        awaited = self._awaited_slots(fresh, wanted)
        why_not = self._why_not(fresh, awaited, wanted, wait.waited)
        return fresh, why_not, self._may_close_in(fresh, awaited, wanted, wait) if why_not else 0.0

    def _write_commit(self, fresh: dict[str, Offer], wanted: Wanted, snapshot: int) -> str:
        self.chain.refuse_gap(self._step)
        self.refuse_lower_quorum()
        commit = self._propose_commit(fresh, wanted, snapshot)
        self.refuse_lost_anchors()
        _, stands = put_once(self.store, self.clock, layout.commit_key(self._step), commit.encode())
        self.chain.accept_commit(self._step, stands)
        return ""

    def refuse_lost_anchors(self) -> None:
        """Raise RecordsLost if one of the two commits before the open step is missing or has changed.

        In the first two steps, which have fewer commits before them, also check this replica's own claim.
        """
        anchors = self.chain.anchors(self._step)
        if self._step < ANCHORS:
            refuse_lost_claim(self.store, self.members)
        for key, body in fetch_together(self.together, self.store.get, anchors).items():
            if body is None or digest(body, SHA256) != anchors[key]:
                raise lost_record(self.store.url, key, self._step, "is gone" if body is None else "has changed")

    def refuse_lower_quorum(self) -> None:
        """Raise RecordsLost if a control record that earlier closers followed is lost."""
        members = self.members
        commits = self.chain.recent_commits(self._step, self.rules.window)
        if any(commit.m > members.wanted.min_replicas for commit in commits):
            members.hear_control(self.store)
            from rendezvous.agreement.lost_records import refuse_lower_quorum

            refuse_lower_quorum(self.store, members.wanted, commits)

    def _fresh_offers(self, wanted: Wanted) -> dict[str, Offer]:
        """Return slot -> eligible offer for the open step, for all that are durable now."""
        return self._offers_of(self._possible_slots(wanted))

    def _offers_of(self, slots: Iterable[str]) -> dict[str, Offer]:
        known = self.offers.known_slots
        found = self.offers.standing_offers(self._step, slots)
        for slot in found.keys() - known:
            self.members.note_offer(found[slot])
        return found

    def _late_offers(self, s: int, wanted: Wanted) -> list[Offer]:
        """Return the eligible offers for step s that no commit has listed.  No commit lists one again."""
        if s < 0:
            return []
        since = self.chain.recent_commits(self._step, self._step - s)
        missing = [slot for slot in self._possible_slots(wanted) if not any(c.lists_offer(s, slot) for c in since)]
        return [*self.offers.standing_offers(s, missing).values()]

    def _possible_slots(self, wanted: Wanted) -> list[str]:
        """Return all slots that can exist, at least this replica's."""
        return sorted({*wanted.slot_names, self.members.slot})

    # ------------------------------------------------------------------ is it time?

    def _awaited_slots(self, fresh: dict[str, Offer], wanted: Wanted) -> set[str]:
        """Read the beats of the slots that should offer and have not offered yet.   Return these slots."""
        needed = wanted.slot_names[: wanted.replicas] if len(fresh) < wanted.min_replicas else []
        self.members.read_beats({*self._expected_slots(wanted), *needed} - set(fresh))
        return self._expected_slots(wanted) - set(fresh) - {self.members.slot}

    def _why_not(self, fresh: dict[str, Offer], awaited: set[str], wanted: Wanted, waited: float) -> str:
        """Return why the step should not be closed now; "" if it may be closed."""
        members = self.members
        m = wanted.min_replicas
        if members.slot not in fresh:
            return "has no offer of its own that counts"  # without such an offer, its θ may differ from the step's
        if len(fresh) < m:
            missing = _describe_missing(fresh, wanted, members.peers, self.timing.dead_after)
            return f"has offers of {', '.join(sorted(fresh))}, needs min_replicas={m}; {missing}"
        reasons = rules.waiting_for(
            t=self._step, fresh=fresh, expected_slots=awaited, peers=members.peers, waited=waited, rules=self.rules,
            timing=self.timing,
        )  # fmt: skip
        return "; ".join(f"{slot} {why}" for slot, why in sorted(reasons.items()))

    def _may_close_in(self, fresh: dict[str, Offer], awaited: set[str], wanted: Wanted, wait: StepWait) -> float:
        """Return the seconds until another look is useful if all replicas continue as now; 0: at once, or unknown."""
        mine = fresh.get(self.members.slot)
        status = self.members.status
        missing = wanted.min_replicas - len(fresh)
        if self._step == 0 or mine is None or len(awaited) < missing:
            return 0.0
        upload = min(mine.took / 2, max(0.0, mine.took - status.inner * status.rate))
        so_far = rules.WaitState(wait.waited, median(o.took for o in fresh.values()), upload, wait.least_pause_s)
        peers = [self.members.by_now(slot) for slot in awaited]
        times = rules.resolved_in(self._step, peers, so_far, self.rules, self.timing)
        return times[missing - 1] if missing > 0 else max(times, default=0.0)

    def _check_wanted(self, wanted: Wanted) -> str:
        """Read new control records; return "" if there are no new records, else a reason not to close now.

        A commit follows every control record that was durable before its closer looked.
        """
        heard = self.members.hear_control(self.store)
        return "" if heard.records == wanted.records else "the desired state has changed"

    # ------------------------------------------------------------------ the decision

    def _propose_commit(self, fresh: dict[str, Offer], wanted: Wanted, snapshot: int) -> Commit:
        t = self._step
        sizes = [o.size for o in fresh.values()]
        r = self.rules
        sharded = rules.reduces_sharded(sizes, r.codec, r.shard_from) and all(o.shards for o in fresh.values())
        owners = tuple(s for s, o in sorted(fresh.items()) if not o.leaving) if sharded else ()
        offers = [o for _, o in sorted(fresh.items())]
        for age in range(1, r.max_carry + 1):
            offers += self._late_offers(t - age * r.fragments, wanted)
        names = {f.name for f in fields(Listed)}
        unweighted = [Listed(weight=0.0, **{k: v for k, v in vars(o).items() if k in names}) for o in offers]
        listed = rules.with_weights(unweighted, t, r)
        return Commit(
            t=t, prev=self.chain.commit_digest(t - 1), base=self.offers.base, offers=listed,
            fence=self._raise_fence(listed, wanted), m=wanted.min_replicas,
            pace=rules.step_pace(fresh.values(), r.sync_every), snapshot=snapshot, by=self.members.name,
            nonce=new_nonce(), at=self.clock.wall(), mode="sharded" if owners else "direct", owners=owners,
        )  # fmt: skip

    def _raise_fence(self, listed: Iterable[Listed], wanted: Wanted) -> dict[str, int]:
        """Return slot -> the newest claimed generation.  After this step, no earlier generation may offer."""
        fence = dict(self.chain.fence_before(self._step))
        for o in listed:
            fence[o.slot] = max(fence.get(o.slot, 0), o.generation)
        slots = self._possible_slots(wanted)
        later = fetch_together(self.together, self.store.get, (layout.claim_key(s, fence.get(s, 0) + 1) for s in slots))
        for slot in slots:
            known = fence.get(slot, 0)
            if later[layout.claim_key(slot, known + 1)] is not None:
                known = max((c.generation for c in claims_above(self.store, slot, known)), default=known)
            if known:
                fence[slot] = known
        return fence


def _is_large_fleet(wanted: Wanted) -> bool:
    return wanted.universe > rules.LARGE_FLEET


def _describe_missing(fresh: Container[str], wanted: Wanted, peers: Mapping[str, Peer], limit: float) -> str:
    """Return a text that names the missing slots, each with its last known state."""
    missing = [s for s in wanted.slot_names[: wanted.replicas] if s not in fresh]
    words = [f"{s} {peers[s].in_words(limit)}" if s in peers else f"{s} was never seen" for s in missing]
    return ", ".join(words) or "no other replica is wanted"
