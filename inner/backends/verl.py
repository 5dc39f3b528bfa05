"""The self-distillation channel as an advantage of verl: `algorithm.adv_estimator=grpo_composer`.

    A = GRPO's, as verl computes it                                        (α = 0: bit for bit)
      + α · (log π_teacher − log π_old) · error_mask · response_mask       detached: the reverse KL's policy gradient

    driver   attach_composer_fields(data, …) ──▶ verl's compute_advantage ──▶ grpo_composer ──▶ data.batch["advantages"]
    worker                                                              ppo_loss: any policy loss of verl's

verl 0.9.1 hands an estimator rewards, mask, uid and config, and drops every other field of the batch without a word
(only its own GDPO gets the batch; verl-project/verl#7473 would give it to all).  So the fields take another way: they
are bound beside the batch, and the estimator takes them if they belong to the rows that it was given.  With α > 0 and
no fields it raises: it never becomes plain GRPO in silence.

Installing this project is enough: verl finds the entry point `verl.plugins` in every process, Ray workers too.

    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo_composer +algorithm.alpha_sdpo=0.1 …

Checked with verl 0.9.1, tensordict 0.10, ray 2.60, on a CPU.

Not promised: a whole training run of verl (GPUs and an engine); its v1 trainer fetches a fixed list of fields, so there
`attach_composer_fields` belongs into a trainer's own `_compute_advantage`.
"""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

TEACHER, MASK, OLD = "sdpo_teacher_logprobs", "sdpo_error_mask", "old_log_probs"
_attached: ContextVar[dict[str, Tensor] | None] = ContextVar("composer fields", default=None)


def attach_composer_fields(data: Any, *, teacher_logprobs: Tensor, error_mask: Tensor) -> Any:
    """Put the fields into the batch, and where the estimator finds them; -> the same DataProto.

    data: has response_mask and old_log_probs, (B, T) each.   teacher_logprobs: of the sampled tokens, from the policy
    that has seen the hint, (B, T).   error_mask: 1 where the hint is about the token, (B, T).
    Call it in the driver after rows were moved for the last time (verl balances batches), right before the advantage.
    Raises ValueError for other shapes, KeyError where the batch lacks one of its own.
    """
    fields = {TEACHER: teacher_logprobs, MASK: error_mask}
    shape = data.batch["response_mask"].shape
    if wrong := {name: tuple(t.shape) for name, t in fields.items() if t.shape != shape}:
        raise ValueError(f"{wrong} do not fit response_mask, {tuple(shape)}: one number for each response token")
    for name, tensor in fields.items():
        data.batch[name] = tensor
    _attached.set({name: data.batch[name].detach() for name in (TEACHER, MASK, OLD, "response_mask")})
    return data


def grpo_composer(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    batch: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """verl's estimator -> (advantages, returns), (B, T) each.   config: +algorithm.alpha_sdpo, α.

    Raises KeyError where α > 0 and the fields did not arrive, or are those of other rows.
    """
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # pyright: ignore

    settings = {} if config is None else config
    by_std = settings.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=bool(by_std)
    )
    alpha = float(settings.get("alpha_sdpo", 0.0))
    if not alpha:
        return advantages, returns
    fields = _fields_of(response_mask, batch)
    pull = (fields[TEACHER] - fields[OLD]) * fields[MASK] * response_mask
    return advantages + alpha * pull, returns  # out of place: both are one tensor


def _fields_of(response_mask: Tensor, batch: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if batch is not None and TEACHER in batch:
        return batch
    found = _attached.get()
    if found is None:
        raise KeyError(
            "alpha_sdpo > 0, and no teacher's log-probs reached grpo_composer. verl drops the batch's own fields: call "
            "inner.backends.verl.attach_composer_fields(data, …) in the driver right before the advantage"
        )
    if not torch.equal(found["response_mask"], response_mask):
        raise KeyError(
            "the fields that attach_composer_fields was given are of other rows than this batch: it was balanced or "
            "filtered since. Attach them after that, right before the advantage"
        )
    return found


def register() -> None:
    """Make grpo_composer known to verl in this process; again does no harm."""
    from verl.trainer.ppo.core_algos import register_adv_est  # pyright: ignore

    register_adv_est("grpo_composer")(grpo_composer)
