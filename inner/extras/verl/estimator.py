"""The self-distillation channel as an advantage of verl: `algorithm.adv_estimator=grpo_composer`.

    A = GRPO's, as verl computes it                                        (α = 0: bit for bit)
      + α · (log π_teacher − log π_old) · error_mask · response_mask       detached: the reverse KL's policy gradient

    driver   attach_composer_fields(data, …) ──▶ verl's compute_advantage ──▶ grpo_composer ──▶ data.batch["advantages"]
    worker                                                              ppo_loss: any policy loss of verl's

verl 0.9.1 hands an estimator rewards, mask, uid and config, and drops every other field of the batch without a word
(only its own GDPO gets the batch; verl-project/verl#7473 would give it to all).  So the fields take another way: they
are bound beside the batch, and the estimator takes them if they belong to the rows that it was given.  With α > 0 and
no fields, those of an earlier batch or those of rows that were moved, it raises: it never becomes plain GRPO, or
learns from another row's teacher, in silence.

Installing this project is enough: verl finds the entry point `verl.plugins` in every process, Ray workers too.

    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo_composer +algorithm.alpha_sdpo=0.1 …

Checked with verl 0.9.1, tensordict 0.10, ray 2.60, on a CPU.

Not promised: a whole training run of verl (GPUs and an engine); its v1 trainer fetches a fixed list of fields, so there
`attach_composer_fields` belongs into a trainer's own `_compute_advantage`.
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
    """The fields of a batch, and what its rows were then.   rewards, uid: None where the batch had none yet."""

    fields: Mapping[str, Tensor]
    mask: Tensor
    rewards: Tensor | None
    uid: Any

    def has_rows(self, mask: Tensor, rewards: Tensor, uid: Any) -> bool:
        """Whether these are the rows, in their order: by the very tensor, else by rows without two alike."""
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
    """Put the fields into the batch, and where the estimator finds them; -> the same DataProto.

    data: has response_mask and old_log_probs, (B, T) each.   teacher_logprobs: of the sampled tokens, from the policy
    that has seen the hint, (B, T).   error_mask: 1 (or a weight) where the hint is about the token, (B, T).
    Call it in the driver after rows were moved for the last time (verl balances batches), right before the advantage.
    Raises ValueError for other shapes, KeyError where the batch lacks one of its own.
    """
    fields = {TEACHER: teacher_logprobs, MASK: error_mask}
    shape = data.batch[RESPONSES].shape
    if wrong := {name: tuple(t.shape) for name, t in fields.items() if t.shape != shape}:
        raise ValueError(f"{wrong} do not fit response_mask, {tuple(shape)}: one number for each response token")
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
    """verl's estimator -> (advantages, returns), (B, T) each.   config: +algorithm.alpha_sdpo, α.

    Raises KeyError where α > 0 and the fields did not arrive, or are those of other rows; ValueError for an α below 0,
    and for log-probs that are not numbers where the error mask uses them.
    """
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage  # pyright: ignore

    settings = {} if config is None else config
    by_std = settings.get("norm_adv_by_std_in_grpo", True)
    advantages, returns = compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, norm_adv_by_std_in_grpo=bool(by_std)
    )
    alpha = float(settings.get("alpha_sdpo", 0.0))
    if not 0 <= alpha < math.inf:
        raise ValueError(f"algorithm.alpha_sdpo = {alpha}: the weight of the distillation is a number of at least 0")
    if not alpha:
        return advantages, returns
    pull = _pull_of(_fields_of(response_mask, token_level_rewards, index, batch), response_mask)
    return advantages + alpha * pull.to(advantages), returns  # out of place: both are one tensor


def _pull_of(fields: Mapping[str, Tensor], response_mask: Tensor) -> Tensor:
    """Padding has any log-prob, −∞ too, and 0 · −∞ is not a number: what is not used is left out, not multiplied."""
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
            "attach_composer_fields was given fields of other rows than this batch has: they are of an earlier batch, "
            "or the batch was balanced, filtered or copied since. Attach the fields later, right before the advantage"
        )
    return found.fields


def register() -> None:
    """Make grpo_composer known to verl in this process; again does no harm."""
    from verl.trainer.ppo.core_algos import register_adv_est  # pyright: ignore

    register_adv_est("grpo_composer")(grpo_composer)
