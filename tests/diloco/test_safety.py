"""Numbers about outer steps: reference, bits, property, closed form; and what is said when a step does nothing."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

from diloco.outer.auto_lr import AutoLR
from diloco.outer.optimizer import Nesterov, OuterState, nesterov
from diloco.outer.safety import (
    Finding,
    Memory,
    Tracker,
    commit_findings,
    cosine,
    dot,
    effective_step,
    moved_share,
    norm,
    pairwise_cosine,
    replica_findings,
)
from rendezvous.agreement.rules import Rules
from rendezvous.errors import BadDelta
from rendezvous.records.records import Commit, Listed
from rendezvous.records.wire import approximate_norm, checked_norm, evenly_sampled

RNG = np.random.default_rng(11)


def vector(n: int, scale: float = 1.0) -> np.ndarray:
    return RNG.standard_normal(n, dtype=np.float32) * np.float32(scale)


def listed(slot: str, weight: float = 1.0, digest: str = "", zero: bool = False, **more: float) -> Listed:
    return Listed(0, slot, 1, "n", "blob", 4, digest or slot, 1, weight, zero, **more)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("n", [1, 65_536, 131_071, 131_072, 1_000_003, 50_000_000])
def test_a_sample_is_small_and_visits_every_column(n: int) -> None:
    places = evenly_sampled(np.broadcast_to(np.arange(1), n))
    assert places.size <= 1 << 17 and (n >= 1 << 17 or places.size == n)
    spacing = (n >> 16) | 1
    assert {i * spacing % 1024 for i in range(places.size)} == set(range(min(n, 1024)))


def test_rho_of_a_large_mean_is_estimated_well() -> None:
    n, memory = 3_000_000, Memory(3_000_000)
    a, b = vector(n), vector(n)
    memory.rho(a)
    assert memory.mean.nbytes < 1 << 19
    assert memory.rho(np.asarray(0.8 * a + 0.6 * b, np.float32)) == pytest.approx(0.8, abs=0.02)


def like_before(rho: float, elements: int, rounds: int) -> Iterator[torch.Tensor]:
    """Means of length 1 of which k rounds apart have cosine ρ^k: AR(1)."""
    mean = RNG.standard_normal(elements)
    for _ in range(rounds):
        yield torch.from_numpy(np.asarray(mean / np.linalg.norm(mean), np.float32))
        mean = rho * mean + math.sqrt(1 - rho * rho) * RNG.standard_normal(elements)


def along(mean: torch.Tensor, momentum: torch.Tensor, lr: float, mu: float) -> float:
    """How far the product's own step goes along this mean, in units of it.  In float64 but for the step itself."""
    theta = torch.zeros_like(mean)
    nesterov(theta, momentum, mean, lr=lr, mu=mu)
    return -float(theta.double() @ mean.double()) / float(mean.double() @ mean.double())


SETTINGS = [(0.5, 0.0), (0.5, 0.5), (0.5, 0.9), (0.9, 0.25), (0.9, 0.56), (0.9, 0.9), (0.9, -0.5), (0.0, 0.7)]


@pytest.mark.parametrize(("mu", "rho"), SETTINGS)
def test_the_effective_step_is_what_nesterovs_recursion_does(mu: float, rho: float) -> None:
    momentum, gone = torch.zeros(4000), []
    for mean in like_before(rho, 4000, 350):
        gone.append(along(mean, momentum, 0.7, mu))
    assert effective_step(0.7, mu, rho) == pytest.approx(np.mean(gone[80:]), rel=0.01)


@pytest.mark.parametrize(("mu", "rho"), SETTINGS)
def test_the_first_steps_are_shorter_as_the_recursion_is(mu: float, rho: float) -> None:
    momentum = torch.zeros(400_000)
    for n, mean in enumerate(like_before(rho, 400_000, 6), 1):
        assert effective_step(1.0, mu, rho, n) == pytest.approx(along(mean, momentum, 1.0, mu), rel=0.01), n
    assert effective_step(1.0, mu, rho, 500) == effective_step(1.0, mu, rho)


# ---------------------------------------------------------------------- lr = "auto"


@pytest.mark.parametrize(
    ("mu", "rho"),
    [  # by default the most that momentum adds
        pytest.param(mu, rho, marks=() if (mu, rho) == (0.9, 0.9) else pytest.mark.slow)
        for mu, rho in SETTINGS
        if rho >= 0
    ],
)
def test_auto_steps_as_far_as_a_plain_average_whatever_momentum_adds(mu: float, rho: float) -> None:
    """Measured on the recursion with AutoLR inside."""
    auto, momentum, gone = AutoLR(4000, mu=mu), torch.zeros(4000), []
    for mean in like_before(rho, 4000, 350):
        gone.append(along(mean, momentum, auto.step(mean.numpy()), mu))
    assert np.mean(gone[80:]) == pytest.approx(1.0, rel=0.02)
    assert max(gone) < 1.15, "and never far beyond it, not at first either"


def test_auto_begins_carefully_and_keeps_the_effective_step_of_a_straight_path() -> None:
    auto, direction, momentum = AutoLR(1000, target=0.8, mu=0.9), vector(1000), torch.zeros(1000)
    for scale in (1, 2, 0.5, 3):
        assert auto.step(direction * np.float32(scale)) == pytest.approx(0.08)
    for _ in range(200):
        gone = along(torch.from_numpy(direction), momentum, auto.lr, 0.9)
    assert gone == pytest.approx(0.8, rel=1e-4)


def test_auto_averages_what_it_has_seen() -> None:
    """ρ = 0 each time: ρ̂ = 1/(1+n), then it forgets by 1/8."""
    auto, expected = AutoLR(2, target=1.0, mu=0.5), 1.0
    for t in range(14):
        lr = auto.step(np.array([1, 0] if t % 2 else [0, 1], np.float32))
        expected = (1 / (1 + t) if t < 8 else expected * 7 / 8) if t else 1.0
        assert auto.rho_hat == pytest.approx(expected) and lr == pytest.approx(1 / (1 + 0.5 / (1 - 0.5 * expected)))


def test_auto_stays_between_its_ends() -> None:
    """target·(1 − μ), where all means are parallel, and target/(1 + μ), where each is news."""
    auto = AutoLR(50, target=0.7, mu=0.9)
    for _ in range(50):
        assert 0.07 - 1e-6 <= auto.step(vector(50)) <= 0.7 / 1.9 + 1e-6
    back_and_forth = AutoLR(2, target=0.7, mu=0.9)
    for t in range(60):
        lr = back_and_forth.step(np.array([(-1) ** t, 0], np.float32))
    assert lr <= 0.7 / 1.9 and lr == pytest.approx(0.7 / 1.9, rel=1e-2), "a negative ρ counts as 0"


def test_without_momentum_auto_is_the_target() -> None:
    auto = AutoLR(10, target=0.7, mu=0.0)
    assert [auto.step(vector(10)) for _ in range(4)] == [float(np.float32(0.7))] * 4


def state(sizes: Sequence[int] = (300_000, 7)) -> OuterState:
    thetas = [nn.Parameter(torch.zeros(n)) for n in sizes]
    return OuterState([p.data for p in thetas], [Nesterov(p, lr="auto", momentum=0.9) for p in thetas])


def test_auto_gives_the_same_bits_to_who_heals() -> None:
    """One replica sees all means; another loads what the first one had, as a snapshot keeps it, and goes on."""
    means = [[np.asarray(vector(n) + np.float32(0.5)) for n in (300_000, 7)] for _ in range(9)]
    first, second = state(), state()
    for pair in means[:4]:
        for f, mean in enumerate(pair):
            first.apply(f, mean.copy())
    second.load({k: np.frombuffer(v.tobytes(), v.dtype) for k, v in first.all_arrays().items()})
    for pair in means[4:]:
        for f, mean in enumerate(pair):
            first.apply(f, mean.copy())
            second.apply(f, mean.copy())
        lrs = [[o.param_groups[0]["lr"] for o in s.optimizers] for s in (first, second)]
        assert lrs[0] == lrs[1] and all(lr == float(np.float32(lr)) for lr in lrs[0])
    assert first.digest() == second.digest()


def test_what_auto_has_learned_is_in_the_digest() -> None:
    """Else a replica with another memory would take another step from the same digest."""
    a, b = state(), state()
    b.optimizers[0].auto.learned[0] = 0.5  # type: ignore[union-attr]
    assert a.digest() != b.digest() and list(a.arrays(0)) == ["theta.0", "momentum.0", "last_mean.0", "rho.0"]


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


def test_the_cosine_between_replicas_of_known_ones() -> None:
    eye = [np.eye(4, dtype=np.float32)[i] for i in range(4)]
    assert pairwise_cosine([1] * 4, [1] * 4, norm(mean_of(eye, [1] * 4))) == pytest.approx(0.0, abs=1e-7)
    assert pairwise_cosine([1] * 3, [1] * 3, norm(mean_of([eye[0]] * 3, [1] * 3))) == pytest.approx(1.0)
    opposite = mean_of([eye[0], -eye[0]], [1, 1])
    assert pairwise_cosine([1, 1], [1, 1], norm(opposite)) == pytest.approx(-1.0)
    assert pairwise_cosine([1], [2], 2.0) is None and pairwise_cosine([1, 1], [0, 0], 0.0) is None


def test_it_equals_the_float64_reference_from_all_pairs() -> None:
    common, weights = vector(5000), [1.0, 0.5, 0.25, 1.0]
    deltas = [common + vector(5000, s) for s in (0.5, 1, 2, 3)]
    norms, mean = [norm(x) for x in deltas], mean_of(deltas, weights)
    wide = [x.astype(np.float64) for x in deltas]
    lengths = [w * n for w, n in zip(weights, norms, strict=True)]
    pairs = list(combinations(range(4), 2))
    cosines = [wide[i] @ wide[j] / norms[i] / norms[j] for i, j in pairs]
    reference = np.average(cosines, weights=[lengths[i] * lengths[j] for i, j in pairs])
    assert pairwise_cosine(weights, norms, norm(mean)) == pytest.approx(reference, rel=1e-4)


# ---------------------------------------------------------------------- no-ops


def kinds(found: Sequence[Finding]) -> list[str]:
    return [f.kind for f in found]


@pytest.mark.parametrize(
    ("stats", "zero", "small", "said"),
    [({"lr": 1e-4, "grad_norm": 1.0, "moved": 1.0}, False, False, []),
     ({"lr": 0.0, "grad_norm": 1.0}, True, False, ["zero_lr"]),
     ({"lr": 1e-4, "grad_norm": 0.0}, True, False, ["zero_grads"]),
     ({"lr": 1e-4, "grad_norm": 1.0}, True, False, ["zero_delta"]),
     ({}, True, False, ["zero_delta"]),
     ({"lr": 1e-7, "grad_norm": 1.0, "moved": 2e-4}, False, True, ["bf16_stuck"]),
     ({"lr": 1e-7, "grad_norm": 1.0, "moved": 0.0}, True, True, ["bf16_stuck"]),
     ({"lr": 1e-7, "grad_norm": 1.0, "moved": 0.02}, False, True, []),  # sparse, as RL in bf16 is
     ({"lr": 1e-7, "grad_norm": 1.0, "moved": 2e-4}, False, False, [])],
)  # fmt: skip
def test_what_a_replica_did_for_nothing(stats: Mapping[str, float], zero: bool, small: bool, said: list[str]) -> None:
    assert kinds(replica_findings(stats, 4, zero, small)) == said


def test_the_share_that_moved() -> None:
    delta = np.zeros(200_000, np.float32)
    assert moved_share(delta) == 0.0 and moved_share(np.zeros(0, np.float32)) == 0.0
    delta[::2] = 1.0
    assert moved_share(delta) == pytest.approx(0.5, abs=0.01)


def about(c: Commit, wanted: int = 2, cos: float | None = 0.5, **settings: object) -> list[Finding]:
    return commit_findings(c, wanted, cos, Rules(**settings))  # type: ignore[arg-type]


def test_replicas_that_train_on_the_same_are_found() -> None:
    assert about(commit(listed("r00"), listed("r01"))) == []
    (same,) = about(commit(listed("r00", digest="x"), listed("r01", digest="x"), listed("r02")))
    assert same.kind == "identical" and "r00 and r01" in same.text and "same seed" in same.text
    near = commit(listed("r00", norm=1.0), listed("r01", norm=1.00001))
    assert kinds(about(near, cos=1.0)) == ["identical"], "another GPU rounds otherwise"
    assert about(near, cos=0.99) == []
    assert about(commit(listed("r00", norm=1.0), listed("r01", norm=3.0)), cos=1.0) == []
    assert about(commit(*[listed(s, digest="x", zero=True) for s in ("r00", "r01")])) == [], "zeros are equal by right"


def test_a_gated_one_a_lonely_one_and_missing_samples_are_told() -> None:
    long = commit(listed("r00"), listed("r01"), listed("r02", norm=50.0, factor=0.02))
    (told,) = about(long)
    assert told.kind == "gated" and "r02's" in told.text and "50 times a typical one" in told.text
    (alone,) = about(commit(listed("r00")), wanted=3)
    assert alone.kind == "solo" and "r00 alone, of 3 replicas" in alone.text
    assert about(commit(listed("r00")), wanted=1) == [], "then it was said at the start"
    half = commit(listed("r00", samples=8.0), listed("r01"))
    (silent,) = about(half, weighting="samples")
    assert silent.kind == "no_samples" and silent.text.startswith("r01 did not send a number")
    assert about(half) == []


# ---------------------------------------------------------------------- step by step


def test_the_tracker_gives_the_numbers_of_each_fragment() -> None:
    tracker, a, b = Tracker([2, 3], 0.5, Rules(2, 2)), np.array([3, 4], np.float32), np.array([1, 0, 0], np.float32)
    offers = [listed("r00", norm=5.0), listed("r01", norm=5.0)]

    def step(t: int, mean: np.ndarray, *of: Listed) -> dict[str, float]:
        tracker.mean(commit(*of, t=t), mean)
        return tracker.step(0.7)

    assert step(0, a, *offers) == {"mean_norm": 5.0, "outer_lr": 0.7, "cos_pair": 1.0}
    assert step(1, b, offers[0]) == {"mean_norm": 1.0, "outer_lr": 0.7}
    third = step(2, a, *offers)
    assert third["rho"] == pytest.approx(1.0) and third["effective_step"] == pytest.approx(0.7 * (1 + 0.5 + 0.25))
    assert step(3, np.zeros(3, np.float32), offers[0]) == {"mean_norm": 0.0, "outer_lr": 0.7}
    assert "rho" not in step(6, a, *offers), "step 4 was caught up with: these two are not successive"
    assert "rho" in step(8, a, *offers)


def test_norms_say_nothing_about_what_top_k_sends() -> None:
    tracker = Tracker([2], 0.5, Rules(codec="topk"))
    tracker.mean(commit(listed("r00", norm=5.0), listed("r01", norm=5.0)), np.array([3, 4], np.float32))
    assert "cos_pair" not in tracker.step(0.7)


def test_a_pseudogradient_that_was_sent_before_is_found() -> None:
    tracker, said = Tracker([1, 1], 0.5, Rules(2, 2)), []
    for t, digest in enumerate(["a", "b", "c", "b", "c", "d"]):  # fragments 0 1 0 1 0 1
        fresh = Listed(t, "r01", 1, "n", "blob", 4, digest, 1, 1.0)
        said.append(kinds([f for f, _ in tracker.findings(commit(fresh, t=t), 1, [])]))
    assert said == [[], [], [], ["repeated"], [], []], "the second time it goes on, and is not said again"


def test_a_lasting_finding_is_said_a_few_times() -> None:
    tracker, said = Tracker([1], 0.5, Rules()), list[int]()
    lasting, at_once = Finding("zero_lr", "…"), Finding("solo", "…", 1)
    for _ in range(101):
        said += [n for f, n in tracker.lasting_findings([lasting]) if f is lasting]
    assert said == [3, 6, 12, 24, 50, 100]
    assert tracker.lasting_findings([]) == []
    assert [tracker.lasting_findings([lasting]) for _ in range(2)] == [[], []], "an interruption begins anew"
    assert [n for _, n in tracker.lasting_findings([at_once])] == [1]


# ---------------------------------------------------------------------- what is absurd is not even offered


def test_a_length_is_estimated_from_a_sample() -> None:
    x = vector(3_000_000, 0.02)
    assert approximate_norm(x) == pytest.approx(float(np.linalg.norm(x)), rel=0.02)
    assert approximate_norm(x[:1000]) == pytest.approx(float(np.linalg.norm(x[:1000])))
    assert approximate_norm(np.zeros(0, np.float32)) == 0.0


def test_a_pseudogradient_of_1e30_is_refused_by_who_made_it() -> None:
    blown, short = np.full(100, 1e30, np.float32), np.full(100, 0.2, np.float32)
    with pytest.raises(BadDelta, match=r"1\.0e\+31 long and θ only 2\.0e\+00.* blown up"):
        checked_norm(blown, approximate_norm(short))
    assert checked_norm(blown) == pytest.approx(1e31), "nothing to compare with"
    assert (
        checked_norm(vector(100), approximate_norm(short)) > 0
        and checked_norm(np.zeros(100, np.float32), approximate_norm(short)) == 0
    )
