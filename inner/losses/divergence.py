"""Generalized Jensen-Shannon divergence between a student and a teacher, token by token.

    s = log softmax(S / T)    t = log softmax(T_ / T)    m = log((1 - β) e^s + β e^t)

    β = 0        KL(teacher ‖ student)      "forward": covers what the teacher does
    0 < β < 1    β KL(t ‖ m) + (1 - β) KL(s ‖ m)                  On-policy distillation, arXiv 2306.13649, eq. (1)
    β = 1        KL(student ‖ teacher)      "reverse": settles on one thing the teacher does

The ends are jumps, not limits: at β = .001 the loss is ~.001 of its value at β = 0, so a weight tuned at .5 does not
carry over to 0 or 1. Gradients for rare right tokens vanish at β = .5 and survive at β = 0.

Not promised: a T² factor (there is none), and no detach: run the teacher under no_grad.
"""

import math
from typing import Literal

import torch
from torch import Tensor

IGNORE = -100
Reduction = Literal["batchmean", "mean", "sum", "none"]


def generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: Reduction = "batchmean",
    top_k: int | None = None,
    token_clip: float | None = None,
) -> Tensor:
    """Divergence of logits (..., V), over positions where `labels` (...) is not -100.

    reduction   batchmean: sum / number of valid positions (without labels: / size of the first axis)
                mean: sum / entries · sum · none: the kept entries
    top_k       only the teacher's k likeliest tokens, both sides renormalised, no tail
    token_clip  each vocabulary entry is capped before the sum over the vocabulary, on the upper side only, so the
                result may be negative (OPSD)
    No valid position gives 0, with a zero gradient that is still on the graph.
    """
    _check(student_logits, teacher_logits, labels, beta, temperature)
    if labels is not None:
        student_logits, teacher_logits = (
            student_logits[labels != IGNORE],
            teacher_logits[labels != IGNORE],
        )
    if student_logits.numel() == 0:
        return zero_on_graph(student_logits)
    if top_k is not None and top_k < teacher_logits.size(-1):
        teacher_logits, kept = teacher_logits.topk(top_k, dim=-1)
        student_logits = student_logits.gather(-1, kept)
    entries = divergence_entries(log_probs(student_logits, temperature), log_probs(teacher_logits, temperature), beta)
    if token_clip is not None:
        entries = entries.clamp(max=token_clip)
    return _reduce(entries, reduction)


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax over the last axis, in float32 or better."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits / temperature).log_softmax(-1)


def divergence_entries(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """The summands, one per vocabulary entry. A token that both rule out (-inf) contributes 0, not NaN."""
    dead = s.isneginf() & t.isneginf()
    s, t = s.masked_fill(dead, 0.0), t.masked_fill(dead, 0.0)
    if beta == 0:
        entries = _kl_entries(t, s)
    elif beta == 1:
        entries = _kl_entries(s, t)
    else:
        m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        entries = beta * _kl_entries(t, m) + (1 - beta) * _kl_entries(s, m)
    return entries.masked_fill(dead, 0.0)


def _kl_entries(p: Tensor, q: Tensor) -> Tensor:
    """e^p (p - q), with 0 (log 0 - q) = 0."""
    possible = ~p.isneginf()
    return p.exp() * torch.where(possible, torch.where(possible, p, 0.0) - torch.where(possible, q, 0.0), 0.0)


def zero_on_graph(logits: Tensor) -> Tensor:
    """0 that backward() can reach: a fresh leaf would let parallel workers disagree about the graph."""
    return logits.masked_fill(~logits.isfinite(), 0.0).sum() * 0.0


def _reduce(entries: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return entries
    if reduction == "mean":
        return entries.mean()
    return entries.sum() / entries.size(0) if reduction == "batchmean" else entries.sum()


def _check(student: Tensor, teacher: Tensor, labels: Tensor | None, beta: float, temperature: float) -> None:
    if student.shape != teacher.shape:
        raise ValueError(
            f"student_logits {tuple(student.shape)} and teacher_logits {tuple(teacher.shape)} differ. Pair the k-th "
            "token of both by index before you compare them."
        )
    if not 0 <= beta <= 1:
        raise ValueError(f"beta = {beta} is outside [0, 1].")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be greater than 0.")
    if labels is None:
        return
    if labels.shape != student.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not match the positions {tuple(student.shape[:-1])}.")
    if labels.numel() and (labels.dtype == torch.bool or bool(((labels == 0) | (labels == 1)).all())):
        raise ValueError(
            "labels look like a 0/1 mask, and every position of a mask counts as valid (only -100 is ignored). Pass "
            "torch.where(mask.bool(), 0, -100)."
        )
