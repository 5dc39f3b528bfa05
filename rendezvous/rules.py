"""The decisions of the protocol, as pure functions of what was read.

    w_i   = (h_i / H) · γ^age                              weight of an offer, fp32            (weight)
    P     = max(2·poll, ½·median took)                     patience with one that stands still  (patience)
    pace  = median took + P/2                              what an outer step should take       (pace)
    h_cap = max(1, ⌊h·pace/took⌋) when left out, +1 when listed fresh, at most H                (next_cap)

Closing step t needs m fresh offers, and everybody who is expected has offered, is dead, is leaving, or is not
worth waiting for.  Clocks only enter here, so they only decide when somebody *tries* to close.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from rendezvous.records import Beat, Commit, Offer


@dataclass(frozen=True)
class Rules:
    """What all replicas of a run must share; part of its mathematics (run.json).

    fragments: F.   sync_every: H, inner steps inside a full pseudogradient.   max_carry: how many syncs of the
    same fragment a late offer may wait for a commit.   age_discount: γ, per such sync.
    snapshot_every: outer steps between snapshots.
    """

    fragments: int = 1
    sync_every: int = 1
    max_carry: int = 2
    age_discount: float = 0.5
    snapshot_every: int = 10

    @property
    def window(self) -> int:
        """How many commits before the current step a closer must know."""
        return max(2, self.fragments * self.max_carry) + 1


@dataclass(frozen=True)
class Timing:
    """Seconds.  May differ between replicas: nothing that is agreed on depends on them."""

    poll: float = 0.02
    beat: float = 0.2
    dead_after: float = 1.0
    start_patience: float = 30.0
    give_up: float = 600.0
    store_patience: float = 120.0
    grace: float = 15.0


@dataclass
class Peer:
    """What one observer has seen of a slot's heartbeat.

    silent: seconds since the counter last changed, not counting the observer's own pauses.
    still: the same for (step, inner).   liar: a generation that offered while its beat stood still; its beat is
    never trusted again.
    """

    beat: Beat
    changes: int = 0
    silent: float = 0.0
    still: float = 0.0
    liar: int = 0

    def dead(self, dead_after: float) -> bool:
        if self.liar == self.beat.generation:
            return False
        return self.beat.phase == "left" or (self.changes > 0 and self.silent >= dead_after)

    def beating(self, dead_after: float) -> bool:
        return self.changes > 0 and not self.dead(dead_after)


def weight(h: int, sync_every: int, age: int, discount: float) -> float:
    """h/H·γ^age, rounded to fp32.  age: syncs of the same fragment since the offer's step."""
    return float(np.float32(h / sync_every * discount**age))


def patience(tooks: Iterable[float], poll: float) -> float:
    return max(2 * poll, 0.5 * median(tooks))


def pace(tooks: list[float], poll: float) -> float:
    return median(tooks) + patience(tooks, poll) / 2


def next_cap(cap: int, sync_every: int, *, fresh: bool, h: int, took: float, pace_s: float) -> int:
    """How many inner steps the next pseudogradient may have."""
    if fresh:
        return min(sync_every, cap + 1)
    return max(1, min(cap, int(h * pace_s / max(took, 1e-3))))


def eligible(offer: Offer, base: str, fence: Mapping[str, int]) -> bool:
    """Started from the chain's state, by a generation that the commit before had not fenced."""
    return offer.base == base and fence.get(offer.slot, 0) <= offer.generation


def expected(
    t: int, recent: list[Commit], peers: Mapping[str, Peer], dead_after: float, universe: Iterable[str]
) -> set[str]:
    """Slots that step t should wait for: listed in commits t−1 and t−2; before that, those that beat.

    Who said that it leaves is not expected.  At t = 0 slots that are still booting count too.
    """
    if t >= 2:
        gone = {o.slot for c in recent for o in c.offers if o.leaving}
        return {o.slot for c in recent for o in c.offers} - gone
    beats = {s for s in universe if s in peers and peers[s].beating(dead_after)}
    return beats if t == 0 else {s for s in beats if peers[s].beat.phase not in ("boot", "heal")}


def arrival(peer: Peer, t: int, rules: Rules) -> float | None:
    """Seconds until this slot should offer step t, or None when nothing can be said."""
    beat, round_steps = peer.beat, max(1, rules.sync_every // rules.fragments)
    if beat.phase not in ("train", "wait") or beat.rate <= 0:
        return None
    missing = round_steps - beat.inner if beat.step >= t else round_steps
    return max(0, missing) * beat.rate


def waiting_for(
    t: int,
    fresh: Mapping[str, Offer],
    expected_slots: set[str],
    peers: Mapping[str, Peer],
    waited: float,
    rules: Rules,
    timing: Timing,
) -> dict[str, str]:
    """slot -> why step t should still wait for it.  Empty: close."""
    tooks = [o.took for o in fresh.values()]
    limit = patience(tooks, timing.poll)
    reasons: dict[str, str] = {}
    for slot in expected_slots - set(fresh):
        peer = peers.get(slot)
        if peer is not None and peer.dead(timing.dead_after):
            continue
        if peer is not None and peer.beat.phase in ("boot", "heal"):
            if t == 0 and waited < timing.start_patience:
                reasons[slot] = "is starting"
            continue
        due = arrival(peer, t, rules) if peer is not None and peer.still <= limit else None
        if due is not None and due <= 1.5 * median(tooks):
            reasons[slot] = f"should offer in {due:.1f} s"
        elif waited < limit:
            reasons[slot] = f"shows no progress; waited {waited:.1f} of {limit:.1f} s"
    return reasons


def rank(t: int, slot: int, slots: int) -> int:
    """Who tries to close step t first (0), second (1), …; spread by a hash, at most 4 apart."""
    if slots < 2:
        return 0
    mixed = (t * 7919 + slot * 104729) & 0xFFFFFF
    return mixed % min(slots, 4)
