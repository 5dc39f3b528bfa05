"""Losses on a chosen and a rejected response to the same prompt.

    DPO    -log σ(z), z = β [(π_c - ref_c) - (π_r - ref_r)]      summed log-probs    arXiv 2305.18290, eq. (7)
    SimPO  -log σ(β (π̄_c - π̄_r) - γ)                            mean log-probs      arXiv 2405.14734, eq. (6)

    anchors for DPO (DPO trains only the margin, so both log-probs may fall):
    label smoothing ε   -(1 - ε) log σ(z) - ε log σ(-z)          conservative DPO: a share ε of the labels is wrong
    NLL                 + w · (-π_c / |c|)                       arXiv 2404.19733, eq. (1): keeps the chosen one likely
    DPO-Positive        z - β λ max(0, ref_c - π_c)              arXiv 2402.13228: no gain if chosen gets less likely

γ is absolute here. (The SimPO code sets γ/β: our γ = 1.0 at β = 2 is .5 there.) DPO's gradient grows with the length of
the responses; SimPO's does not.

Not promised: that the chosen response gets more likely without an anchor.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from inner.losses.chunks import by_position


def sequence_logprobs(
    logits_B_T_V: Tensor, ids_B_T: Tensor, response_mask_B_T: Tensor, average: bool = False
) -> Tensor:
    """Return log p(response | prompt), summed (or averaged) over the tokens where the mask is 1: (B,).

    The mask marks tokens; this function does the shift: logits at i predict token i + 1, and no logits predict token 0.
    Raises ValueError for a row without a response token: its 0 would be a perfect log-prob."""
    if ids_B_T.shape != logits_B_T_V.shape[:-1] or response_mask_B_T.shape != ids_B_T.shape:
        raise ValueError(
            f"logits {tuple(logits_B_T_V.shape)}, ids {tuple(ids_B_T.shape)} and mask "
            f"{tuple(response_mask_B_T.shape)} do not fit: (B, T, V), (B, T), (B, T)."
        )
    mask = response_mask_B_T[:, 1:].bool()
    counts = mask.sum(-1)
    if bool((counts == 0).any()):
        rows = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} have no response token after the first position. Drop them, or fix the mask.")
    logps = by_position(token_logprobs, logits_B_T_V[:, :-1], ids_B_T[:, 1:, None], mask)
    row_of = mask.nonzero(as_tuple=True)[0]
    total = torch.zeros(len(counts), dtype=logps.dtype, device=logps.device).index_add(0, row_of, logps)
    return total / counts if average else total


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return log p of each position's token: logits (n, V), ids (n, 1) -> (n,), in float32 at least."""
    logits = logits if logits.element_size() >= 4 else logits.float()
    return logits.log_softmax(-1).gather(-1, ids)[:, 0]


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    chosen_tokens: Tensor | None = None,
    dpop_lambda: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the mean over pairs, a scalar. Log-probs (B,) are sums over the response. Without pairs: 0 on the graph.

    label_smoothing   ε, the share of flipped labels, below .5
    nll_weight        weight of the NLL anchor; it needs chosen_tokens (B,), the length of each chosen response
    dpop_lambda       λ of DPO-Positive (5 to 500 in the paper)
    weights           (B,) weight of each pair: the result is the mean of weight · loss"""
    _same_shape(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    _refuse_negative(beta=beta, label_smoothing=label_smoothing, nll_weight=nll_weight, dpop_lambda=dpop_lambda)
    if not label_smoothing < 0.5:
        raise ValueError(f"label_smoothing = {label_smoothing} would prefer the rejected response. Set it below 0.5.")
    if not policy_chosen.numel():
        return (policy_chosen.sum() + policy_rejected.sum()) * 0.0
    z = (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)
    if dpop_lambda:
        z = z - dpop_lambda * (reference_chosen - policy_chosen).clamp(min=0)
    z = beta * z
    # logsigmoid, not log(sigmoid()): the latter is -inf from z = -104 on.
    losses = -F.logsigmoid(z) * (1 - label_smoothing) - F.logsigmoid(-z) * label_smoothing
    losses = losses + nll_weight * _nll_anchor(policy_chosen, chosen_tokens) if nll_weight else losses
    return _apply_weights(losses, weights).mean()


def _apply_weights(losses: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return losses
    _same_shape(losses, weights)
    return losses * weights


def _nll_anchor(policy_chosen: Tensor, tokens: Tensor | None) -> Tensor:
    """Return -log p per token of the chosen response."""
    if tokens is None:
        raise ValueError(
            "nll_weight needs chosen_tokens, the length of each chosen response. Pass mask[:, 1:].sum(-1)."
        )
    _same_shape(policy_chosen, tokens)
    return -policy_chosen / tokens


def simpo_loss(
    chosen_mean: Tensor, rejected_mean: Tensor, beta: float = 2.0, gamma: float = 1.0, weights: Tensor | None = None
) -> Tensor:
    """Return the mean over pairs (of weight · loss), a scalar. Both inputs: (B,) mean log-probs per token.

    There is no reference model. Without pairs: 0 on the graph."""
    _same_shape(chosen_mean, rejected_mean)
    _refuse_negative(beta=beta, gamma=gamma)
    if not chosen_mean.numel():
        return (chosen_mean.sum() + rejected_mean.sum()) * 0.0
    return _apply_weights(-F.logsigmoid(beta * (chosen_mean - rejected_mean) - gamma), weights).mean()


def _refuse_negative(**weights: float) -> None:
    for name, value in weights.items():
        if not value >= 0:
            raise ValueError(f"{name} = {value} must be 0 or more.")


def _same_shape(*logps: Tensor) -> None:
    shapes = {tuple(x.shape) for x in logps}
    if len(shapes) > 1:
        raise ValueError(f"the log-probs have the shapes {sorted(shapes)}. Pass one number per pair in each.")
