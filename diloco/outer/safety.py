"""Judge the outer step: numbers about the means and the pseudogradients, and warnings that follow from them.

    ρ_t    = cos(ḡ_t, ḡ_{t−F})                          successive means of one fragment       (Memory)
    η_eff  = η · (1 + μ/(1 − μρ))                       length of a Nesterov step              (effective_step)
    c      = (‖Σwᵢ·ḡ‖² − Σ wᵢ²‖Δᵢ‖²) / Σ_{i≠j} wᵢwⱼ‖Δᵢ‖‖Δⱼ‖   mean cosine between two replicas   (pairwise)

ρ is computed from a sample of the mean (`evenly_sampled`) with at most 2^17 elements. So ρ costs a millisecond, and
the last mean's sample needs half a megabyte, not a copy of the model.  The error of ρ is about 1/√2^16 = 0.4 %.

A product of two fp32 numbers is exact in fp64, so `dot` adds in fp64 lanes in a fixed order, the same with or without
fused multiply-add. `math.fsum` of the lanes is correctly rounded.

The formula of η_eff: m_t = Σ_k μ^k·ḡ_{t−k}, and means k syncs apart have cosine ρ^k (AR(1)).  So along ḡ_t the step
η·(ḡ_t + μ·m_t) is η·(1 + μ·Σ_k (μρ)^k)·ḡ_t.  η/(1 − μρ), of the heavy ball, is 1 + μ(1 − ρ) times smaller.

Not promised: that a run's means are AR(1); that a high ρ is bad or a low ρ is good.  The numbers are for you to read;
only lr = "auto" (auto_lr.py) uses them.  (The norm gate, agreement/rules.py, changes a step as part of a commit.)
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rendezvous.agreement.rules import Rules, says_samples
from rendezvous.records.records import Commit, Listed
from rendezvous.records.wire import evenly_sampled

_LANES = 1 << 14  # two such fp64 vectors fit into the cache.  Part of the definition of `dot`: never change it
FEW_MOVED = 1e-3  # share of a 16-bit model's elements


# ---------------------------------------------------------------------- arithmetic


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """Compute ⟨a, b⟩ of flat fp32 vectors in fp64, with the same bits on every machine.

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
    """Compute ‖a‖₂ for display: fast, but with different bits on different machines."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(a, a))
    return math.sqrt(square) if math.isfinite(square) else math.sqrt(abs(dot(a, a)))


def cosine(product: float, a_norm: float, b_norm: float) -> float | None:
    """Compute ⟨a, b⟩/(‖a‖·‖b‖) in [−1, 1]; None if it is undefined (a zero vector, a number that is not finite)."""
    scale = a_norm * b_norm
    if not (math.isfinite(product) and math.isfinite(scale)) or scale == 0.0:
        return None
    return max(-1.0, min(1.0, product / scale))


def is_zero(mean: np.ndarray) -> bool:
    """Whether every element is 0 or −0. Compares bytes, so the CPU's treatment of subnormals does not matter.

    mean: flat fp32.  For a nonzero mean, the first 2^14 elements usually decide.
    """
    bits = mean.view(np.uint32)
    return not any((bits[at : at + _LANES] << 1).any() for at in range(0, bits.size, _LANES))


def effective_step(lr: float, mu: float, rho: float, means: float = math.inf) -> float:
    """Return Nesterov's distance along the newest mean, in units of that mean: η·(1 + μ·(1 − (μρ)^n)/(1 − μρ)).

    rho: cosine of successive means.   means: n, the number of means in the momentum, including the newest; for a
    large n the power is 0.  0 ≤ μ < 1.
    """
    return lr * (1.0 + mu * (1.0 - (mu * rho) ** means) / (1.0 - mu * rho))


def moved_share(delta: np.ndarray) -> float:
    """Return the share of nonzero elements, in a sample."""
    some = evenly_sampled(delta)
    return float(np.count_nonzero(some)) / max(1, some.size)


# ---------------------------------------------------------------------- successive means


class Memory:
    """A sample of one fragment's last nonzero mean, for ρ."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(evenly_sampled(np.broadcast_to(np.float32(0), size)).size, np.float32)

    def rho(self, mean: np.ndarray) -> float | None:
        """Return the cosine of `mean` and the stored mean, then store `mean`; None if one is zero or not finite."""
        some = np.ascontiguousarray(evenly_sampled(mean))
        now = dot(some, some)
        before = dot(self.mean, self.mean)
        if not math.isfinite(now) or now == 0.0:
            return None
        rho = cosine(dot(some, self.mean), math.sqrt(now), math.sqrt(before))
        self.mean[:] = some
        return rho


# ---------------------------------------------------------------------- replicas among themselves


def pairwise_cosine(weights: Sequence[float], norms: Sequence[float], mean_norm: float) -> float | None:
    """Compute the mean cosine of two replicas' pseudogradients, weighted by wᵢ‖Δᵢ‖·wⱼ‖Δⱼ‖; None for one replica.

    By ‖Σ wᵢΔᵢ‖² = Σ wᵢ²‖Δᵢ‖² + Σ_{i≠j} wᵢwⱼ⟨Δᵢ, Δⱼ⟩ it needs only norms, not a second pass over the blobs.
    """
    lengths = [w * n for w, n in zip(weights, norms, strict=True)]
    own = math.fsum(x * x for x in lengths)
    total = math.fsum(lengths)
    return cosine((math.fsum(weights) * mean_norm) ** 2 - own, total * total - own if len(lengths) > 1 else 0.0, 1.0)


# ---------------------------------------------------------------------- steps that do less than they seem to


@dataclass(frozen=True)
class Finding:
    """A reason why a step does less than it seems to.   first: warn after so many successive steps with it."""

    kind: str
    text: str
    first: int = 3


def replica_findings(stats: Mapping[str, float], h: int, zero: bool, small: bool = False) -> list[Finding]:
    """Judge one replica's round by the inner loop's numbers (lr, grad_norm, moved), by h and by Δ.

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
    """Judge an outer step by its commit.   desired: how many replicas the operator wants."""
    found = [Finding("identical", _identical_text(same)) for same in _identical_groups(commit.fresh_offers, cos_pair)]
    found += [Finding("gated", _too_long_text(o), 1) for o in commit.offers if o.factor != 1.0]
    if len(commit.fresh_offers) == 1 < desired:
        slot = commit.fresh_offers[0].slot
        text = f"step {commit.t} was taken by {slot} alone, of {desired} replicas: no other replica confirms its θ"
        found.append(Finding("solo", text, 1))
    if rules.weighting == "samples" and not says_samples(commit.offers):
        silent = ", ".join(sorted({o.slot for o in commit.offers if not o.samples > 0}))
        text = f"{silent} did not send a number of samples, so step {commit.t} was weighted by inner steps"
        found.append(Finding("no_samples", text, 1))
    return found


def empty_round(t: int) -> Finding:
    """Return the finding for an outer step that was not taken (decision 015)."""
    return Finding("empty_round", f"outer step {t}: the mean was zero, so θ and the outer momentum stay as they are", 1)


def _identical_groups(offers: Sequence[Listed], cos_pair: float | None) -> list[list[Listed]]:
    """Group offers of different slots with equal bytes, or with equal norm and direction. Zeros do not count."""
    nonzero = [o for o in offers if not o.zero]
    counts = Counter(o.digest for o in nonzero)
    groups = [[o for o in nonzero if o.digest == d] for d, n in counts.items() if n > 1]
    norms = [o.norm for o in nonzero]
    parallel = cos_pair is not None and cos_pair > 1 - 1e-5 and max(norms, default=0) <= min(norms, default=0) * 1.0001
    return [nonzero] if parallel and len(nonzero) > 1 else groups


def _identical_text(same: Sequence[Listed]) -> str:
    slots = " and ".join(sorted({o.slot for o in same}))
    return f"{slots} made the same pseudogradient: do they train on the same data with the same seed?"


def _too_long_text(o: Listed) -> str:
    times = 1 / o.factor if o.factor else math.inf
    return (
        f"{o.slot}'s pseudogradient for step {o.step} is {o.norm:.2g} long, {times:.2g} times a typical one, "
        "and counts as a typical one (outer.norm_gate); look at that replica's loss"
    )


# ---------------------------------------------------------------------- step by step


class Tracker:
    """The numbers of every outer step, and warnings about lasting findings.

    It changes nothing: a replica that heals begins without ρ, and no agreement of the replicas depends on this class.
    """

    def __init__(self, sizes: Sequence[int], mu: float, rules: Rules) -> None:
        self._memories = [Memory(n) for n in sizes]
        self._mu = mu
        self._rules = rules
        self._last = [-1] * len(sizes)  # fragment -> the step whose mean is in its Memory
        self._empty = False  # whether the newest mean was zero
        self._means = 0  # number of means in the momentum of the newest mean's fragment
        self._sent: dict[tuple[int, str], str] = {}  # fragment, slot -> digest of the newest listed delta
        self._lasting: Counter[str] = Counter()
        self.numbers: dict[str, float] = {}

    def mean(self, commit: Commit, mean: np.ndarray) -> None:
        """Compute the numbers of a mean, before it is applied."""
        fragment = commit.t % len(self._memories)
        rho = self._memories[fragment].rho(mean)
        if self._last[fragment] != commit.t - len(self._memories):
            rho = None  # this replica took no part in the step before: it has caught up
        self._last[fragment] = commit.t
        self._means = commit.t // len(self._memories) + 1
        self._empty = is_zero(mean)
        numbers: dict[str, float | None] = {"rho": rho, "mean_norm": norm(mean)}
        if self._rules.codec != "topk":  # a top-k body is much shorter than the Δ whose norm the offer names
            weights = [o.weight for o in commit.offers]
            norms = [o.norm for o in commit.offers]
            numbers["cos_pair"] = pairwise_cosine(weights, norms, numbers["mean_norm"] or 0.0)
        self.numbers = {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}

    def step(self, lr: float) -> dict[str, float]:
        """Return the new step's numbers for the log, without undefined ones (ρ of the first mean)."""
        rho = self.numbers.get("rho")
        worth = {} if rho is None else {"effective_step": effective_step(lr, self._mu, rho, self._means)}
        return {**self.numbers, "outer_lr": lr, **worth}

    def findings(self, commit: Commit, desired: int, mine: Iterable[Finding]) -> list[tuple[Finding, int]]:
        """Return the findings to warn about, each with its number of steps in a row.   mine: those of this replica."""
        found = commit_findings(commit, desired, self.numbers.get("cos_pair"), self._rules)
        empty = [empty_round(commit.t)] if self._empty else []
        return self.lasting_findings([*found, *empty, *self._repeated_offers(commit), *mine])

    def _repeated_offers(self, commit: Commit) -> list[Finding]:
        """Find slots whose fresh pseudogradient has the same bits as their previous one."""
        fragment = commit.t % len(self._memories)
        found: list[Finding] = []
        for o in commit.fresh_offers:
            if not o.zero and self._sent.get((fragment, o.slot)) == o.digest:
                text = f"{o.slot} sent in step {commit.t} exactly what it sent before"
                found.append(Finding("repeated", text + ": does its data start over each round?", 1))
            self._sent[fragment, o.slot] = o.digest
        return found

    def lasting_findings(self, found: Sequence[Finding]) -> list[tuple[Finding, int]]:
        """Return the findings to warn about, with their numbers of steps in a row: `first`, 3, 6, 12, 24, 50, 100, …"""
        first = {f.kind: f for f in found}
        self._lasting = Counter({k: self._lasting[k] + 1 for k in first})
        return [(first[k], n) for k, n in sorted(self._lasting.items()) if n == first[k].first or is_due(n)]


def is_due(n: int) -> bool:
    """Whether to warn again about a finding that has lasted for n steps."""
    return n in (3, 6, 12, 24) or (n > 0 and n % 50 == 0)
