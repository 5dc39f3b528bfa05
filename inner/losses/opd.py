"""Distillation by the teacher's certainty: forward KL where the teacher is unsure, reverse KL where it is sure.

    H = -Σ_v p_T log p_T        per token, in nats

    soft gate   w = clamp(H / h_max, 0, 1)     L = mean_tok [ w KL(T ‖ S) + (1 - w) KL(S ‖ T) ]
    hard gate   g = 1[H > threshold]           L = mean_tok [ KL(S ‖ T) + g KL(T ‖ S) ]

The hard gate is Entropy-Aware On-Policy Distillation (EOPD, arXiv 2603.07079): reverse KL everywhere, *plus* forward KL
if the teacher's entropy is high. The soft gate is a convex mix, which is often called EOPD, too.

The soft gate's default h_max is log V. For a real vocabulary log V is so large (11.9 at 150k; a teacher's entropy is
mostly below 1 nat) that w is near 0. A useful h_max is 1 to 2.

Not promised: EOPD's numbers. EOPD's forward KL may use only the teacher's likeliest tokens; ours uses all tokens.
"""

import math

import torch
from torch import Tensor

from inner.losses.divergence import divergence_entries, log_probs, mean_by_position


def teacher_entropy(t: Tensor) -> Tensor:
    """Return -Σ_v e^t t in nats, from log-probs (..., V) -> (...)."""
    return -(t.exp() * torch.where(t.isneginf(), 0.0, t)).sum(-1)


def entropy_aware_opd_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, h_max: float | None = None
) -> Tensor:
    """Apply the soft gate. Logits (..., V), 0/1 mask (...) of positions (already shifted) -> mean over the mask.

    An empty mask gives 0, on the graph."""
    h_max = math.log(student_logits.size(-1)) if h_max is None else h_max
    if not h_max > 0:
        raise ValueError(f"h_max = {h_max} must be greater than 0.")

    def gated(student: Tensor, teacher: Tensor) -> Tensor:
        forward, reverse, entropy = _both_ways(student, teacher)
        w = (entropy / h_max).clamp(0, 1)
        return w * forward + (1 - w) * reverse

    return mean_by_position(gated, student_logits, teacher_logits, mask)


def eopd_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Apply EOPD's hard gate. Logits (..., V), 0/1 mask (...) of positions (already shifted) -> mean over the mask.

    threshold: the teacher's entropy in nats. Choose a high quantile of your teacher's entropies.
    An empty mask gives 0, on the graph."""
    if not threshold >= 0:
        raise ValueError(f"threshold = {threshold} must be 0 or more (nats).")

    def gated(student: Tensor, teacher: Tensor) -> Tensor:
        forward, reverse, entropy = _both_ways(student, teacher)
        return reverse + torch.where(entropy > threshold, forward, 0.0)

    return mean_by_position(gated, student_logits, teacher_logits, mask)


def _both_ways(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return KL(T ‖ S), KL(S ‖ T) and the teacher's entropy of logits (n, V): (n,) each."""
    s = log_probs(student)
    t = log_probs(teacher)
    return divergence_entries(s, t, 0.0).sum(-1), divergence_entries(s, t, 1.0).sum(-1), teacher_entropy(t)
