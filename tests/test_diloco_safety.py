"""Numbers about outer steps: reference, bits, property, closed form."""

import math
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from diloco.safety import (
    AutoLR,
    Memory,
    Tracker,
    coherence,
    cosine,
    dot,
    effective_step,
    gate,
    norm,
    of_commit,
    of_replica,
    pairwise,
)
from rendezvous.records import Commit, Listed

RNG = np.random.default_rng(11)


def vector(n: int, scale: float = 1.0) -> np.ndarray:
    return RNG.standard_normal(n, dtype=np.float32) * np.float32(scale)


def listed(slot: str, weight: float = 1.0, digest: str = "", zero: bool = False) -> Listed:
    return Listed(0, slot, 1, "n", "blob", 4, digest or slot, 1, weight, zero)


def commit(*offers: Listed, t: int = 0) -> Commit:
    return Commit(t, None, "b", offers, {}, 1, 1.0, 0, "r00-1", "n", 0.0)


def mean_of(deltas: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    total = sum(np.float32(w) * x for w, x in zip(weights, deltas, strict=True))
    return np.asarray(total / np.float32(sum(weights)), np.float32)


# ---------------------------------------------------------------------- dot


@pytest.mark.parametrize("n", [0, 1, 7, 16383, 16384, 16385, 100_003])
def test_dot_is_the_exact_sum_to_a_few_bits(n: int) -> None:
    a, b = vector(n), vector(n)
    exact = math.fsum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    scale = math.fsum(abs(float(x) * float(y)) for x, y in zip(a, b, strict=True))
    assert abs(dot(a, b) - exact) <= 1e-15 * scale


def test_dot_follows_its_definition_bit_by_bit() -> None:
    """Plain Python floats: lane i mod 2^14 in ascending order, then one exact sum."""
    a, b = vector(40_000, 1e3), vector(40_000, 1e-3)
    lanes = [0.0] * (1 << 14)
    for i, (x, y) in enumerate(zip(a.tolist(), b.tolist(), strict=True)):
        lanes[i % (1 << 14)] += x * y
    assert dot(a, b) == math.fsum(lanes)


def test_products_are_exact_so_that_fused_multiply_add_changes_nothing() -> None:
    from fractions import Fraction

    for x, y in zip(vector(200).tolist(), vector(200, 1e-20).tolist(), strict=True):
        assert Fraction(x) * Fraction(y) == Fraction(x * y)


def test_dot_does_not_depend_on_where_the_bytes_lie() -> None:
    a, b = vector(50_001), vector(50_001)
    shifted = np.zeros(50_004, np.float32)
    shifted[3:] = a
    read_only = np.frombuffer(a.tobytes(), np.float32)
    assert dot(a, b) == dot(shifted[3:], b) == dot(read_only, b) == dot(b, a)


def test_dot_of_large_numbers_does_not_overflow_and_nan_is_said() -> None:
    big = np.full(1000, 3e38, np.float32)
    assert dot(big, big) == pytest.approx(1000 * float(big[0]) ** 2, rel=1e-12)
    big[5] = np.nan
    assert math.isnan(dot(big, big))
    big[5] = np.inf
    assert math.isnan(dot(big, -big))


def test_cosine_means_nothing_without_length() -> None:
    assert cosine(1.0, 0.0, 1.0) is None and cosine(math.nan, 1.0, 1.0) is None
    assert cosine(1.0, math.inf, 1.0) is None
    assert cosine(1.0000001, 1.0, 1.0) == 1.0 and cosine(-2.0, 1.0, 1.0) == -1.0


# ---------------------------------------------------------------------- successive means


def test_rho_of_known_directions() -> None:
    memory = Memory(2)
    means = [(1, 0), (3, 0), (0, 2), (0, -1), (1, -1)]
    seen = [memory.rho(np.array(m, np.float32)) for m in means]
    assert seen[0] is None
    assert seen[1:] == pytest.approx([1.0, 0.0, -1.0, math.sqrt(0.5)])


def test_a_zero_mean_is_not_remembered() -> None:
    memory = Memory(2)
    memory.rho(np.array([1, 1], np.float32))
    assert memory.rho(np.zeros(2, np.float32)) is None
    assert memory.rho(np.array([np.nan, 1], np.float32)) is None
    assert memory.rho(np.array([2, 2], np.float32)) == pytest.approx(1.0)


def test_rho_equals_the_float64_reference() -> None:
    memory, a, b = Memory(30_000), vector(30_000), vector(30_000)
    b += a
    memory.rho(a)
    x, y = a.astype(np.float64), b.astype(np.float64)
    assert memory.rho(b) == pytest.approx(x @ y / np.linalg.norm(x) / np.linalg.norm(y), rel=1e-12)


@pytest.mark.parametrize(("rho", "expected"), [(0.73, 2.04), (0.9, 3.68), (0.95, 4.83), (0.98, 5.93)])
def test_the_effective_step_of_the_usual_setting(rho: float, expected: float) -> None:
    assert effective_step(0.7, 0.9, rho) == pytest.approx(expected, abs=0.01)


def test_the_law_is_the_sum_of_what_momentum_keeps() -> None:
    """Means of which k steps apart have cosine ρ^k: a direction is followed Σ (μρ)^k times."""
    mu, rho = 0.9, 0.8
    assert effective_step(0.7, mu, rho) == pytest.approx(0.7 * sum((mu * rho) ** k for k in range(200)))


# ---------------------------------------------------------------------- outer_lr = "auto"


def test_auto_begins_carefully_and_keeps_the_effective_step_of_a_straight_path() -> None:
    auto, direction = AutoLR(1000, target=0.8, mu=0.9), vector(1000)
    for scale in (1, 2, 0.5, 3):
        lr = auto.step(direction * np.float32(scale))
        assert lr == pytest.approx(0.08) and effective_step(lr, 0.9, 1.0) == pytest.approx(0.8)


def test_auto_averages_what_it_has_seen() -> None:
    """ρ = 0 each time: ρ̂ = 1/(1+n), then it forgets by 1/8."""
    auto, expected = AutoLR(2, target=1.0, mu=0.5), 1.0
    for t in range(14):
        lr = auto.step(np.array([1, 0] if t % 2 else [0, 1], np.float32))
        expected = (1 / (1 + t) if t < 8 else expected * 7 / 8) if t else 1.0
        assert auto.rho_hat == pytest.approx(expected) and lr == pytest.approx(1 - 0.5 * expected)


def test_auto_stays_between_its_ends() -> None:
    auto = AutoLR(50, target=0.7, mu=0.9)
    for _ in range(50):
        assert 0.07 - 1e-6 <= auto.step(vector(50)) <= 0.7 + 1e-6
    back_and_forth = AutoLR(2, target=0.7, mu=0.9)
    for t in range(60):
        lr = back_and_forth.step(np.array([(-1) ** t, 0], np.float32))
    assert lr <= 0.7 and lr == pytest.approx(0.7, rel=1e-2), "a negative ρ counts as 0"


def test_without_momentum_auto_is_the_target() -> None:
    auto = AutoLR(10, target=0.7, mu=0.0)
    assert [auto.step(vector(10)) for _ in range(4)] == [float(np.float32(0.7))] * 4


def test_auto_gives_the_same_bits_to_who_heals() -> None:
    """One replica sees all means; another loads what the first one had, as a snapshot keeps it, and goes on."""
    means = [vector(20_000) + np.float32(0.5) for _ in range(9)]
    first, second = AutoLR(20_000, target=0.7, mu=0.9), AutoLR(20_000, target=0.7, mu=0.9)
    early = [first.step(m) for m in means[:4]]
    second.load({k: np.frombuffer(v.tobytes(), v.dtype) for k, v in first.arrays().items()})
    late = [(first.step(m), second.step(m.copy())) for m in means[4:]]
    assert all(a == b for a, b in late) and len(set(early)) > 1
    assert [v.tobytes() for v in first.arrays().values()] == [v.tobytes() for v in second.arrays().values()]
    assert all(lr == float(np.float32(lr)) for lr in early), "an fp32 number: torch and numpy multiply by the same"


def test_auto_learns_nothing_from_a_zero_mean() -> None:
    auto = AutoLR(3, target=0.7, mu=0.9)
    auto.step(vector(3))
    before = [v.tobytes() for v in auto.arrays().values()]
    auto.step(np.zeros(3, np.float32))
    assert [v.tobytes() for v in auto.arrays().values()] == before


@pytest.mark.parametrize(("target", "mu"), [(0.0, 0.5), (math.nan, 0.5), (0.7, 1.0), (0.7, -0.1)])
def test_settings_that_cannot_be(target: float, mu: float) -> None:
    with pytest.raises(ValueError, match="needs a target above 0"):
        AutoLR(3, target=target, mu=mu)


# ---------------------------------------------------------------------- replicas among themselves


def test_coherence_of_equal_and_of_orthogonal_pseudogradients() -> None:
    eye = [np.eye(4, dtype=np.float32)[i] for i in range(4)]
    assert coherence([1] * 4, [1] * 4, norm(mean_of(eye, [1] * 4))) == pytest.approx(0.5)
    assert pairwise([1] * 4, [1] * 4, norm(mean_of(eye, [1] * 4))) == pytest.approx(0.0, abs=1e-7)
    same = [eye[0]] * 3
    assert coherence([1] * 3, [1] * 3, norm(mean_of(same, [1] * 3))) == 1.0
    assert pairwise([1] * 3, [1] * 3, norm(mean_of(same, [1] * 3))) == pytest.approx(1.0)
    assert pairwise([1], [2], 2.0) is None and coherence([1], [2], 2.0) == 1.0
    assert coherence([1, 1], [0, 0], 0.0) is None


def test_both_equal_the_float64_reference_from_all_pairs() -> None:
    common, weights = vector(5000), [1.0, 0.5, 0.25, 1.0]
    deltas = [common + vector(5000, s) for s in (0.5, 1, 2, 3)]
    norms, mean = [norm(x) for x in deltas], mean_of(deltas, weights)
    wide = [x.astype(np.float64) for x in deltas]
    lengths = [w * n for w, n in zip(weights, norms, strict=True)]
    to_mean = [x @ mean.astype(np.float64) / n / norm(mean) for x, n in zip(wide, norms, strict=True)]
    assert coherence(weights, norms, norm(mean)) == pytest.approx(np.average(to_mean, weights=lengths), rel=1e-6)
    pairs = list(combinations(range(4), 2))
    cosines = [wide[i] @ wide[j] / norms[i] / norms[j] for i, j in pairs]
    reference = np.average(cosines, weights=[lengths[i] * lengths[j] for i, j in pairs])
    assert pairwise(weights, norms, norm(mean)) == pytest.approx(reference, rel=1e-5)


# ---------------------------------------------------------------------- the gate


def test_an_outlier_is_scaled_to_the_limit() -> None:
    assert gate([1.0, 1.0, 1.0, 30.0]) == [1.0, 1.0, 1.0, float(np.float32(0.1))]
    assert gate([1.0, 2.0, 3.0], limit=1.0) == [1.0, 1.0, float(np.float32(2 / 3))]
    assert gate([1.0, 2.0, 2.9]) == [1.0, 1.0, 1.0]


def test_who_cannot_be_judged_is_not_gated() -> None:
    assert gate([]) == [] and gate([5.0]) == [1.0] and gate([1.0, 1e9]) == [1.0, 1.0]
    assert gate([0.0, 0.0, 0.0, 1.0, 1e9]) == [1.0] * 5, "zeros are honest, but no measure"
    assert gate([0.0, 1.0, 1.0, 1.0, 30.0])[-1] == float(np.float32(0.1))


def test_what_is_not_finite_is_not_listed() -> None:
    assert gate([1.0, math.nan, math.inf, 1.0, 1.0]) == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_the_gate_does_not_depend_on_the_order_nor_on_the_unit() -> None:
    norms = [float(x) for x in RNG.lognormal(0, 2, 12)]
    order = RNG.permutation(12)
    factors = gate(norms)
    assert gate([norms[i] for i in order]) == [factors[i] for i in order]
    assert gate([n * 1024 for n in norms]) == factors
    limit = 3.0 * float(np.median(norms))
    assert all(f * n <= limit * (1 + 1e-6) for f, n in zip(factors, norms, strict=True))
    assert all(f == 1.0 for f, n in zip(factors, norms, strict=True) if n <= limit)
    assert all(f == float(np.float32(f)) for f in factors)


def test_a_limit_below_the_median_is_refused() -> None:
    for limit in (0.5, math.nan):
        with pytest.raises(ValueError, match="at least 1"):
            gate([1.0], limit=limit)


# ---------------------------------------------------------------------- no-ops


def kinds(found: Sequence[object]) -> list[str]:
    return [f.kind for f in found]  # type: ignore[attr-defined]


def test_what_a_replica_did_for_nothing() -> None:
    assert kinds(of_replica({"lr": 1e-4, "grad_norm": 1.0}, 4, zero=False)) == []
    assert kinds(of_replica({"lr": 0.0, "grad_norm": 1.0}, 4, zero=True)) == ["zero_lr"]
    assert kinds(of_replica({"lr": 1e-4, "grad_norm": 0.0}, 4, zero=True)) == ["zero_grads"]
    assert kinds(of_replica({"lr": 1e-4, "grad_norm": 1.0}, 4, zero=True)) == ["zero_delta"]
    assert kinds(of_replica({}, 4, zero=True)) == ["zero_delta"]


def test_what_a_commit_did_for_nothing() -> None:
    two = commit(listed("r00"), listed("r01"))
    assert of_commit(two, wanted=2, mean_norm=1.0, lr=0.7) == []
    twins = of_commit(commit(listed("r00", digest="x"), listed("r01", digest="x")), 2, 1.0, 0.7)
    assert kinds(twins) == ["identical"] and "r00 and r01" in twins[0].text
    assert kinds(of_commit(commit(listed("r00")), 3, 1.0, 0.7)) == ["solo"]
    assert of_commit(commit(listed("r00")), wanted=1, mean_norm=1.0, lr=0.7) == []
    assert kinds(of_commit(two, 2, 0.0, 0.0)) == ["cancelled", "zero_outer_lr"]
    zeros = commit(*[listed(s, digest="x", zero=True) for s in ("r00", "r01")])
    assert kinds(of_commit(zeros, 2, 0.0, 0.7)) == ["zero_mean"], "zeros are equal by right"


def test_one_slot_listed_twice_is_still_alone() -> None:
    late = commit(listed("r00", digest="a"), listed("r00", weight=0.5, digest="b"))
    assert kinds(of_commit(late, 2, 1.0, 0.7)) == ["solo"]


# ---------------------------------------------------------------------- step by step


def test_the_tracker_gives_the_numbers_of_each_fragment() -> None:
    tracker, a, b = Tracker([2, 3], mu=0.5), np.array([3, 4], np.float32), np.array([1, 0, 0], np.float32)
    offers = (listed("r00"), listed("r01"))
    first = tracker.step(commit(*offers, t=0), a, 0.7, [5.0, 5.0])
    assert first == {"mean_norm": 5.0, "outer_lr": 0.7, "delta_norm": 5.0, "delta_norm_max": 5.0, "cos_mean": 1.0,
                     "cos_pair": 1.0}  # fmt: skip
    assert "rho" not in tracker.step(commit(*offers, t=1), b, 0.7)
    third = tracker.step(commit(*offers, t=2), a, 0.7)
    assert third["rho"] == pytest.approx(1.0) and third["effective_step"] == pytest.approx(1.4)
    assert tracker.step(commit(*offers, t=3), np.zeros(3, np.float32), 0.7) == {"mean_norm": 0.0, "outer_lr": 0.7}


def test_a_lasting_finding_is_said_a_few_times() -> None:
    tracker, said = Tracker([1], mu=0.5), list[int]()
    solo = of_commit(commit(listed("r00")), 3, 1.0, 0.7)
    for _ in range(101):
        said += [n for _, n in tracker.lasting(solo)]
    assert said == [3, 6, 12, 24, 50, 100]
    assert tracker.lasting([]) == []
    assert [tracker.lasting(solo) for _ in range(2)] == [[], []], "an interruption begins anew"
