"""Generalized Jensen-Shannon divergence between a student and a teacher, token by token.

    s = log softmax(S / T)    t = log softmax(T_ / T)    m = log((1 - β) e^s + β e^t)

    β = 0        KL(teacher ‖ student)      "forward": the student covers all modes of the teacher
    0 < β < 1    β KL(t ‖ m) + (1 - β) KL(s ‖ m)                  On-policy distillation, arXiv 2306.13649, eq. (1)
    β = 1        KL(student ‖ teacher)      "reverse": settles on one mode of the teacher

At β = 0 and 1 the loss jumps: at β = .001 it is ~.001 of its value at β = 0. So a loss weight tuned at β = .5 does not
fit β = 0 or 1. The gradient for a rare but right token vanishes at β = .5 and remains at β = 0.

Not promised: a factor T² (there is none); a detached teacher: run the teacher under no_grad.
"""

import math
import warnings
from typing import Literal

import torch
from torch import Tensor

from inner.losses.chunks import PositionLoss, by_position

IGNORE = -100
Reduction = Literal["batchmean", "mean", "sum", "none"]
REDUCTIONS = ("batchmean", "mean", "sum", "none")


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
    """Compute the divergence of logits (..., V), over positions where `labels` (...) is not -100.

    reduction   batchmean: sum / number of valid positions (without labels: / size of the first axis)
                mean: sum / entries · sum · none: the entries (N, V) that count, without labels (..., V)
    top_k       use only the teacher's k likeliest tokens; renormalise both sides, without a bucket for the rest
    token_clip  cap each vocabulary entry from above before the sum over the vocabulary; the result may then be
                negative (OPSD)
    If no position is valid, the result is 0 on the graph, with a zero gradient. If one side gives a token logit -inf
    and the other does not, log 0 counts as the log of the smallest normal number: no KL becomes infinite.
    """
    check_shapes(student_logits, teacher_logits, labels)
    check_knobs(beta, temperature)
    _check_choices(reduction, top_k, token_clip)
    kept = valid_positions(student_logits, labels)
    if student_logits.numel() == 0 or not bool(kept.any()):
        return zero_on_graph(student_logits)

    def entries(student: Tensor, teacher: Tensor) -> Tensor:
        if top_k is not None and top_k < teacher.size(-1):
            teacher, likeliest = teacher.topk(top_k, dim=-1)
            student = or_uniform(student.gather(-1, likeliest))
        summands = divergence_entries(log_probs(student, temperature), log_probs(teacher, temperature), beta)
        return summands if token_clip is None else summands.clamp(max=token_clip)

    if reduction == "none":
        here = () if labels is None else kept
        return entries(student_logits[here], teacher_logits[here])
    positions = by_position(lambda s, t: entries(s, t).sum(-1), student_logits, teacher_logits, kept)
    return positions.sum() / _reduction_divisor(reduction, student_logits, labels, int(kept.sum()), top_k)


def valid_positions(logits: Tensor, labels: Tensor | None) -> Tensor:
    """Return the bool mask (...) of positions to learn: label is not IGNORE. If `labels` is None: all positions."""
    return torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device) if labels is None else labels != IGNORE


def _reduction_divisor(
    reduction: Reduction, logits: Tensor, labels: Tensor | None, valid: int, top_k: int | None
) -> int:
    if reduction == "sum":
        return 1
    if reduction == "mean":
        return valid * min(logits.size(-1), top_k or logits.size(-1))
    return logits.size(0) if labels is None else valid


def log_probs(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return log softmax over the last axis, in float32 or float64."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return (logits / temperature).log_softmax(-1)


def divergence_entries(s: Tensor, t: Tensor, beta: float) -> Tensor:
    """Return the divergence's terms, one per vocabulary entry. A token that is -inf on both sides gives 0, not NaN."""
    dead = s.isneginf() & t.isneginf()
    s = s.masked_fill(dead, 0.0)
    t = t.masked_fill(dead, 0.0)
    if beta == 0:
        entries = _kl_entries(t, s)
    elif beta == 1:
        entries = _kl_entries(s, t)
    else:
        m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        entries = beta * _kl_entries(t, m) + (1 - beta) * _kl_entries(s, m)
    return entries.masked_fill(dead, 0.0)


def _kl_entries(p: Tensor, q: Tensor) -> Tensor:
    """Return e^p (p - q), with 0 (log 0 - q) = 0."""
    possible = ~p.isneginf()
    return p.exp() * torch.where(
        possible, torch.where(possible, p, 0.0) - torch.where(possible, floor_log_zero(q), 0.0), 0.0
    )


def or_uniform(logits: Tensor) -> Tensor:
    """Replace a row of only -inf by a uniform row, because it has no distribution to renormalise."""
    return torch.where(logits.isneginf().all(-1, keepdim=True), 0.0, logits)


def floor_log_zero(logp: Tensor) -> Tensor:
    """Replace log 0 by the log of the smallest normal number (-87 in float32), so that no KL is infinite."""
    return torch.where(logp.isneginf(), math.log(torch.finfo(logp.dtype).tiny), logp)


def zero_on_graph(logits: Tensor) -> Tensor:
    """Return a 0 that is connected to the graph. With a fresh leaf, parallel workers would have different graphs."""
    return logits.masked_fill(~logits.isfinite(), 0.0).sum() * 0.0


def mean_by_position(loss: PositionLoss, student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of a loss of logits (..., V) over a 0/1 mask (...). An empty mask gives 0, on the graph."""
    if student.shape != teacher.shape or mask.shape != student.shape[:-1]:
        raise ValueError(
            f"student {tuple(student.shape)}, teacher {tuple(teacher.shape)} and mask {tuple(mask.shape)} have "
            "wrong shapes. They must be (..., V), (..., V) and (...)."
        )
    if bool((mask < 0).any()):
        raise ValueError("the mask holds negative numbers: these are labels. Pass labels != -100.")
    if student.numel() == 0 or not bool(mask.bool().any()):
        return zero_on_graph(student)
    return by_position(loss, student, teacher, mask.bool()).mean()


def check_shapes(student: Tensor, teacher: Tensor, labels: Tensor | None) -> None:
    if student.shape != teacher.shape:
        hint = "Pair the k-th token of both by index before you compare them."
        if student.shape[:-1] == teacher.shape[:-1]:
            hint = (
                "Their vocabularies differ: use a teacher with the student's tokenizer, or cut both to the shared ids."
            )
        raise ValueError(
            f"student_logits {tuple(student.shape)} and teacher_logits {tuple(teacher.shape)} differ. {hint}"
        )
    if labels is None:
        return
    if labels.shape != student.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not match the positions {tuple(student.shape[:-1])}.")
    text = (
        "labels look like a 0/1 mask, and every position of a mask counts as valid (only -100 is ignored). Pass "
        "torch.where(mask.bool(), 0, -100)."
    )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(text)
    if labels.unique().tolist() == [0, 1]:  # 0 and 1 may also be ids of tokens: only warn
        warnings.warn(text, stacklevel=3)


def check_knobs(beta: float, temperature: float) -> None:
    if not 0 <= beta <= 1:
        raise ValueError(f"beta = {beta} is outside [0, 1].")
    if not temperature > 0:
        raise ValueError(f"temperature = {temperature} must be greater than 0.")


def _check_choices(reduction: str, top_k: int | None, token_clip: float | None) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction = {reduction!r} is not known. One of: {', '.join(REDUCTIONS)}.")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} must be 1 or more; None means the whole vocabulary.")
    if token_clip is not None and not token_clip > 0:
        raise ValueError(f"token_clip = {token_clip} must be greater than 0; None means no clip.")
