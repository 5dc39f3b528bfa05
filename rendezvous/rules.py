"""The decisions of the protocol, as pure functions of what was read.

    w_i   = (h_i / H) · γ^age                              weight of an offer, fp32            (weight)
    P     = max(2·poll, ½·median took)                     patience with one that stands still  (patience)
    pace  = median took + P/2                              what an outer step should take       (pace)
    h_cap = max(1, ⌊h·pace/took⌋) when left out, +1 when listed fresh, at most H                (next_cap)

Closing step t needs m fresh offers, and everybody who is expected has offered, is dead, is leaving, or is not
worth waiting for.  Clocks only enter here, so they only decide when somebody *tries* to close.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rendezvous.records import Beat, Commit, Offer

STARTING = ("boot", "heal")  # phases in which a slot does not train yet


@dataclass(frozen=True)
class Rules:
    """What all replicas of a run must share; part of its mathematics (run.json).

    fragments: F.   sync_every: H, inner steps inside a full pseudogradient.   max_carry: how many syncs of the
    same fragment a late offer may wait for a commit.   age_discount: γ, per such sync.
    snapshot_every: outer steps between snapshots.   codec: how pseudogradients are written (rendezvous/codecs).
    shard_from: bytes of a body from which three and more replicas reduce it in shards.   shard_elements: least
    elements of the shards on whose grid bodies are digested.
    """

    fragments: int = 1
    sync_every: int = 1
    max_carry: int = 2
    age_discount: float = 0.5
    snapshot_every: int = 10
    codec: str = "fp32"
    shard_from: int = 8 << 20
    shard_elements: int = 1 << 16

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


@dataclass(frozen=True)
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
        if self.beat.phase == "left":
            return True
        return self.liar != self.beat.generation and self.changes > 0 and self.silent >= dead_after

    def beating(self, dead_after: float) -> bool:
        return self.changes > 0 and not self.dead(dead_after)

    def words(self, dead_after: float) -> str:
        """What to say of a slot that is missing."""
        if self.beat.phase == "left":
            return "has left"
        if self.dead(dead_after):
            return f"is silent for {self.silent:.0f} s, at step {self.beat.step}"
        return "is starting" if self.beat.phase in STARTING else f"is at step {self.beat.step}"


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


def reduces_sharded(sizes: Sequence[int], codec: str, shard_from: int) -> bool:
    """Is it fewer bytes to reduce in shards?  Per replica N·S down when direct; S/N up and 2(N−1)/N·S down in shards.

    At N = 2 that is the same, and two more round trips.  Top-k's sum is dense, so its shards would not be smaller.
    """
    return len(sizes) >= 3 and min(sizes) >= shard_from and codec in ("fp32", "bf16", "int8", "int4")


def expected(
    t: int, recent: list[Commit], peers: Mapping[str, Peer], dead_after: float, wanted: Sequence[str]
) -> set[str]:
    """Slots that step t should wait for: listed in commits t−1 and t−2; before that, those that beat.

    Who said that it leaves is not expected, nor whose next generation is still starting.  (A beat of the listed one
    that says "boot" is only old.)  At t = 0 every wanted slot is expected, booting or not yet seen.
    """
    seen = {slot: peers[slot] for slot in wanted if slot in peers}
    if t == 0:
        silent = {s for s, p in seen.items() if p.dead(dead_after) or (not p.changes and p.silent >= dead_after)}
        return set(wanted) - silent
    newest = {o.slot: o for c in sorted(recent, key=lambda c: c.t) for o in sorted(c.offers, key=lambda o: o.step)}
    listed = {slot for slot, o in newest.items() if not o.leaving and not restarted(peers.get(slot), o.generation)}
    if t == 1:
        return listed | {s for s, p in seen.items() if p.beating(dead_after) and p.beat.phase not in STARTING}
    return listed


def restarted(peer: Peer | None, generation: int) -> bool:
    """Does a later generation of this slot not train yet?"""
    return peer is not None and peer.beat.generation > generation and peer.beat.phase in STARTING


def arrival(peer: Peer, t: int, rules: Rules, limit: float) -> float | None:
    """Seconds until this slot should offer step t, or None when it shows no progress.

    limit: seconds without a finished inner step that mean nothing.
    """
    beat, round_steps = peer.beat, max(1, rules.sync_every // rules.fragments)
    if beat.phase not in ("train", "wait") or beat.rate <= 0 or peer.still > max(limit, 1.5 * beat.rate):
        return None
    missing = round_steps - beat.inner if beat.step >= t else round_steps
    return max(0.0, missing * beat.rate - peer.still)


def waiting_for(
    t: int,
    fresh: Mapping[str, Offer],
    expected_slots: set[str],
    peers: Mapping[str, Peer],
    waited: float,
    rules: Rules,
    timing: Timing,
) -> dict[str, str]:
    """slot -> why step t should still wait for it.  Empty: close.   waited: seconds since there were m offers."""
    took = median(o.took for o in fresh.values())
    limit = max(2 * timing.poll, 0.5 * took)
    reasons: dict[str, str] = {}
    for slot in expected_slots - set(fresh):
        peer = peers.get(slot)
        if peer is not None and peer.dead(timing.dead_after):
            continue
        if t == 0 and waited < (timing.start_patience if peer is not None else timing.dead_after):
            reasons[slot] = "is starting"
        if t == 0 and peer is not None and peer.beat.phase in STARTING:
            continue
        due = arrival(peer, t, rules, limit) if peer is not None else None
        if due is not None and due <= 1.5 * took and waited <= 3 * took + limit:
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
