"""Adds two channels (hints, teachers' scores) to verl's v1 trainer (`trainer.use_v1: true`, the default), in 3 modes.

    A = verl's own, by any estimator except grpo_composer                  (α = β = 0: the same tensors, untouched)
      + α · (log π_teacher − log π_old)       on the tokens that the hint is about
      + β · (score − mean of the prompt)      on the tokens of each turn that the teachers' consensus scored

    agent loop   AgentLoopOutput.extra_fields["composer"] = composer_fields(…) ──▶ TransferQueue
    trainer      its _compute_advantage ─▶ hinted sequences ─▶ verl's worker: compute_log_prob ─▶ advantages + terms

    python -m verl.trainer.main_ppo trainer.v1.trainer_mode=composer_sync algorithm.adv_estimator=grpo \\
        +algorithm.alpha_sdpo=0.1 +algorithm.beta_replay=0.05 …

The teacher is the policy of this step, on its own sequence with the hint in it.  verl's estimator sees neither term, so
sessions with several outputs keep the advantages of verl's GRPO.

Not promised: images (a hinted sequence is text); preference pairs, because no policy loss of verl gets a pair.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import transfer_queue as tq  # pyright: ignore[reportMissingImports]
from tensordict import NonTensorStack, TensorDict  # pyright: ignore[reportMissingImports]
from torch import Tensor
from verl.trainer.ppo.v1 import (  # pyright: ignore[reportMissingImports]
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)

FIELD, HINTED = "composer", "composer_hinted"  # key in a row's extra_fields; the queue's partition of hinted sequences
WEIGHTS = ("alpha_sdpo", "beta_replay")
NOTHING, PREFIX = -1, "composer_"


@dataclass(frozen=True)
class _Row:
    """One output of a session.   at: for each response token its place in `ids`, or NOTHING.   turns: (start, end)."""

    ids: Sequence[int] = ()
    at: Sequence[int] = ()
    turns: Sequence[tuple[int, int]] = ()
    scores: Sequence[float | None] = ()


def composer_fields(
    *,
    response_length: int,
    hinted_ids: Sequence[int] = (),
    at: Sequence[int] = (),
    turns: Sequence[tuple[int, int]] = (),
    scores: Sequence[float | None] = (),
) -> dict[str, Any]:
    """Return the value that an agent loop puts into `extra_fields["composer"]` for one output.   Raises ValueError.

    hinted_ids: prompt and response with the hint in them, up to the last token that the hint is about.
    at: for each response token its place in `hinted_ids`; -1 for tokens that the hint is not about.
    turns: (start, end) of each turn in the response.   scores: of each turn, by inner.ConsensusScore; None: no answer.
    """
    if hinted_ids and len(at) != response_length:
        raise ValueError(f"`at` has {len(at)} places for {response_length} response tokens; it needs one for each")
    if bad := [place for place in at if place != NOTHING and not 0 < place < len(hinted_ids)]:
        raise ValueError(
            f"`at` has the place {bad[0]}, and there are {len(hinted_ids)} hinted ids. A scored token needs a "
            f"token before it, so a place must be from 1 to {len(hinted_ids) - 1}, or {NOTHING} for no place"
        )
    if len(turns) != len(scores):
        raise ValueError(f"{len(turns)} turns have {len(scores)} scores; each turn needs one, or None")
    if bad := [turn for turn in turns if not 0 <= turn[0] < turn[1] <= response_length]:
        raise ValueError(f"turn {tuple(bad[0])} does not lie in a response of {response_length} tokens")
    return {
        "ids": list(map(int, hinted_ids)), "at": list(map(int, at)),
        "turns": [(int(start), int(end)) for start, end in turns], "scores": list(scores),
    }  # fmt: skip


def weights_in(algorithm: Mapping[str, Any]) -> tuple[float, float]:
    """Return (α, β) of verl's `algorithm` table.   Raises ValueError for unknown alpha_…, beta_… keys or bad values."""
    found = {key: algorithm[key] for key in algorithm if str(key).startswith(("alpha_", "beta_"))}
    if unknown := sorted(set(found) - set(WEIGHTS)):
        raise ValueError(
            f"algorithm.{unknown[0]} is not a setting of this trainer; it has {' and '.join(WEIGHTS)}. Correct its name"
        )
    for key, value in found.items():
        if not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise ValueError(f"algorithm.{key} = {value!r}: the weight of a term must be a finite number, 0 or more")
    return float(found.get(WEIGHTS[0], 0.0)), float(found.get(WEIGHTS[1], 0.0))


def consensus_credits(rows: Sequence[_Row], uids: Sequence[str], masks: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each row's tokens, their turn's score minus the mean of its prompt's scored turns; else 0, (T,)."""
    of_prompt: dict[str, list[float]] = defaultdict(list)
    for row, uid in zip(rows, uids, strict=True):
        of_prompt[uid] += [score for score in row.scores if score is not None]
    found = [torch.zeros_like(mask) for mask in masks]
    for credit, row, uid, mask in zip(found, rows, uids, masks, strict=True):
        for (start, end), score in zip(row.turns, row.scores, strict=True):
            if score is not None:
                credit[start:end] = (score - sum(of_prompt[uid]) / len(of_prompt[uid])) * mask[start:end]
    return found


class ComposerAdvantage:
    """Adds the terms to the advantages of the verl trainer that it is mixed into."""

    config: Any
    actor_rollout_wg: Any

    def __init__(self, config: Any) -> None:
        self._weights = weights_in(config.algorithm)
        if self._weights[0] and (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
            raise ValueError(
                "algorithm.alpha_sdpo with rollout_correction.bypass_mode: there the engine computes log π_old, and "
                "the trainer the teacher's log-prob, so their difference would be noise. Set bypass_mode=false"
            )
        if config.algorithm.adv_estimator == "grpo_composer":
            raise ValueError(
                "this trainer itself adds the channels' terms, so it does not need the estimator grpo_composer. "
                "Set algorithm.adv_estimator=grpo"
            )
        own = (
            config.trainer.v1
        )  # verl compares the mode with its own names, and reads the mode's settings under these names
        own.trainer_mode = own.trainer_mode.removeprefix(PREFIX)
        super().__init__(config)  # type: ignore[call-arg]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        done = super()._compute_advantage(batch, metrics=metrics)  # type: ignore[misc]
        alpha, beta = self._weights
        if not alpha and not beta:
            return done
        where = {"keys": batch.keys, "partition_id": batch.partition_id}
        names = ["advantages", "response_mask", "old_log_probs", "extra_fields", "uid"]
        data = tq.kv_batch_get(**where, select_fields=names)
        extras = _plain(data, "extra_fields")
        rows = [_Row() if tag.get("is_padding") else _row_in(x) for tag, x in zip(batch.tags, extras, strict=True)]
        masks = [mask.float() for mask in data["response_mask"].unbind()]
        terms = [torch.zeros_like(mask) for mask in masks]
        if alpha:
            pulls = self._pulls(batch, rows, masks, data["old_log_probs"].unbind())
            terms = [alpha * pull for pull in pulls]
            metrics["composer/sdpo_tokens"] = sum(int((pull != 0).sum()) for pull in pulls)
        if beta:
            credits = consensus_credits(rows, _plain(data, "uid"), masks)
            terms = [term + beta * credit for term, credit in zip(terms, credits, strict=True)]
            metrics["composer/scored_turns"] = sum(score is not None for row in rows for score in row.scores)
        parts = [own + term.to(own) for own, term in zip(data["advantages"].unbind(), terms, strict=True)]
        return tq.kv_batch_put(**where, fields=TensorDict({"advantages": _nested(parts)}, batch_size=len(parts)))

    def _pulls(self, batch: Any, rows: Sequence[_Row], masks: Sequence[Tensor], old: Sequence[Tensor]) -> list[Tensor]:
        teacher = self._teacher_log_probs(batch, rows)
        return [_pull(*of_row) for of_row in zip(rows, teacher, old, masks, strict=True)]

    def _teacher_log_probs(self, batch: Any, rows: Sequence[_Row]) -> list[Tensor | None]:
        """Return log π of each hinted sequence's next tokens, (length,), by verl's worker; None for a row without hint.

        The worker needs a multiple of its data-parallel size, so copies of the first sequence fill the batch."""
        hinted = [i for i, row in enumerate(rows) if row.ids]
        if not hinted:
            return [None] * len(rows)
        extra = -len(hinted) % self._dp_size()
        asked = [*hinted, *hinted[:1] * extra]
        keys = [f"{batch.keys[i]}_{n}" for n, i in enumerate(asked)]
        tags = [{"seq_len": len(rows[i].ids)} for i in asked]
        meta = tq.kv_batch_put(
            keys=keys, partition_id=HINTED, fields=_worker_fields([rows[i] for i in asked]), tags=tags
        )
        meta.extra_info.update(
            calculate_entropy=False, compute_loss=False, temperature=batch.extra_info.get("temperature", 1.0)
        )
        try:
            self.actor_rollout_wg.compute_log_prob(meta)
            found = tq.kv_batch_get(keys=keys, partition_id=HINTED, select_fields=["log_probs"])["log_probs"].unbind()
        finally:
            tq.kv_clear(keys=keys, partition_id=HINTED)
        of_row = dict(zip(hinted, found, strict=False))
        return [of_row.get(i) for i in range(len(rows))]

    def _dp_size(self) -> int:
        workers = self.actor_rollout_wg
        if "actor" not in workers._dispatch_info:  # as verl's _balance_batch does
            workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
        return max(workers._dispatch_info["actor"]) + 1


def _row_in(extra: Any) -> _Row:
    found = (extra or {}).get(FIELD)
    return _Row() if found is None else _Row(**found)


def _pull(row: _Row, teacher: Tensor | None, old: Tensor, mask: Tensor) -> Tensor:
    """Return the distillation term of one row, (T,).   teacher: log π of the token after each place.

    Raises ValueError if a used number is not finite."""
    pull = torch.zeros_like(mask)
    if teacher is None:
        return pull
    used = [(t, place) for t, place in enumerate(row.at) if place != NOTHING and mask[t]]
    tokens, places = ([pair[i] for pair in used] for i in (0, 1))
    pull[tokens] = teacher[[place - 1 for place in places]].to(pull) - old[tokens].to(pull)
    if not torch.isfinite(pull).all():
        raise ValueError(
            "a hinted token has a log-prob of the teacher or of the policy that is not a finite number. Leave the "
            f"token out: {NOTHING} in `at`"
        )
    return pull


def _worker_fields(rows: Sequence[_Row]) -> Any:
    """Return the input of verl's compute_log_prob: each hinted sequence as a prompt of one token and its response."""
    ids = [torch.tensor(row.ids, dtype=torch.int64) for row in rows]
    ones = [torch.ones(len(row) - 1, dtype=torch.int64) for row in ids]
    fields = {
        "input_ids": _nested(ids), "position_ids": _nested([torch.arange(len(row)) for row in ids]),
        "prompts": _nested([row[:1] for row in ids]), "responses": _nested([row[1:] for row in ids]),
        "response_mask": _nested(ones), "loss_mask": _nested(ones),
        "multi_modal_inputs": NonTensorStack(*({} for _ in rows)),
    }  # fmt: skip
    return TensorDict(fields, batch_size=len(rows))


def _nested(parts: Sequence[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)


def _plain(data: Any, name: str) -> list[Any]:
    """Return a field of Python objects as a list."""
    found: Any = data[name] if name in data.keys() else [None] * len(data)  # noqa: SIM118 - a TensorDict is no dict
    return found.tolist() if hasattr(found, "tolist") else list(found)


def register() -> None:
    """Register composer_sync, composer_colocate_async and composer_separate_async.  A second call does no harm."""
    modes = {
        "sync": PPOTrainerSync,
        "colocate_async": PPOTrainerColocateAsync,
        "separate_async": PPOTrainerSeparateAsync,
    }
    for mode, trainer in modes.items():
        if (name := f"{PREFIX}{mode}") not in _registered():
            register_trainer(name)(type(f"Composer{trainer.__name__}", (ComposerAdvantage, trainer), {}))


def _registered() -> Mapping[str, Any]:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY  # pyright: ignore[reportMissingImports]

    return TRAINER_REGISTRY
