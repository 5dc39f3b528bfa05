"""Measures how far a model is from the weights that sampled a bundle of rollouts.

    drift = mean over the model's tokens of |log π_now − log π_sampled|          nats per token

Truncated importance sampling corrects single tokens, not the choice of sampled texts: training on the rollouts of a
distant policy is delayed feedback, and diverges if the policy learns fast (ToolWorld at staleness 2: reward .98,
then 0, with a drift of .9; docs/internals/log.md, 2026-11-26).  So a replica skips a bundle beyond FARTHEST, and
samples for the same prompts itself, so that no prompt is lost.

Not promised: the same number on two machines.
"""

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from trl.trainer.utils import pad

if TYPE_CHECKING:
    from inner.rollouts.recording.bundle import Bundle

FARTHEST = 0.2  # nats per token; engines with 8 bits have about .01, with 4 bits about .1
MISSING = 0.05  # share of log-probs that may be NaN (vLLM lacks a few): tokens with NaN are trained on uncorrected


def why_uncorrected(trainer: Any, bundle: "Bundle") -> str:
    """Return why a trainer cannot use a bundle's log-probs for importance sampling; "" if it can."""
    told = [x for row in bundle.logprobs or [] for x in row]
    missing = sum(x != x for x in told) if trainer.use_vllm else 0
    if not all(-1e9 < x < 1e-3 or (x != x and trainer.use_vllm) for x in told):
        return "it has log-probs that are not numbers, or above 0"
    if missing > MISSING * len(told):
        return f"it has no log-probs for {missing} of {len(told)} tokens"
    return ""


def drift_of(trainer: Any, bundle: "Bundle") -> float:
    """Return the drift between the trainer's model and a bundle with log-probs, over tokens that have one."""
    device = trainer.accelerator.device
    prompt_ids, prompt_mask = _padded(bundle.prompt_ids, trainer._tokenizer.pad_token_id, "left", device)
    ids, mask = _padded(bundle.ids, trainer._tokenizer.pad_token_id, "right", device)
    now = token_log_probs(trainer, prompt_ids, prompt_mask, completion_ids=ids, completion_mask=mask)
    sampled = pad([torch.tensor(row) for row in bundle.logprobs or []], padding_value=0)
    own = mask.cpu()
    if bundle.mask is not None:
        own = own * _padded([*map(list, bundle.mask)], 0, "right", torch.device("cpu"))[0]
    own = own * ~sampled.isnan()
    off = torch.nan_to_num((now - sampled) * own).abs()
    return float(off.sum() / own.sum().clamp(min=1))


@torch.no_grad()
def token_log_probs(
    trainer: Any, prompt_ids: Tensor, prompt_mask: Tensor, *, completion_ids: Tensor, completion_mask: Tensor
) -> Tensor:
    """Return the log-probs of the completions' tokens as the loss has them, (B, T), on the CPU."""
    with trainer.accelerator.autocast():
        found = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([prompt_ids, completion_ids], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            completion_ids.size(1),
            batch_size=trainer.args.per_device_train_batch_size,
        )
    return cast(Tensor, found[0]).float().cpu()


def _padded(rows: Any, value: int, side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return rows of different lengths as one padded tensor (B, T), and the mask of their values."""
    tensors = [torch.tensor(row, device=device) for row in rows]
    ones = [torch.ones_like(row) for row in tensors]
    return pad(tensors, padding_value=value, padding_side=side), pad(ones, padding_value=0, padding_side=side)
