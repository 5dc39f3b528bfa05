"""Is the outer step a good one?  Numbers about the means and the pseudogradients, and what may follow from them.

    ρ_t    = cos(ḡ_t, ḡ_{t−F})                 successive means of one fragment            (Memory)
    η_eff  = η / (1 − μ·ρ)                     what a step of Nesterov is worth            (effective_step)
    η      = target · (1 − μ·ρ̂)                outer_lr = "auto"                           (AutoLR)
    κ      = W·‖ḡ‖ / Σ wᵢ‖Δᵢ‖                  mean cosine of replicas with the mean       (coherence)
    factor = min(1, limit·median‖Δ‖ / ‖Δᵢ‖)    norm gate, decided by the committer         (gate)

Why all replicas compute the same η in the same bits: it depends on committed means alone, whose bytes are agreed
on.  A product of two fp32 numbers is exact in fp64, so `dot` adds in fp64 lanes in a fixed order, the same with or
without fused multiply-add; `math.fsum` of the lanes is correctly rounded; what follows is single IEEE operations of
Python, and η is rounded to fp32.  What AutoLR remembers belongs to the outer state: in its digest and snapshots.

Not promised: that a high ρ is bad or a low one good; the law was fitted on few runs.  The numbers are for looking,
and only AutoLR and the gate act on them, when asked to.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from rendezvous.records import Commit, Listed

_LANES = 1 << 14  # fp64: two such vectors stay in the cache.  Part of the definition of `dot`: never change it
_MEMORY = 8  # means over which ρ̂ forgets


# ---------------------------------------------------------------------- arithmetic


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """⟨a, b⟩ of flat fp32 vectors, in fp64, in the same bits on every machine.

    Element i is added to lane i mod 2^14, in ascending order; the lanes are then summed exactly and rounded once.
    """
    lanes, products = np.zeros(_LANES), np.empty(_LANES)
    with np.errstate(invalid="ignore", over="ignore"):
        for at in range(0, a.size, _LANES):
            piece = a[at : at + _LANES]
            part = products[: piece.size]
            np.multiply(piece, b[at : at + _LANES], out=part, dtype=np.float64)
            np.add(lanes[: piece.size], part, out=lanes[: piece.size])
    return math.fsum(lanes) if np.isfinite(lanes).all() else math.nan


def norm(a: np.ndarray) -> float:
    return math.sqrt(dot(a, a))


def cosine(product: float, a_norm: float, b_norm: float) -> float | None:
    """⟨a, b⟩/(‖a‖·‖b‖) within [−1, 1]; None where it means nothing (a zero vector, a number that is not finite)."""
    scale = a_norm * b_norm
    if not (math.isfinite(product) and math.isfinite(scale)) or scale == 0.0:
        return None
    return max(-1.0, min(1.0, product / scale))


def effective_step(lr: float, mu: float, rho: float) -> float:
    """η/(1−μρ): how far a direction is followed in all, when successive means have cosine ρ."""
    return lr / (1.0 - mu * rho)


# ---------------------------------------------------------------------- successive means


class Memory:
    """The last mean of one fragment that was not zero, for ρ.  Costs one more vector of the fragment's size."""

    def __init__(self, size: int) -> None:
        self.mean = np.zeros(size, np.float32)
        self.norm = 0.0

    def rho(self, mean: np.ndarray) -> float | None:
        """ρ of `mean` with the one before, which it then replaces; None if one of them is zero or not finite."""
        now = norm(mean)
        if not math.isfinite(now) or now == 0.0:
            return None
        rho = cosine(dot(mean, self.mean), now, self.norm)
        self.mean[:], self.norm = mean, now
        return rho


class AutoLR:
    """outer_lr = "auto" for one fragment: η = target·(1 − μ·ρ̂), so that η_eff stays near `target`.

    ρ̂ begins at 1 (the careful end) and is the average of that and of the ρ seen, over about the last 8; a negative
    ρ counts as 0, so that η lies in [target·(1−μ), target].  A zero mean teaches nothing.
    """

    def __init__(self, size: int, *, target: float, mu: float) -> None:
        if not (math.isfinite(target) and target > 0 and 0 <= mu < 1):
            raise ValueError(f"outer_lr = auto needs a target above 0 and a momentum in [0, 1), got {target}, {mu}")
        self.target, self.mu, self.memory = target, mu, Memory(size)
        self.learned = np.array([1.0, 1.0])  # ρ̂, and how many values it is the average of

    @property
    def rho_hat(self) -> float:
        return float(self.learned[0])

    @property
    def lr(self) -> float:
        """η as it stands, an fp32 number."""
        return float(np.float32(self.target * (1.0 - self.mu * self.rho_hat)))

    def step(self, mean: np.ndarray) -> float:
        """Learn from a committed mean; -> the η to apply that very mean with."""
        rho = self.memory.rho(mean)
        if rho is not None:
            seen, count = max(0.0, rho), min(float(self.learned[1]) + 1.0, float(_MEMORY))
            self.learned[:] = self.rho_hat + (seen - self.rho_hat) / count, count
        return self.lr

    def arrays(self) -> dict[str, np.ndarray]:
        """What a snapshot must hold and a digest must cover: live views, in this order."""
        return {"last_mean": self.memory.mean, "rho": self.learned}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Become what `arrays` gave."""
        for name, target in self.arrays().items():
            target[:] = arrays[name]
        self.memory.norm = norm(self.memory.mean)


# ---------------------------------------------------------------------- replicas among themselves


def coherence(weights: Sequence[float], norms: Sequence[float], mean_norm: float) -> float | None:
    """The mean of cos(Δᵢ, ḡ), weighted by wᵢ‖Δᵢ‖: 1 for equal pseudogradients, 1/√N for N orthogonal ones.

    Exactly W·‖ḡ‖/Σ wᵢ‖Δᵢ‖, since Σ wᵢ⟨Δᵢ, ḡ⟩ = W·‖ḡ‖²: it takes norms only, no second pass over the blobs.
    """
    length = math.fsum(w * n for w, n in zip(weights, norms, strict=True))
    return cosine(math.fsum(weights) * mean_norm, length, 1.0)


def pairwise(weights: Sequence[float], norms: Sequence[float], mean_norm: float) -> float | None:
    """The mean cosine between two replicas' pseudogradients, weighted by wᵢ‖Δᵢ‖·wⱼ‖Δⱼ‖; None for one alone.

    From ‖Σ wᵢΔᵢ‖² = Σ wᵢ²‖Δᵢ‖² + Σ_{i≠j} wᵢwⱼ⟨Δᵢ, Δⱼ⟩.
    """
    lengths = [w * n for w, n in zip(weights, norms, strict=True)]
    own = math.fsum(x * x for x in lengths)
    apart = math.fsum(x * y for i, x in enumerate(lengths) for j, y in enumerate(lengths) if i != j)
    return cosine((math.fsum(weights) * mean_norm) ** 2 - own, apart, 1.0)


def gate(norms: Sequence[float], limit: float = 3.0) -> list[float]:
    """Factors for the weights of a commit's offers: none may be longer than `limit` times their median.

    An fp32 number in [0, 1] each; 0 means: do not list it (its norm is not finite).  Zero pseudogradients are honest,
    but do not count for the median.  With fewer than three others nobody can tell who is wrong: no one is gated.
    """
    if not limit >= 1.0:
        raise ValueError(f"the norm gate must be at least 1 (times the median), got {limit}")
    lengths = [n for n in norms if math.isfinite(n) and n > 0.0]
    most = limit * median(lengths) if len(lengths) >= 3 else math.inf
    return [float(np.float32(most / n)) if most < n < math.inf else float(math.isfinite(n)) for n in norms]


# ---------------------------------------------------------------------- steps in which nothing happens


@dataclass(frozen=True)
class Finding:
    """Something that makes a step do less than it seems to."""

    kind: str
    text: str


def of_replica(stats: Mapping[str, float], h: int, zero: bool) -> list[Finding]:
    """What one replica's round looks like from what its inner loop measured (lr, grad_norm), h and Δ."""
    found: list[Finding] = []
    if stats.get("lr") == 0:
        found.append(Finding("zero_lr", "the inner learning rate is 0: look at inner.lr and its schedule"))
    if stats.get("grad_norm") == 0:
        found.append(Finding("zero_grads", f"all gradients of {h} inner steps are 0: no advantage, or a cut graph"))
    if zero and not found:
        why = "does the optimizer hold the model's parameters, and is the lr enough for their dtype?"
        found.append(Finding("zero_delta", f"{h} inner steps with gradients did not move θ: {why}"))
    return found


def of_commit(commit: Commit, wanted: int, mean_norm: float, lr: float) -> list[Finding]:
    """What an outer step looks like from its commit and its mean.   wanted: replicas that the operator wants."""
    found = [Finding("identical", _twins(same)) for same in _identical(commit.offers)]
    if len({o.slot for o in commit.offers}) == 1 and wanted > 1:
        slot = commit.offers[0].slot
        found.append(Finding("solo", f"nothing was averaged in step {commit.t}: {slot} alone, of {wanted} replicas"))
    if all(o.zero for o in commit.offers):
        found.append(Finding("zero_mean", f"every pseudogradient of step {commit.t} is 0"))
    elif mean_norm == 0.0:
        found.append(Finding("cancelled", f"the pseudogradients of step {commit.t} cancel: their mean is 0"))
    if lr == 0.0:
        found.append(Finding("zero_outer_lr", "the outer learning rate is 0: θ follows only what momentum is left"))
    return found


def _identical(offers: Sequence[Listed]) -> list[list[Listed]]:
    """Offers of different slots with the same bytes; zeros may be equal by right."""
    counts = Counter(o.digest for o in offers if not o.zero)
    groups = [[o for o in offers if o.digest == d] for d, n in counts.items() if n > 1]
    return [g for g in groups if len({o.slot for o in g}) > 1]


def _twins(same: Sequence[Listed]) -> str:
    slots = " and ".join(sorted({o.slot for o in same}))
    return f"{slots} made the same pseudogradient bit by bit: do they train on the same data with the same seed?"


# ---------------------------------------------------------------------- step by step


class Tracker:
    """The numbers of every outer step, and words where one finding lasts.

    Observes only: a replica that heals begins without a ρ, and nothing that is agreed on depends on this.
    """

    def __init__(self, sizes: Sequence[int], mu: float) -> None:
        self._memories, self._mu = [Memory(n) for n in sizes], mu
        self._lasting: Counter[str] = Counter()

    def step(
        self, commit: Commit, mean: np.ndarray, lr: float, norms: Sequence[float] | None = None
    ) -> dict[str, float]:
        """Numbers for the log.   norms: ‖Δᵢ‖ of the commit's offers, in its order, if they are known.

        What has no value in this step (ρ of the first mean) is left out.
        """
        memory = self._memories[commit.t % len(self._memories)]
        rho = memory.rho(mean)
        size = norm(mean) if rho is None else memory.norm
        numbers: dict[str, float | None] = {"rho": rho, "mean_norm": size, "outer_lr": lr}
        if rho is not None:
            numbers["effective_step"] = effective_step(lr, self._mu, rho)
        if norms:
            weights = [o.weight for o in commit.offers]
            numbers |= {"delta_norm": median(norms), "delta_norm_max": max(norms)}
            numbers |= {"cos_mean": coherence(weights, norms, size), "cos_pair": pairwise(weights, norms, size)}
        return {k: v for k, v in numbers.items() if v is not None and math.isfinite(v)}

    def lasting(self, found: Sequence[Finding]) -> list[tuple[Finding, int]]:
        """Findings worth a word now, with the number of steps in a row: at 3, 6, 12, 24, 50, 100, 150, …"""
        kinds = {f.kind for f in found}
        self._lasting = Counter({k: self._lasting[k] + 1 for k in kinds})
        first = {f.kind: f for f in found}
        return [(first[k], n) for k, n in sorted(self._lasting.items()) if n in (3, 6, 12, 24) or n % 50 == 0]
