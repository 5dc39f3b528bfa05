"""The decisions of the protocol, as pure functions of the records that were read.

    w_i   = (h_i / H) · γ^age · factor_i                   weight of an offer of h_i inner steps (with_weights)
    factor_i = typical_i / ‖Δ_i‖  where ‖Δ_i‖ > limit·max(typical_i, ‖θ‖/100), else 1           (norm_factors)
    P     = max(2·poll, ½·median took)          patience with a replica without progress; took: seconds per round
    pace  = took·H/h, seconds of a full round, for the fastest quarter of the fresh offers      (step_pace)
    look again in  max over the missing of min(arrival + upload, dead_after − silent)           (resolved_in)
    h_cap = H, or ⌊H / slowness⌋ if full rounds take a third longer than the pace               (next_cap)
            in the first round: the inner steps that the other replicas still have to do        (first_cap)

Step t can be closed when there are m = min_replicas fresh offers (offers for step t itself), and every expected slot
has offered, is dead, is leaving, or is too slow to wait for.  Only these decisions use clocks, so clocks only decide
when a replica *tries* to close a step.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rendezvous.codecs import DENSE
from rendezvous.records.records import Beat, Commit, Listed, Offer

LARGE_FLEET = 12  # slots; in a fleet with more, a replica does not read all the others' heartbeats at every beat
LED = 3  # the rank of every replica that lets three others look first
ROUNDS = 3  # the median of so many rounds of a replica is its speed
DRIFT = 0.001  # seconds per second by which two clocks may differ; ten times as much as quartz clocks do
STARTING = ("boot", "heal")  # phases in which a slot does not train yet
WEIGHTINGS = ("steps", "uniform", "samples")
UNSUSPICIOUS = 0.01  # part of ‖θ‖: the least norm that `norm_factors` takes as typical


@dataclass(frozen=True)
class Rules:
    """The rules that all replicas of a run share, stored in run.json.

    fragments: F, the number of fragments.   sync_every: H, inner steps in a full pseudogradient.
    max_carry: for so many syncs of its fragment, a late offer may wait for a commit.
    age_discount: γ, a late weight's factor per sync.   snapshot_every: outer steps between two snapshots.
    codec: the format of pseudogradients (rendezvous/codecs).   weighting: how an offer's weight is computed.
    norm_gate: the limit of `norm_factors`, 0 for none.
    sync_seconds: a sync is due after so many seconds even if inner steps are missing; 0 for never.
    shard_from: bytes of a body from which three or more replicas reduce it in shards.
    shard_elements: minimal number of elements in a shard; each shard of a body has a digest.
    announce: whether the closer of a step without shards writes the mean to the store, for later readers.
    """

    fragments: int = 1
    sync_every: int = 1
    max_carry: int = 2
    age_discount: float = 0.5
    snapshot_every: int = 10
    codec: str = "fp32"
    weighting: str = "steps"
    norm_gate: float = 0.0
    sync_seconds: float = 0.0
    shard_from: int = 8 << 20
    shard_elements: int = 1 << 16
    announce: bool = True

    @property
    def window(self) -> int:
        """Number of commits before the current step that a closer must know."""
        return max(2, self.fragments * self.max_carry) + 1


@dataclass(frozen=True)
class Timing:
    """Periods and limits in seconds, which may differ between replicas: no agreed value depends on them."""

    poll: float = 0.02
    beat: float = 0.2
    dead_after: float = 1.0
    start_patience: float = 30.0
    give_up: float = 600.0
    store_patience: float = 120.0
    grace: float = 15.0


@dataclass(frozen=True)
class Peer:
    """One observer's view of a slot's heartbeat.

    silent: seconds since the beat's counter last changed, without the observer's own pauses.   still: the same for
    (step, inner).   late: seconds by which a slow store may delay a beat and its read.   untrusted_generation: a
    generation that offered although its beat had stopped; we never trust its beats again.
    read: (seconds awake, wall clock) of the observer when it read the beat.
    """

    beat: Beat
    changes: int = 0
    silent: float = 0.0
    still: float = 0.0
    untrusted_generation: int = 0
    read: tuple[float, float] = (0.0, 0.0)
    late: float = 0.0

    def is_dead(self, dead_after: float) -> bool:
        if self.beat.phase == "left":
            return True
        return self.untrusted_generation != self.beat.generation and self.changes > 0 and self.is_silent(dead_after)

    def is_silent(self, seconds: float) -> bool:
        return self.silent - self.late >= seconds

    def is_beating(self, dead_after: float) -> bool:
        return self.changes > 0 and not self.is_dead(dead_after)

    def aged_by(self, seconds: float) -> "Peer":
        """Return this view as it is `seconds` later if the beat does not change."""
        return replace(self, silent=self.silent + seconds, still=self.still + seconds)

    def in_words(self, dead_after: float) -> str:
        """Return a text about a slot whose offer is missing."""
        if self.beat.phase == "left":
            return "has left"
        if self.is_dead(dead_after):
            return f"is silent for {self.silent:.0f} s, at step {self.beat.step}"
        return "is starting" if self.beat.phase in STARTING else f"is at step {self.beat.step}"


def round_to_fp32(x: float) -> float:
    """Round x to the nearest fp32 number, as np.float32 does: ties to even; infinity if x is too large."""
    return array("f", [x])[0]


def beat_age(old: Peer, new: Beat, elapsed: float, wall: float, beat: float) -> float:
    """Return the least age in seconds of the beat `new`.  Its observer read `old` earlier, by `elapsed` seconds.

    The writer's own clock, and the number of its beats, each tell how long the writer was active between the two beats.
    The writer was silent for the rest of `elapsed`, and for `old.silent` seconds before.  So there are two ages.  The
    smaller age is returned, so that one wrong clock never makes a living replica look dead.  `DRIFT` makes the age
    smaller still, so that the errors of two clocks do not add up.  The age is at most `elapsed`, because `new` was not
    there at the earlier look.
    wall: `elapsed` by the observer's wall clock.   beat: seconds between two beats.

    >>> one, two = (Beat("r00", 1, n, "train", 5, 0, 1.0, at) for n, at in ((7, 100.0), (9, 110.0)))
    >>> beat_age(Peer(one, silent=3.0), two, 60.0, 60.0, 5.0)
    52.94
    """
    if new.generation != old.beat.generation:
        return 0.0
    lived = new.at - old.beat.at, (new.n - old.beat.n) * beat
    before = max(0.0, old.silent - DRIFT * elapsed)
    return max(0.0, min(elapsed, before + min(min(elapsed, wall) - lived[0], elapsed - lived[1])))


def may_be_decided(open_s: float, pace: float) -> bool:
    """Whether the step that this replica began `open_s` seconds ago may be decided by now.

    pace: the pace in the commit before, in seconds; the other replicas need about that long.
    """
    return open_s >= 0.8 * pace


def with_weights(offers: Sequence[Listed], t: int, rules: Rules) -> tuple[Listed, ...]:
    """Return the offers of commit t with their weights, which are fp32 numbers and depend on the offers alone.

    By `rules.weighting` the weight is:
    steps      h/H
    uniform    1
    samples    samples / the largest number of samples in this commit; h/H for all if an offer does not give its samples
    A late offer's weight is multiplied by γ for each sync of its fragment since then.
    """
    factors = norm_factors(offers, rules.norm_gate)
    return tuple(
        replace(o, factor=f, weight=round_to_fp32(share * _age_factor(t - o.step, rules) * f))
        for o, share, f in zip(offers, _offer_shares(offers, rules), factors, strict=True)
    )


def _age_factor(steps: int, rules: Rules) -> float:
    """Return γ^age by multiplication, because machines round `**` differently."""
    return math.prod([rules.age_discount] * (steps // rules.fragments))


def _offer_shares(offers: Sequence[Listed], rules: Rules) -> list[float]:
    if rules.weighting == "uniform":
        return [1.0] * len(offers)
    if rules.weighting == "samples" and says_samples(offers):
        most = max(o.samples for o in offers)
        return [o.samples / most for o in offers]
    return [o.h / rules.sync_every for o in offers]


def says_samples(offers: Iterable[Listed]) -> bool:
    """Whether all offers give their number of samples."""
    return all(o.samples > 0 for o in offers)


def norm_factors(offers: Sequence[Listed], limit: float) -> list[float]:
    """Return a factor per offer: 1, or typical/norm if the norm exceeds `limit` × the typical norm.

    typical    the larger of two: the median norm, and the median norm per inner step times the offer's h.  So neither
               a short nor a long round is an outlier
    zeros      zero pseudogradients are left out of the medians.  With fewer than three other offers all factors are 1:
               there are too few to find an outlier
    small      a norm below `limit` × 1 % of ‖θ‖ is never an outlier.  If rewards are rare, most pseudogradients are
               almost zero, and the long pseudogradient comes from the replica that learned
    """
    moving = [o for o in offers if o.norm > 0]
    if limit <= 0 or len(moving) < 3:
        return [1.0] * len(offers)
    length = median(o.norm for o in moving)
    per_step = median(o.norm / o.h for o in moving)
    floor = UNSUSPICIOUS * median(o.scale for o in moving)
    typical = [max(length, per_step * o.h) for o in offers]
    return [
        round_to_fp32(usual / o.norm) if o.norm > limit * max(usual, floor) else 1.0
        for o, usual in zip(offers, typical, strict=True)
    ]


def patience_s(tooks: Iterable[float], poll: float) -> float:
    return max(2 * poll, 0.5 * median(tooks))


def step_pace(fresh: Iterable[Offer], sync_every: int) -> float:
    """Return the seconds of a full round, by the slowest replica of the fastest quarter.

    So one unusually fast replica of five does not shorten the other replicas' rounds.  Zero pseudogradients are left
    out, unless all are zero: they do not show how long training takes.
    """
    offers = [*fresh]
    rounds = sorted(o.took * sync_every / o.h for o in [o for o in offers if not o.zero] or offers)
    return rounds[(len(rounds) - 1) // 4]


def first_cap(t: int, peers: Iterable[Peer], rules: Rules, dead_after: float) -> int:
    """Return the inner steps for a replica that joins during step t: the median of the other replicas' remaining steps.

    In a full round, it would keep the others waiting most of a step.  At t = 0, all replicas do a full round.
    """
    round_steps = max(1, rules.sync_every // rules.fragments)
    there = [p for p in peers if p.is_beating(dead_after) and p.beat.step == t and p.beat.phase not in STARTING]
    if t == 0 or not there:
        return rules.sync_every
    left = median(max(0, round_steps - p.beat.inner) for p in there)
    return max(1, min(rules.sync_every, int(left * rules.fragments)))


def slowness(round_s: float, *, pace_s: float, poll: float) -> float:
    """Return the ratio of a full round to the pace; 1 if the difference is at most four polls."""
    return round_s / pace_s if round_s - pace_s > 4 * poll and pace_s > 0 else 1.0


def next_cap(sync_every: int, slow: Sequence[float], *, fresh: bool) -> int:
    """Return how many inner steps the next pseudogradient may have, to be ready when the fastest replicas offer.

    slow: `slowness` of this replica's last three offers.   fresh: whether the last offer counted in its own step.
    One slow round of three is ignored, unless its offer was not in the commit.  Equal machines differ by less than a
    third, so they keep H, and such a run can be repeated bit for bit.
    """
    factor = slow[-1] if not fresh else median(slow) if len(slow) == ROUNDS else 1.0
    return sync_every if factor <= 4 / 3 else max(1, int(sync_every / factor))


def offer_flaw(offer: Offer, s: int, slot: str, rules: Rules) -> str:
    """Return why the record is not an offer of `slot` for step s, "" if it is one.  All readers get the same answer."""
    if (offer.step, offer.slot) != (s, slot):
        return f"it names step {offer.step} and {offer.slot}, and not {s} and {slot}"
    if offer.codec != rules.codec:
        return f"its codec is {offer.codec}, this run's is {rules.codec}"
    return "" if offer.h <= 4 * rules.sync_every else f"its {offer.h} inner steps are more than 4 · {rules.sync_every}"


def is_eligible(offer: Offer, base: str, fence: Mapping[str, int]) -> bool:
    """Whether the offer started from the chain's θ and the commit before had not fenced its generation."""
    return offer.base == base and fence.get(offer.slot, 0) <= offer.generation


def reduces_sharded(sizes: Sequence[int], codec: str, shard_from: int) -> bool:
    """Whether a reduction in shards moves fewer bytes.

    Bytes per replica besides its own offer, for N bodies of S bytes:  direct: (N−1)·S down;  in shards: S/N up and
    2(N−1)/N·S down.  At N = 2 shards save nothing, and need two more round trips.  The sum of top-k bodies is dense,
    so their shards would not be smaller.
    """
    return len(sizes) >= 3 and min(sizes) >= shard_from and codec in DENSE


def slots_to_expect(
    t: int, recent: list[Commit], peers: Mapping[str, Peer], dead_after: float, wanted: Sequence[str]
) -> set[str]:
    """Return the slots that step t should wait for.

    t = 0      every wanted slot, even one that is starting or was never seen, unless it is silent
    t = 1      the slots that commit 0 lists, and those that beat and have started to train
    t ≥ 2      the slots that commits t−1 and t−2 list
    A slot is not expected if it announced that it leaves, or if its next generation is still starting.  (A beat of the
    listed generation with phase "boot" is only old.)
    """
    seen = {slot: peers[slot] for slot in wanted if slot in peers}
    if t == 0:
        silent = {s for s, p in seen.items() if p.is_dead(dead_after) or (not p.changes and p.is_silent(dead_after))}
        return set(wanted) - silent
    newest = {o.slot: o for c in sorted(recent, key=lambda c: c.t) for o in sorted(c.offers, key=lambda o: o.step)}
    listed = {slot for slot, o in newest.items() if not o.leaving and not is_restarting(peers.get(slot), o.generation)}
    if t == 1:
        return listed | {s for s, p in seen.items() if p.is_beating(dead_after) and p.beat.phase not in STARTING}
    return listed


def is_restarting(peer: Peer | None, generation: int) -> bool:
    """Whether a generation of this slot after `generation` has started and does not train yet."""
    return peer is not None and peer.beat.generation > generation and peer.beat.phase in STARTING


def expected_arrival(peer: Peer, t: int, rules: Rules, limit: float) -> float | None:
    """Return the seconds until this slot should offer step t, or None if it makes no progress.

    limit: the longest normal time without a finished inner step, in seconds.
    """
    beat = peer.beat
    round_steps = max(1, rules.sync_every // rules.fragments)
    if rules.sync_seconds > 0 and beat.rate > 0:
        round_steps = math.ceil(min(round_steps, rules.sync_seconds / beat.rate))
    still = 0.0 if beat.evaluates else peer.still  # an evaluation is progress without inner steps
    if beat.phase not in ("train", "wait") or beat.rate <= 0 or still > max(limit, 1.5 * beat.rate):
        return None
    missing = round_steps - beat.inner if beat.step >= t else round_steps
    return max(0.0, missing * beat.rate - still)


def waiting_for(
    t: int,
    fresh: Mapping[str, Offer],
    expected_slots: set[str],
    peers: Mapping[str, Peer],
    waited: float,
    rules: Rules,
    timing: Timing,
) -> dict[str, str]:
    """Return slot -> reason to wait for it in step t; empty if the step can be closed.

    waited: seconds since there were m offers.
    """
    took = median(o.took for o in fresh.values())
    limit = max(2 * timing.poll, 0.5 * took)
    reasons: dict[str, str] = {}
    for slot in expected_slots - set(fresh):
        peer = peers.get(slot)
        if peer is not None and peer.is_dead(timing.dead_after):
            continue
        if t == 0 and waited < (timing.start_patience if peer is not None else timing.dead_after):
            reasons[slot] = "is starting"
        if t == 0 and peer is not None and peer.beat.phase in STARTING:
            continue
        due = expected_arrival(peer, t, rules, limit) if peer is not None else None
        if due is not None and due <= 1.5 * took and waited <= 3 * took + limit:
            reasons[slot] = f"should offer in {due:.1f} s"
        elif waited < limit:
            reasons[slot] = f"shows no progress; waited {waited:.1f} of {limit:.1f} s"
    return reasons


@dataclass(frozen=True)
class WaitState:
    """A replica's wait for the other offers, in seconds.

    waited: time since there were m offers.   took: median of the present offers' `took`.
    upload: time from the last inner step to the offer.   least_pause: the shortest pause after a look without result.
    """

    waited: float
    took: float
    upload: float = 0.0
    least_pause: float = 0.0


def resolved_in(t: int, peers: Iterable[Peer | None], wait: WaitState, rules: Rules, timing: Timing) -> list[float]:
    """Return, per slot, the seconds until step t need not wait for it any more, smallest first.

    By then the slot has offered, counts as dead, or has exceeded the limit of patience.  Nothing else changes the
    decision, so an earlier look finds nothing new.  (The replica that offers last looks at once, and closes.)
    """
    return sorted(_resolved_in(t, peer, wait, rules, timing) for peer in peers)


def _resolved_in(t: int, peer: Peer | None, wait: WaitState, rules: Rules, timing: Timing) -> float:
    limit = max(2 * timing.poll, 0.5 * wait.took)
    due = None if peer is None else expected_arrival(peer, t, rules, limit)
    arrives = limit - wait.waited if due is None or due > 1.5 * wait.took else due + wait.upload + 2 * timing.poll
    dies = (
        timing.dead_after + peer.late - peer.silent
        if peer and peer.changes and peer.untrusted_generation != peer.beat.generation
        else math.inf
    )
    return max(0.0, min(max(arrives, wait.least_pause), dies))


def commit_rank(t: int, slot: int, slots: int) -> int:
    """Return this slot's rank in closing step t: 0, 1 or 2 for about three slots (by a hash), 3 for all others.

    If every replica looked for all offers, a step would need N² requests.
    """
    mixed = (t * 7919 + slot * 104729) & 0xFFFFFF
    return min(LED, mixed % max(1, slots))
