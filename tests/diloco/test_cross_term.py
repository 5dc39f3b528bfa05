"""‖mean(BA) − mean(B)·mean(A)‖ / ‖mean(BA)‖ of one layer, against dense matrices."""

import numpy as np
import pytest

from diloco.outer.cross_term import FactorPair, cross_term, first_pair, trains_only_b

RNG = np.random.default_rng(7)


def factors(n: int = 3, r: int = 4, inside: int = 30, out: int = 20) -> tuple[np.ndarray, np.ndarray, list[float]]:
    a = RNG.standard_normal((n, r, inside)).astype(np.float32)
    b = RNG.standard_normal((n, out, r)).astype(np.float32)
    return a, b, [0.5 + i for i in range(n)]


def dense(a: np.ndarray, b: np.ndarray, weights: list[float]) -> float:
    w = np.array(weights) / sum(weights)
    a, b = a.astype(np.float64), b.astype(np.float64)
    mean = sum(x * (p @ q) for x, p, q in zip(w, b, a, strict=True))
    return float(np.linalg.norm(mean - np.tensordot(w, b, 1) @ np.tensordot(w, a, 1)) / np.linalg.norm(mean))


def test_it_is_the_formula() -> None:
    a, b, weights = factors()
    assert cross_term(a, b, weights) == pytest.approx(dense(a, b, weights), rel=1e-10)
    assert cross_term(a, b, [7 * w for w in weights]) == pytest.approx(dense(a, b, weights), rel=1e-10)


def test_it_is_zero_where_one_factor_is_the_same_everywhere() -> None:
    a, b, weights = factors()
    assert cross_term(np.repeat(a[:1], 3, 0), b, [1.0, 1.0, 1.0]) == pytest.approx(0, abs=1e-7)
    assert cross_term(a[:1], b[:1], weights[:1]) == 0.0, "one replica alone"


def test_it_is_of_second_order() -> None:
    """Halved steps give a quarter."""
    a, b, weights = factors()
    near = [cross_term(a[:1] + e * a, b[:1] + e * b, weights) or 0.0 for e in (1e-3, 5e-4)]
    assert near[0] / near[1] == pytest.approx(4, rel=0.02)


def test_without_a_product_there_is_no_number() -> None:
    a, b, weights = factors()
    assert cross_term(a, 0 * b, weights) is None
    assert cross_term(a, b * np.float32(np.inf), weights) is None


def test_the_first_layer_with_both_factors_is_found() -> None:
    layout = [
        ("head.weight", (5,)), ("x.q.lora_A.default.weight", (2, 3)), ("x.q.lora_B.default.weight", (4, 2)),
        ("x.v.lora_A.default.weight", (2, 3)), ("x.v.lora_B.default.weight", (4, 2)),
    ]  # fmt: skip
    pair = first_pair(layout)
    assert pair == FactorPair((2, 3), (4, 2), 5) and pair.stop == 19
    a, b = pair.split(np.arange(28).reshape(2, 14))
    assert a[1].tolist() == [[14, 15, 16], [17, 18, 19]] and b[0].tolist() == [[6, 7], [8, 9], [10, 11], [12, 13]]
    assert first_pair(layout[:2]) is None and first_pair([("w", (3, 3))]) is None
    assert trains_only_b(["x.q.lora_B.default.weight"]) and not trains_only_b([n for n, _ in layout])
    assert not trains_only_b(["w"])
