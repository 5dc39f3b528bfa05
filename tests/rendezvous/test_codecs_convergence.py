"""A toy DiLoCo loop: what a residual is worth.

    loss(θ) = |θ − θ*|² / |θ*|²      gradient + noise, loud in one coordinate of sixteen, quiet in the others

Loud noise averages out over steps and workers, and what is quiet adds up; but in a single pseudogradient the loud
coordinates are the largest.  So top-k alone sends noise (Streaming DiLoCo, arXiv 2501.18512, found it bad), and
top-k with error feedback sends all (SparseLoCo, arXiv 2508.15706).

Not promised: that a language model behaves so; that is measured on the supervised loop.
"""

from functools import cache

import numpy as np
import pytest
import torch

from rendezvous.codecs import get_codec

N, P, OUTER, H, LR = 4, 8192, 400, 4, 0.02


@cache
def train(name: str, feedback: bool, seed: int = 0) -> tuple[float, int]:
    """-> loss, as a share of the first loss (mean of the last 20 outer steps), and bytes sent up."""
    g, c = torch.Generator().manual_seed(seed), get_codec(name)
    noise = torch.where(torch.arange(P) % 16 == 0, 2.0, 0.1)
    best, theta, sent, losses = torch.randn(P, generator=g), torch.zeros(P), 0, list[float]()
    residuals, ages = torch.zeros(N, P), torch.zeros(N, P, dtype=torch.uint8)
    out = torch.zeros(c.max_body_size(P), dtype=torch.uint8)
    for _ in range(OUTER):
        total = torch.zeros(P)
        for i in range(N):
            local = theta.clone()
            for _ in range(H):
                local -= LR * (local - best + noise * torch.randn(P, generator=g))
            waiting = {"residual": residuals[i], "age": ages[i]} if feedback else {}
            sum(c.encode_each(theta - local, out, [(0, P)], **waiting))
            c.accumulate(out, 1.0, total, i == 0)
            sent += out.numel()
        theta -= total / N  # outer SGD, learning rate 1, as SparseLoCo
        losses.append(float((theta - best).square().sum() / best.square().sum()))
    return float(np.mean(losses[-20:])), sent


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [pytest.param("bf16", marks=pytest.mark.slow), "int8", "int4"])
def test_dense_codecs_train_like_fp32(name: str) -> None:
    assert train(name, True)[0] == pytest.approx(train("fp32", False)[0], rel=0.05)


@pytest.mark.slow
def test_topk_with_feedback_reaches_the_loss_of_fp32_and_without_does_not() -> None:
    (exact, exact_bytes), (fed, fed_bytes), (unfed, _) = train("fp32", False), train("topk", True), train("topk", False)
    assert exact < 0.002
    assert fed - exact < 0.002, "of what there was to learn; giving back amplifies the loud noise (decision 012)"
    assert unfed > 5 * exact and unfed > 2.5 * fed
    assert exact_bytes / fed_bytes > 84


def test_topk_sends_fifty_times_less_up_and_down() -> None:
    """fp32 sharded: up S + S/N, down 2(N−1)/N·S.   topk direct: up S, down (N−1)·S."""
    fp32 = get_codec("fp32").max_body_size(1 << 26) * (1 + 1 / N + 2 * (N - 1) / N)
    topk = get_codec("topk").max_body_size(1 << 26) * (1 + N - 1)
    assert fp32 / topk > 57
