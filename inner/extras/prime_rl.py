"""PRIME-RL's loss with the self-distillation channel: a custom loss for one sample. All tensors are 1-D, (T,).

    r = log π − log π_inference      d = π − π_inference (of the sampled token)      m the mask, w token weights (or 1)

    L = Σ w·( −keep·τ_adv·A·eʳ + τ_kl·m·r² )          keep = m ∧ ¬(A > 0 ? d > high : d < −low)
      + α Σ w·( −near·sg(log π_ref − log π)·eʳ )      near = m ∧ ¬(d < −low)

    first line    PRIME-RL's default, DPPO (arXiv 2602.04879) with Kimi K2.5's KL (2602.02276); bit for bit at α = 0
    second line   the reverse KL to a reference, estimated from sampled tokens as in its `ref_kl` component. If the
                  reference is the policy that has seen a hint, this is the SDPO channel

PRIME-RL divides the sum by the global number of tokens.  The masks of tokens are settings of PRIME-RL, whose defaults
have changed before. So set the masks in your config.

    [trainer.loss]
    type = "custom"
    import_path = "inner.extras.prime_rl.loss_fn"
    [trainer.loss.kwargs]
    alpha_sdpo = 0.0

α > 0 needs samples with a reference in the `rl` component.  PRIME-RL's `opsd` and `opd` send their samples to its fixed
`ref_kl`, which calls no custom loss, and its `grpo` has no reference (docs/backends.md).

Checked with prime-rl 0.8.0 at 559b4477 (2026-08-21). This module does not import it.

Not promised: the divergence over the whole vocabulary (PRIME-RL passes only log-probs of sampled tokens); preference
pairs (a loss of one sample has no pair).
"""

import warnings
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class LossInputs(Protocol):
    """PRIME-RL's inputs of a loss: tensors (T,).   ref_logprobs: None if the algorithm has no reference.

    loss_weights and ref_logprobs may be missing: until 2026-06 PRIME-RL called the reference teacher_logprobs and had
    no weights.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass
class LossOutputs:
    """The result that PRIME-RL reads: the sum over tokens, and scalars for its log."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def loss_fn(
    inputs: LossInputs,
    *,
    alpha_sdpo: float = 0.0,
    beta_dpo: float = 0.0,
    dppo_mask_high: float = 0.2,
    dppo_mask_low: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
) -> LossOutputs:
    """Return the loss of one sample (formula above).

    alpha_sdpo       α; needs inputs.ref_logprobs (or teacher_logprobs, the old name)
    beta_dpo         has no effect, only a warning: a loss of one sample gets no pairs
    dppo_mask_high   largest rise of a token's probability where A > 0
    dppo_mask_low    largest fall where A ≤ 0
    Raises ValueError for shapes that do not fit, negative settings, and α without a reference.
    """
    settings = {
        "alpha_sdpo": alpha_sdpo, "dppo_mask_high": dppo_mask_high, "dppo_mask_low": dppo_mask_low,
        "adv_tau": adv_tau, "kl_tau": kl_tau,
    }  # fmt: skip
    _check(inputs, settings)
    if beta_dpo:
        warnings.warn(
            f"beta_dpo = {beta_dpo:g} does nothing in PRIME-RL: its loss sees one sample, and a preference has two. "
            "Set beta_dpo = 0. This project's own trainer learns from pairs (docs/replay.md)",
            stacklevel=2,
        )
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    ratio = torch.exp(log_ratio)
    moved = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    risen, fallen = moved > dppo_mask_high, moved < -dppo_mask_low
    masked = torch.where(inputs.advantages > 0, risen, fallen)
    gain = (inputs.loss_mask & ~masked) * (adv_tau * inputs.advantages) * ratio
    per_token = -gain + kl_tau * (inputs.loss_mask * log_ratio**2)
    gap = _gap(inputs) if alpha_sdpo else None
    if gap is not None:
        per_token = per_token - alpha_sdpo * ((inputs.loss_mask & ~fallen) * gap * ratio)
    weights: Tensor | None = getattr(inputs, "loss_weights", None)
    if weights is not None:
        per_token = per_token * weights
    metrics = _trust_region(inputs, log_ratio.detach(), ratio.detach(), masked)
    if gap is not None:
        metrics["sdpo/ref_kl"] = _mean(gap, inputs.loss_mask)
    return LossOutputs(per_token.sum(), metrics)


def _gap(inputs: LossInputs) -> Tensor:
    """Return sg(log π_ref − log π) where the mask is True; 0 elsewhere, where log π_ref may be −∞."""
    reference = _reference(inputs)
    mask = inputs.loss_mask
    if reference is None:
        raise ValueError(
            "alpha_sdpo > 0 needs ref_logprobs, and this batch has none. PRIME-RL's grpo has no reference; its opsd "
            "and opd have a reference, for their own ref_kl loss. Use an algorithm that leaves such samples to the rl "
            "loss, or alpha_sdpo = 0"
        )
    if mask.any() and not reference[mask].any():
        raise ValueError(
            "alpha_sdpo > 0, and each of this sample's ref_logprobs is 0: PRIME-RL fills in zeros if it packs a "
            "sample without a reference beside one with a reference. They would pull each token to probability 1. Use "
            "one algorithm with a reference for all environments, or alpha_sdpo = 0"
        )
    return torch.where(mask, reference - inputs.trainer_logprobs, 0.0).detach()


def _reference(inputs: LossInputs) -> Tensor | None:
    found = getattr(inputs, "ref_logprobs", None)
    return getattr(inputs, "teacher_logprobs", None) if found is None else found


def _trust_region(inputs: LossInputs, log_ratio: Tensor, ratio: Tensor, masked: Tensor) -> dict[str, Tensor]:
    """Return metrics under the names of PRIME-RL's default loss, so that its dashboards keep working."""
    mask, advantages = inputs.loss_mask, inputs.advantages
    mismatch = ratio - log_ratio - 1
    dropped = mask & masked
    return {
        "masked_mismatch_kl": _mean(mismatch, dropped),
        "unmasked_mismatch_kl": _mean(mismatch, mask & ~masked),
        "is_masked": _mean(masked, mask),
        "is_masked_low": _mean((advantages < 0) & masked, mask),
        "is_masked_high": _mean((advantages > 0) & masked, mask),
        "masked_advantage_positive": _mean(advantages > 0, dropped),
        "masked_advantage_negative": _mean(advantages < 0, dropped),
    }


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask; 0 if the mask is empty."""
    return values[mask].sum() / mask.sum().clamp(min=1)


def _check(inputs: LossInputs, settings: dict[str, float]) -> None:
    named = (*LossInputs.__annotations__, "teacher_logprobs")
    given: dict[str, Any] = {name: getattr(inputs, name, None) for name in named}
    length = inputs.trainer_logprobs.shape
    for name, tensor in given.items():
        if tensor is not None and (tensor.shape != length or tensor.dim() != 1):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, and trainer_logprobs {tuple(length)}. Pass one sample, with "
                "all tensors of shape (T,), as PRIME-RL does: this loss would reduce a batch (B, T) wrongly"
            )
    if inputs.loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {inputs.loss_mask.dtype}, and must be torch.bool. Pass loss_mask.bool()")
    if wrong := [f"{name} = {value}" for name, value in settings.items() if not value >= 0]:
        raise ValueError(f"{', '.join(wrong)}: must be at least 0, as in PRIME-RL's own config")
