"""Self-distillation policy optimization: the policy sees the outcome of its attempt, and then teaches itself.

    teacher   π(· | x, f, y_<t)     x the prompt, f feedback or a sibling's success, y the whole response, no gradient
    student   π(· | x, y_<t)

    L = mean_tok  ρ_t · D( student_t ‖ teacher_t )       ρ_t = min(π(y_t) / π_old(y_t), is_clip), no gradient

    D uses the student's top_k tokens with their true probabilities, and one bucket for all others:
    α = 0 KL(T ‖ S) · 0 < α < 1 generalized JSD · α = 1 KL(S ‖ T)

    Hübotter et al., Reinforcement Learning via Self-Distillation, eq. (1) (α = 1, no top_k), and lasgroup/SDPO's
    compute_self_distillation_loss. The defaults here are the defaults of that function.

The caller chooses the teacher that makes `teacher_logits`: an average of the weights (the authors' rate: .05 or .01)
or the first weights. The live model is unstable as its own teacher. This loss replaces the policy gradient.

Not promised: the teacher's prompt, or the choice of responses to distil: label the tokens of other responses -100.
"""

import torch
from torch import Tensor

from inner.losses.chunks import by_position
from inner.losses.divergence import (
    check_knobs,
    check_shapes,
    divergence_entries,
    log_probs,
    or_uniform,
    valid_positions,
    zero_on_graph,
)

FULL = -1e-7  # log of the kept tokens' largest allowed mass, so that the bucket's log-prob is finite


def sdpo_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    old_logprobs: Tensor | None = None,
    alpha: float = 0.5,
    top_k: int | None = 100,
    add_tail: bool = True,
    is_clip: float | None = 2.0,
    temperature: float = 1.0,
    divisor: float | None = None,
    sampling_temperature: float = 1.0,
) -> Tensor:
    """Return the mean over the positions whose label is not -100, a scalar. Logits (..., V), labels (...).

    labels        the sampled tokens, already shifted (the logits at a position predict its label)
    old_logprobs  (...) log π_old of these tokens at sampling; None: on-policy, ρ = 1
    top_k         None: the whole vocabulary.   add_tail=False: no bucket; renormalise over the kept tokens
    divisor       replaces the number of positions as the divisor, if they are a part of a larger batch
    temperature   used in D.   sampling_temperature: used in log π_old, and so in π of ρ
    If no position is valid, the result is 0 on the graph, with a zero gradient.
    """
    check_shapes(student_logits, teacher_logits, labels)
    check_knobs(alpha, temperature)
    _check_settings(labels, old_logprobs, top_k, is_clip)
    kept = valid_positions(student_logits, labels)
    if student_logits.numel() == 0 or not bool(kept.any()):
        return zero_on_graph(student_logits)

    def divergence(student: Tensor, teacher: Tensor) -> Tensor:
        s = log_probs(student, temperature)
        t = log_probs(teacher, temperature)
        if top_k is not None and top_k < s.size(-1):
            s, likeliest = s.topk(top_k, dim=-1)
            t = t.gather(-1, likeliest)
            s, t = (_with_tail(s), _with_tail(t)) if add_tail else (_renormalise_top(s), _renormalise_top(t))
        return divergence_entries(s, t, alpha).sum(-1)

    losses = by_position(divergence, student_logits, teacher_logits, kept)
    if old_logprobs is not None and is_clip is not None:
        losses = losses * _clipped_ratio(student_logits, labels, old_logprobs, kept, sampling_temperature, is_clip)
    return losses.mean() if divisor is None else losses.sum() / divisor


def _renormalise_top(kept: Tensor) -> Tensor:
    return or_uniform(kept).log_softmax(-1)


def _with_tail(kept: Tensor) -> Tensor:
    """Append log(1 - Σ e^kept) to (n, k) log-probs -> (n, k + 1)."""
    mass = kept.logsumexp(-1, keepdim=True).clamp(max=FULL)
    return torch.cat([kept, (-mass.expm1()).log()], dim=-1)


@torch.no_grad()
def _clipped_ratio(
    logits: Tensor, labels: Tensor, old: Tensor, kept: Tensor, temperature: float, is_clip: float
) -> Tensor:
    def sampled(student: Tensor, chosen: Tensor) -> Tensor:
        return log_probs(student, temperature).gather(-1, chosen)[:, 0]

    now = by_position(sampled, logits, labels[..., None], kept)
    return (now - old[kept].to(now.dtype)).clamp(-20, 20).exp().clamp(max=is_clip)


def _check_settings(labels: Tensor, old: Tensor | None, top_k: int | None, is_clip: float | None) -> None:
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k = {top_k} must be 1 or more; None means the whole vocabulary.")
    if is_clip is not None and not is_clip > 0:
        raise ValueError(f"is_clip = {is_clip} must be greater than 0; None means no importance weight.")
    if old is not None and old.shape != labels.shape:
        raise ValueError(f"old_logprobs {tuple(old.shape)} do not match labels {tuple(labels.shape)}.")
