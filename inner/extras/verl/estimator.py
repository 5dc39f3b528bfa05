"""The self-distillation channel as an advantage of verl: `algorithm.adv_estimator=grpo_composer`.

    A = GRPO's, computed by verl                                           (α = 0: bit for bit)
      + α · (log π_teacher − log π_old) · error_mask · response_mask       detached: the reverse KL's policy gradient

    driver   attach_composer_fields(data, …) ──▶ verl's compute_advantage ──▶ grpo_composer ──▶ data.batch["advantages"]
    worker                                                              ppo_loss: any policy loss of verl

verl 0.9.1 passes rewards, mask, uid and config to an estimator, and silently drops all other fields of the batch (only
its own GDPO gets the batch; verl-project/verl#7473 would pass it to all).  So we store the fields beside the batch, and
the estimator uses them if they belong to the rows that it gets.  If α > 0 and fields are missing, or belong to an
earlier batch or to moved rows, the estimator raises an error. So it never silently becomes plain GRPO, and never learns
from another row's teacher.

It is enough to install this project: verl finds the entry point `verl.plugins` in every process, also in Ray workers.

Checked with verl 0.9.1, tensordict 0.10, ray 2.60, on a CPU.

Not promised: a whole training run of verl (GPUs and an engine). verl's v1 trainer fetches a fixed list of fields:
trainer.py has a trainer that fetches ours.
"""

import math
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEACHER, MASK, OLD = "sdpo_teacher_logprobs", "sdpo_error_mask", "old_log_probs"
REWARDS, RESPONSES = "token_level_rewards", "response_mask"


@dataclass(frozen=True)
class _Attached:
    """The fields of a batch, and its rows when they were attached.   rewards, uid: None if the batch lacked them."""

    fields: Mapping[str, Tensor]
    mask: Tensor
    rewards: Tensor | None
    uid: Any

    def has_rows(self, mask: Tensor, rewards: Tensor, uid: Any) -> bool:
        """Whether these are the same rows in the same order: the same tensor, or equal rows that are all different."""
        if mask is self.mask:
            return True
        if self.rewards is None or self.uid is None or uid is None or len(uid) != len(self.uid):
            return False
        before, now = (
            [(str(name), *row) for name, row in zip(names, torch.cat([m, r], -1).tolist(), strict=True)]
            for names, m, r in ((self.uid, self.mask, self.rewards), (uid, mask, rewards))
        )
        return before == now and len(set(now)) == len(now)


_attached: ContextVar[_Attached | None] = ContextVar("composer fields", default=None)


def attach_composer_fields(data: Any, *, teacher_logprobs: Tensor, error_mask: Tensor) -> Any:
    """Put the fields into the batch, and store them for the estimator; return the same DataProto.

    data: has response_mask and old_log_probs, (B, T) each.   teacher_logprobs: of the sampled tokens, from the policy
    that has seen the hint, (B, T).   error_mask: 1 (or a weight) for tokens that the hint is about, (B, T).
    Call this in the driver after rows were moved for the last time (verl balances batches), right before the advantage.
    Raises ValueError for other shapes, KeyError if the batch lacks response_mask or old_log_probs.
    """
    fields = {TEACHER: teacher_logprobs, MASK: error_mask}
    shape = data.batch[RESPONSES].shape
    if wrong := {name: tuple(t.shape) for name, t in fields.items() if t.shape != shape}:
        raise ValueError(f"{wrong} do not fit response_mask, {tuple(shape)}: pass one number per response token")
    for name, tensor in fields.items():
        data.batch[name] = tensor
    bound = {name: data.batch[name].detach() for name in (TEACHER, MASK, OLD)}
    rewards, uid = data.batch.get(REWARDS, None), data.non_tensor_batch.get("uid")
    _attached.set(_Attached(bound, data.batch[RESPONSES], rewards, uid))
    return data


def grpo_composer(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    batch: Mapping[str, Tensor] | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), (B, T) each, as a verl estimator.   config: +algorithm.alpha_sdpo, α.

    Raises KeyError if α > 0 and the fields are missing or belong to other rows; ValueError for a negative α, and for
    log-probs that are not finite at tokens of the error mask.
    """
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # pyright: ignore

    settings = {} if config is None else config
    by_std = settings.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=bool(by_std)
    )
    alpha = float(settings.get("alpha_sdpo", 0.0))
    if not 0 <= alpha < math.inf:
        raise ValueError(f"algorithm.alpha_sdpo = {alpha}: the weight of the distillation must be finite, 0 or more")
    if not alpha:
        return advantages, returns
    pull = _pull_of(_fields_of(response_mask, token_level_rewards, index, batch), response_mask)
    return advantages + alpha * pull.to(advantages), returns  # not in place: both are the same tensor


def _pull_of(fields: Mapping[str, Tensor], response_mask: Tensor) -> Tensor:
    """Return the distillation term. Unused tokens are cut out, not multiplied by 0: padding may hold −∞."""
    used = (fields[MASK] != 0) & (response_mask != 0)
    pull = torch.where(used, (fields[TEACHER] - fields[OLD]) * fields[MASK], 0.0)
    if not torch.isfinite(pull).all():
        raise ValueError(
            f"{int((~torch.isfinite(pull)).sum())} tokens of the error mask have a log-prob of the teacher or of the "
            "policy that is not a finite number. Score them again, or set their error mask to 0"
        )
    return pull


def _fields_of(
    response_mask: Tensor, rewards: Tensor, uid: Any, batch: Mapping[str, Tensor] | None
) -> Mapping[str, Tensor]:
    if batch is not None and TEACHER in batch:
        return batch
    found = _attached.get()
    if found is None:
        raise KeyError(
            "alpha_sdpo > 0, and no teacher's log-probs reached grpo_composer. verl drops the batch's own fields: call "
            "inner.extras.verl.estimator.attach_composer_fields(data, …) in the driver right before the advantage"
        )
    if not found.has_rows(response_mask, rewards, uid):
        raise KeyError(
            "the fields of attach_composer_fields belong to other rows than this batch: to an earlier batch, or to "
            "this batch before it was balanced, filtered or copied. Attach the fields right before the advantage"
        )
    return found.fields


def register() -> None:
    """Register grpo_composer with verl in this process. A second call does no harm."""
    from verl.trainer.ppo.core_algos import register_adv_est  # pyright: ignore

    register_adv_est("grpo_composer")(grpo_composer)
