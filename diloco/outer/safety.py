"""Judge the outer step: numbers about the means and the pseudogradients, and warnings that follow from them.

    ρ_t    = cos(ḡ_t, ḡ_{t−F})                          successive means of one fragment       (Memory)
    η_eff  = η · (1 + μ/(1 − μρ))                       what a step of Nesterov is worth       (effective_step)
    η      = TARGET / (1 + μ/(1 − μρ̂))                  outer lr = "auto"                      (AutoLR)
    c      = (‖Σwᵢ·ḡ‖² − Σ wᵢ²‖Δᵢ‖²) / Σ_{i≠j} wᵢwⱼ‖Δᵢ‖‖Δⱼ‖   mean cosine between two replicas   (pairwise)

ρ is that of a sample of the mean (wire.sampled): at most 2^17 elements, so it costs a millisecond, and remembering
the last mean costs half a megabyte and not one more copy of the model.  Its error is about 1/√2^16 = 0.4 %.

Why "auto" has the same bits on all replicas: it depends on committed means alone, whose bytes are agreed on.  A
product of two fp32 numbers is exact in fp64, so `dot` adds in fp64 lanes in a fixed order, the same with or without
fused multiply-add; `math.fsum` of the lanes is correctly rounded; what follows is single IEEE operations of Python,
and η is rounded to fp32.  AutoLR's memory belongs to the outer state: in its digest and in snapshots.

The law: m_t = Σ_k μ^k·ḡ_{t−k}, and means k syncs apart have cosine ρ^k (AR(1)).  So along ḡ_t the step η·(ḡ_t + μ·m_t)
is η·(1 + μ·Σ_k (μρ)^k)·ḡ_t.  η/(1 − μρ) is heavy ball's law, and up to 67 % less.

Not promised: that means of a run are AR(1), nor that a high ρ is bad or a low one good.  The numbers are for looking,
and only AutoLR acts on them, when asked to.  (The norm gate acts too, in agreement/rules.py: it belongs to a commit.)
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rendezvous.agreement.rules import Rules, says_samples
from rendezvous.records.records import Commit, Listed
from rendezvous.records.wire import evenly_sampled

TARGET = 1.0  # η_eff that "auto" aims at: along its mean, a step goes as far as plain averaging would (decision 016)
_LANES = 1 << 14  # fp64: two such vectors stay in the cache.  Part of the definition of `dot`: never change it
_MEMORY = 8  # means over which ρ̂ forgets
FEW_MOVED = 1e-3  # of the elements of a 16-bit model


# ---------------------------------------------------------------------- arithmetic


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """⟨a, b⟩ of flat fp32 vectors, in fp64, in the same bits on every machine.

    Element i is added to lane i mod 2^14, in ascending order; the lanes are then summed exactly and rounded once.
    """
    lanes = np.zeros(_LANES)
    products = np.empty(_LANES)
    with np.errstate(invalid="ignore", over="ignore"):
        for at in range(0, a.size, _LANES):
            piece = a[at : at + _LANES]
            part = products[: piece.size]
            np.multiply(piece, b[at : at + _LANES], out=part, dtype=np.float64)
            np.add(lanes[: piece.size], part, out=lanes[: piece.size])
    return math.fsum(lanes.tolist()) if np.isfinite(lanes).all() else math.nan


def norm(a: np.ndarray) -> float:
    """‖a‖₂ to look at: fast, and not the same bits everywhere."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(a, a))
    return math.sqrt(square) if math.isfinite(square) else math.sqrt(abs(dot(a, a)))


def cosine(product: float, a_norm: float, b_norm: float) -> float | None:
    """⟨a, b⟩/(‖a‖·‖b‖) within [−1, 1]; None where it means nothing (a zero vector, a number that is not finite)."""
    scale = a_norm * b_norm
    if not (math.isfinite(product) and math.isfinite(scale)) or scale == 0.0:
        return None
    return max(-1.0, min(1.0, product / scale))


def is_zero(mean: np.ndarray) -> bool:
    """Whether every element is 0 or −0: by the bytes, independent of the CPU's treatment of subnormals.

    mean: flat fp32.  Where it is not zero, that costs a look at its first 2^14 elements, as a rule.
    """
    bits = mean.view(np.uint32)
    return not any((bits[at : at + _LANES] << 1).any() for at in range(0, bits.size, _LANES))


def effective_step(lr: float, mu: float, rho: float, means: float = math.inf) -> float:
    """Return Nesterov's distance along the newest mean, in units of that mean: η·(1 + μ·(1 − (μρ)^n)/(1 − μρ)).

    rho: cosine of successive means.   means: n, how many are in the momentum, the newest one counted; after many the
    power is 0.  0 ≤ μ < 1.
    """
    return lr * (1.0 + mu * (1.0 - (mu * rho) ** means) / (1.0 - mu * rho))


def moved_share(delta: np.ndarray) -> float:
    """The share of elements that are not 0, in a sample."""
    some = evenly_sampled(delta)
    return float(np.count_nonzero(some)) / max(1, some.size)


# ---------------------------------------------------------------------- successive means


class Memory:
    """A sample of the last mean of one fragment that was not zero, for ρ."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(evenly_sampled(np.broadcast_to(np.float32(0), size)).size, np.float32)

    def rho(self, mean: np.ndarray) -> float | None:
        """ρ of `mean` with the one before, which it then replaces; None if one of them is zero or not finite."""
        some = np.ascontiguousarray(evenly_sampled(mean))
        now = dot(some, some)
        before = dot(self.mean, self.mean)
        if not math.isfinite(now) or now == 0.0:
            return None
        rho = cosine(dot(some, self.mean), math.sqrt(now), math.sqrt(before))
        self.mean[:] = some
        return rho


class AutoLR:
    """lr = "auto" for one fragment: η = target/(1 + μ/(1 − μρ̂)), so that η_eff stays near `target`.

    ρ̂ begins at 1 (the careful end) and is the average of that and of the ρ seen, over about the last 8; a negative
    ρ counts as 0, so that η lies in [target·(1−μ), target/(1+μ)].  A zero mean teaches nothing.
    """

    def __init__(self, size: int, *, mu: float, target: float = TARGET) -> None:
        if not (math.isfinite(target) and target > 0 and 0 <= mu < 1):
            raise ValueError(f"outer lr = auto needs a target above 0 and a momentum in [0, 1), got {target}, {mu}")
        self.target = target
        self.mu = mu
        self.memory = Memory(size)
        self.learned = np.array([1.0, 1.0])  # ρ̂, and how many values it is the average of

    @property
    def rho_hat(self) -> float:
        return float(self.learned[0])

    @property
    def lr(self) -> float:
        """η as it stands, an fp32 number."""
        return float(np.float32(self.target / (1.0 + self.mu / (1.0 - self.mu * self.rho_hat))))

    def step(self, mean: np.ndarray) -> float:
        """Learn from a committed mean; -> the η to apply that very mean with."""
        rho = self.memory.rho(mean)
        if rho is not None:
            observed = max(0.0, rho)
            count = min(float(self.learned[1]) + 1.0, float(_MEMORY))
            self.learned[:] = self.rho_hat + (observed - self.rho_hat) / count, count
        return self.lr

    def arrays(self) -> dict[str, np.ndarray]:
        """The state that a snapshot must hold and a digest must cover: live views, in this order."""
        return {"last_mean": self.memory.mean, "rho": self.learned}


# ---------------------------------------------------------------------- replicas among themselves


def pairwise_cosine(weights: Sequence[float], norms: Sequence[float], mean_norm: float) -> float | None:
    """The mean cosine between two replicas' pseudogradients, weighted by wᵢ‖Δᵢ‖·wⱼ‖Δⱼ‖; None for one alone.

    From ‖Σ wᵢΔᵢ‖² = Σ wᵢ²‖Δᵢ‖² + Σ_{i≠j} wᵢwⱼ⟨Δᵢ, Δⱼ⟩: it takes norms only, no second pass over the blobs.
    """
    lengths = [w * n for w, n in zip(weights, norms, strict=True)]
    own = math.fsum(x * x for x in lengths)
    total = math.fsum(lengths)
    return cosine((math.fsum(weights) * mean_norm) ** 2 - own, total * total - own if len(lengths) > 1 else 0.0, 1.0)


# ---------------------------------------------------------------------- what does less than it seems to


@dataclass(frozen=True)
class Finding:
    """Something that makes a step do less than it seems to.   first: in how many steps in a row before it is said."""

    kind: str
    text: str
    first: int = 3


def replica_findings(stats: Mapping[str, float], h: int, zero: bool, small: bool = False) -> list[Finding]:
    """Judge one replica's round by its inner loop's measurements (lr, grad_norm, moved), h and Δ.

    small: the model's weights have 16 bits.
    """
    found: list[Finding] = []
    if stats.get("lr") == 0:
        found.append(Finding("zero_lr", "the inner learning rate is 0: look at inner.lr and its schedule"))
    if stats.get("grad_norm") == 0:
        found.append(Finding("zero_grads", f"all gradients of {h} inner steps are 0: no advantage, or a cut graph"))
    if small and not found and stats.get("moved", 1.0) < FEW_MOVED:
        share = f"only {100 * stats['moved']:.2g} % of the 16-bit weights moved in {h} inner steps"
        text = f"{share}: the learning rate is below their resolution; use a larger one, or fp32 weights"
        found.append(Finding("bf16_stuck", text))
    elif zero and not found:
        why = "does the optimizer hold the model's parameters, and is the lr enough for their dtype?"
        found.append(Finding("zero_delta", f"{h} inner steps with gradients did not move θ: {why}"))
    return found


def commit_findings(commit: Commit, desired: int, cos_pair: float | None, rules: Rules) -> list[Finding]:
    """Judge an outer step by its commit.   desired: replicas that the operator asked for."""
    found = [Finding("identical", _twins_text(same)) for same in _identical_groups(commit.fresh_offers, cos_pair)]
    found += [Finding("gated", _too_long_text(o), 1) for o in commit.offers if o.factor != 1.0]
    if len(commit.fresh_offers) == 1 < desired:
        slot = commit.fresh_offers[0].slot
        text = f"step {commit.t} was taken by {slot} alone, of {desired} replicas: no other replica confirms its θ"
        found.append(Finding("solo", text, 1))
    if rules.weighting == "samples" and not says_samples(commit.offers):
        silent = ", ".join(sorted({o.slot for o in commit.offers if not o.samples > 0}))
        text = f"{silent} did not say how many samples are inside, so step {commit.t} was weighed by inner steps"
        found.append(Finding("no_samples", text, 1))
    return found


def empty_round(t: int) -> Finding:
    """The outer step that was not taken (decision 015)."""
    return Finding("empty_round", f"outer step {t}: the mean was zero, so θ and the outer momentum stay as they are", 1)


def _identical_groups(offers: Sequence[Listed], cos_pair: float | None) -> list[list[Listed]]:
    """Offers of different slots with the same bytes, or the same norms and one direction; zeros are equal by right."""
    nonzero = [o for o in offers if not o.zero]
    counts = Counter(o.digest for o in nonzero)
    groups = [[o for o in nonzero if o.digest == d] for d, n in counts.items() if n > 1]
    norms = [o.norm for o in nonzero]
    parallel = cos_pair is not None and cos_pair > 1 - 1e-5 and max(norms, default=0) <= min(norms, default=0) * 1.0001
    return [nonzero] if parallel and len(nonzero) > 1 else groups


def _twins_text(same: Sequence[Listed]) -> str:
    slots = " and ".join(sorted({o.slot for o in same}))
    return f"{slots} made the same pseudogradient: do they train on the same data with the same seed?"


def _too_long_text(o: Listed) -> str:
    times = 1 / o.factor if o.factor else math.inf
    return (
        f"{o.slot}'s pseudogradient for step {o.step} is {o.norm:.2g} long, {times:.2g} times a typical one, "
        "and counts as one of that length (outer.norm_gate); look at that replica's loss"
    )


# ---------------------------------------------------------------------- step by step


class Tracker:
    """The numbers of every outer step, and words where one finding lasts.

    Observes only: a replica that heals begins without a ρ, and nothing that is agreed on depends on this.
    """

    def __init__(self, sizes: Sequence[int], mu: float, rules: Rules) -> None:
        self._memories = [Memory(n) for n in sizes]
        self._mu = mu
        self._rules = rules
        self._last = [-1] * len(sizes)  # the step whose mean is remembered
        self._empty = False  # was the mean that was looked at last zero?
        self._means = 0  # in the momentum of the fragment that was looked at last
        self._sent: dict[tuple[int, str], str] = {}  # fragment, slot -> digest of the newest listed delta
        self._lasting: Counter[str] = Counter()
        self.numbers: dict[str, float] = {}

    def mean(self, commit: Commit, mean: np.ndarray) -> None:
        """Look at a mean before it is applied."""
        fragment = commit.t % len(self._memories)
        rho = self._memories[fragment].rho(mean)
        if self._last[fragment] != commit.t - len(self._memories):
            rho = None  # steps were caught up with in between
        self._last[fragment] = commit.t
        self._means = commit.t // len(self._memories) + 1
        self._empty = is_zero(mean)
        numbers: dict[str, float | None] = {"rho": rho, "mean_norm": norm(mean)}
        if self._rules.codec != "topk":  # what top-k sends is much shorter than the Δ whose norm was announced
            weights = [o.weight for o in commit.offers]
            norms = [o.norm for o in commit.offers]
            numbers["cos_pair"] = pairwise_cosine(weights, norms, numbers["mean_norm"] or 0.0)
        self.numbers = {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}

    def step(self, lr: float) -> dict[str, float]:
        """The numbers of the step just taken, for the log, without those that have no value (ρ of the first mean)."""
        rho = self.numbers.get("rho")
        worth = {} if rho is None else {"effective_step": effective_step(lr, self._mu, rho, self._means)}
        return {**self.numbers, "outer_lr": lr, **worth}

    def findings(self, commit: Commit, desired: int, mine: Iterable[Finding]) -> list[tuple[Finding, int]]:
        """The findings worth a warning after this commit, and for how many steps in a row.   mine: of this replica."""
        found = commit_findings(commit, desired, self.numbers.get("cos_pair"), self._rules)
        empty = [empty_round(commit.t)] if self._empty else []
        return self.lasting_findings([*found, *empty, *self._repeated_offers(commit), *mine])

    def _repeated_offers(self, commit: Commit) -> list[Finding]:
        """Slots whose fresh pseudogradient is bit by bit the one that they sent before."""
        fragment = commit.t % len(self._memories)
        found: list[Finding] = []
        for o in commit.fresh_offers:
            if not o.zero and self._sent.get((fragment, o.slot)) == o.digest:
                text = f"{o.slot} sent in step {commit.t} exactly what it sent before"
                found.append(Finding("repeated", text + ": does its data start over each round?", 1))
            self._sent[fragment, o.slot] = o.digest
        return found

    def lasting_findings(self, found: Sequence[Finding]) -> list[tuple[Finding, int]]:
        """Findings worth a word now, with the number of steps in a row: at 3, 6, 12, 24, 50, 100, 150, …"""
        first = {f.kind: f for f in found}
        self._lasting = Counter({k: self._lasting[k] + 1 for k in first})
        return [(first[k], n) for k, n in sorted(self._lasting.items()) if n == first[k].first or _is_due(n)]


def _is_due(n: int) -> bool:
    return n in (3, 6, 12, 24) or n % 50 == 0
