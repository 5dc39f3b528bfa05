"""Sample rollouts for a replica's slot in another process, an actor: an inner loop that takes no training step.

    (share, generation) ──▶ the slot's rows ──▶ TRL's generation, tools and rewards ──▶ log-probs ──▶ Bundle
                                                     └ or an engine's generation (inner/extras/engines), or vLLM's

Rows are a function of the share and the generation (inner/data/order.py), so an actor needs no message from the slot.
Rank k of a slot of K ranks trains the rows that generation g · K + k of one process would have.
The log-probs belong to the weights that sampled, as TRL computes them for a loss: with the temperature, without
top-p.  If an engine samples, the log-probs are the engine's own, because its weights may be rounded differently.

Not promised: dynamic sampling; images.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import set_seed

from inner.data.order import Share, prompt_order
from inner.errors import InnerError
from inner.rollouts.recording.bundle import Bundle, RandomStates
from inner.rollouts.recording.drift import token_log_probs
from inner.rollouts.recording.found import has_dropout
from inner.rollouts.recording.recorded import can_record, record_rollouts
from inner.settings.contradictions import UNCORRECTED

if TYPE_CHECKING:
    from inner.rollouts.recording.recorded import BundlePlace, Unfit
    from inner.train.policy import PolicyTrainer


class NoPlaces:
    """A store of bundles that keeps nothing, because an actor's trainer hands its bundles out."""

    def find(self, place: "BundlePlace", unfit: "Unfit") -> Bundle | None:
        return None

    def put(self, place: "BundlePlace", made: Bundle, unfit: "Unfit") -> Bundle:
        return made


class Sampler:
    """An inner loop's trainer as an actor.   Raises InnerError for settings that need a replica's own rollouts."""

    def __init__(self, trainer: "PolicyTrainer") -> None:
        if trainer.dynamic_sampling or trainer.loss_type in UNCORRECTED:
            raise InnerError(
                f"actors cannot sample for this run: dynamic_sampling = {trainer.dynamic_sampling} and loss_type = "
                f"{trainer.loss_type!r} need rollouts of the replica's own weights. Start no actors, or choose another "
                "inner.grpo.objective."
            )
        if has_dropout(trainer):
            raise InnerError(
                "actors cannot sample for this run: its loss has dropout, so the ratio π_now / π_sampled would be "
                "noise. Start no actors, or leave out inner.lora.dropout and inner.trl.disable_dropout."
            )
        if not can_record(trainer):
            raise InnerError("actors cannot sample for a model that reads images. Start no actors.")
        record_rollouts(trainer, NoPlaces())
        self._trainer: Any = trainer
        self.load()
        arguments: Any = trainer.args
        self._group: int = arguments.num_generations
        self._prompts: int = arguments.generation_batch_size // self._group
        self.served: int = arguments.steps_per_generation * trainer.num_iterations  # micro-batches of one generation

    def load(self) -> None:
        """Tell the engine, if there is one, that the model has other weights."""
        trainer = self._trainer
        if (engine := getattr(trainer, "engine", None)) is not None:
            engine.load(trainer.model.named_parameters())
        elif trainer.use_vllm:
            trainer._last_loaded_step = -1  # TRL sends the weights to vLLM before it samples next

    @property
    def engine(self) -> str:
        """Return the name of the engine that samples, for the bundles' records."""
        engine = getattr(self._trainer, "engine", None)
        return engine.name if engine is not None else "vllm" if self._trainer.use_vllm else "transformers"

    def sample(self, share: Share, generation: int) -> Bundle:
        """Return the rollouts of a slot's generation, sampled from the present weights."""
        trainer = self._trainer
        trainer.model.train()
        made, batch = trainer._make_bundle(self.rows(share, generation))
        trainer._metrics["train"].clear()
        if trainer._reward_calls is not None:
            trainer._reward_calls.check_known(trainer.reward_func_names)
        logprobs = self._log_probs(made, batch) if made.logprobs is None else made.logprobs
        return replace(made, logprobs=logprobs, random=_other_states())

    def _log_probs(self, made: Bundle, batch: Any) -> list[list[float]]:
        """Return the log-probs of all sampled tokens. The batch's own mask may leave truncated rollouts out."""
        sampled = torch.zeros_like(batch["completion_mask"])
        for row, ids in zip(sampled, made.ids, strict=True):
            row[: len(ids)] = 1
        logps = token_log_probs(
            self._trainer, batch["prompt_ids"], batch["prompt_mask"],
            completion_ids=batch["completion_ids"], completion_mask=sampled,
        ).tolist()  # fmt: skip
        return [row[: len(ids)] for row, ids in zip(logps, made.ids, strict=True)]

    def rows(self, share: Share, generation: int) -> list[dict[str, Any]]:
        """Return the rows of a generation, each row once per rollout."""
        dataset = self._trainer.train_dataset
        at = prompt_order(len(dataset), share)
        first = generation * self._prompts
        return [dataset[at(first + i)] for i in range(self._prompts) for _ in range(self._group)]


def _other_states() -> RandomStates:
    """Return new random states for the replica, which continues with them. These states differ from the actor's."""
    theirs, ours = torch.randint(1 << 32, (2,)).tolist()
    set_seed(theirs)
    found = RandomStates.read()
    set_seed(ours)
    return found
