"""Distillation with a soft entropy gate: cover the teacher where it is unsure, copy it where it is sure.

    w = clamp(H(teacher) / h_max, 0, 1)      L = mean_tok [ w KL(teacher ‖ student) + (1 - w) KL(student ‖ teacher) ]

Named after Entropy-Aware On-Policy Distillation (arXiv 2603.07079), whose gate is another one: reverse KL everywhere,
plus forward KL above an entropy threshold. This is the convex, soft form. The default h_max = log V is so large for a
real vocabulary (11.9 at 150k; teachers are mostly below 1 nat) that w is near 0: a useful h_max is 1 to 2.
"""

import math

import torch
from torch import Tensor

from inner.losses.divergence import divergence_entries, log_probs, zero_on_graph


def teacher_entropy(t: Tensor) -> Tensor:
    """-Σ_v e^t t in nats, from log-probs (..., V) -> (...)."""
    return -(t.exp() * torch.where(t.isneginf(), 0.0, t)).sum(-1)


def entropy_aware_opd_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, h_max: float | None = None
) -> Tensor:
    """Logits (..., V), 0/1 mask (...) over positions (already shifted). An empty mask gives 0, on the graph."""
    if student_logits.shape != teacher_logits.shape or mask.shape != student_logits.shape[:-1]:
        raise ValueError(
            f"student {tuple(student_logits.shape)}, teacher {tuple(teacher_logits.shape)} and mask "
            f"{tuple(mask.shape)} do not fit: (..., V), (..., V), (...)."
        )
    h_max = math.log(student_logits.size(-1)) if h_max is None else h_max
    if not h_max > 0:
        raise ValueError(f"h_max = {h_max} must be greater than 0.")
    kept = mask.bool()
    if not bool(kept.any()):
        return zero_on_graph(student_logits)
    s, t = log_probs(student_logits[kept]), log_probs(teacher_logits[kept])
    w = (teacher_entropy(t) / h_max).clamp(0, 1)
    forward, reverse = divergence_entries(s, t, 0.0).sum(-1), divergence_entries(s, t, 1.0).sum(-1)
    return (w * forward + (1 - w) * reverse).mean()
