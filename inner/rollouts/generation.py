"""Extends TRL's GRPOTrainer: this project's order of prompts, objectives, tool errors and rewards.

    prompts (seed, inner step) ──▶ generate ⇄ tools ──▶ rewards, checked ──▶ dynamic sampling ──▶ batch

    generation g = micro-batch // micro-batches per generation: its prompts are a function of (share, g)

toolloop.py avoids repeated work of TRL's tool loop. Whole runs still give TRL's numbers, bit for bit.

Not promised: several processes; image prompts in the caches; that all prompts are used equally often.
"""

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import TrainerState
from trl.rewards.other_rewards import get_soft_overlong_punishment

from inner.data.order import Share, prompt_order
from inner.data.rendering import render_ids
from inner.models.causal_lm import name_parts, number_positions, sample_as_asked
from inner.rollouts.toolloop import LeanToolLoop, total_rewards
from inner.settings.inner import Progress
from inner.settings.objectives import check_settings
from inner.usercode.reward_calls import RewardCalls

MASKED = "sampling/masked"  # metric: share of sequences (or of tokens: "token_…") with importance weight 0
BROKEN = "rewards/broken"  # metric: share of completions that broke their judge


class GenerationTrainer(LeanToolLoop):
    """GRPOTrainer with `objective`, `data_seed` and `start` (see ComposerReplicationTrainer), and

    progress       fields of the `trainer_state` that rewards get, from the run; None: the state of this trainer
    reward_calls   how rewards are called (inner/usercode/reward_calls.py); None: call once; a bad value raises
    engine_dtype   dtype of vLLM, if `args` use it (inner/rollouts/engine.py); None: the model's own

    For subclasses:
    _rewards   rewards of the last generation, one per rollout
    _completions  completions of the last generation: messages, or texts
    """

    reads_turns = False  # whether the subclass needs _rewards and _completions

    def __init__(
        self,
        *args: Any,
        objective: str | None = None,
        data_seed: int | None = None,
        start: int = 0,
        share: Share | None = None,
        reward_calls: RewardCalls | None = None,
        engine_dtype: str | None = None,
        **kwargs: Any,
    ) -> None:
        tokenizer, uses_tools = kwargs.get("processing_class"), kwargs.get("tools") or kwargs.get("environment_factory")
        if uses_tools and not getattr(tokenizer, "response_template", True):
            from inner.rollouts.call_forms import set_call_form

            set_call_form(tokenizer)
        instead: AbstractContextManager[None] = nullcontext()
        if any(getattr(each, "use_vllm", False) for each in (*args, *kwargs.values())):
            from inner.rollouts.engine import engine_instead

            instead = engine_instead(engine_dtype)
        with instead:
            super().__init__(*args, **kwargs)
        sample_as_asked(self.accelerator.unwrap_model(self.model))
        for model in filter(None, (self.model, self.ref_model)):
            name_parts(self.accelerator.unwrap_model(model))
            number_positions(self.accelerator.unwrap_model(model))
        self._reward_calls = reward_calls
        self._own_columns: dict[str, Any] = {}  # for rewards: `completion`, which TRL does not pass on; the run's state
        self.progress: Progress = None
        weighted = zip(self.reward_funcs, self.reward_weights.tolist(), strict=True)
        self.reward_funcs = [self._guarded(*each) for each in weighted]
        self._apply_objective(objective)
        self._rewards: list[float] = []
        self._completions: Any = []
        self.share = Share(data_seed) if share is None and data_seed is not None else share
        self.start_at(start)
        self._cache_schemas()

    # the parts of an objective that TRL's loss lacks

    def _apply_objective(self, objective: str | None) -> None:
        arguments: Any = self.args
        if objective is not None:
            check_settings(objective, vars(arguments))
        self.dynamic_sampling: int = getattr(arguments, "dynamic_sampling", 0)
        if tokens := getattr(arguments, "soft_overlong_tokens", 0):
            self._add_reward(get_soft_overlong_punishment(arguments.max_completion_length, tokens))

    def _add_reward(self, reward: Any) -> None:
        self.reward_funcs = [*self.reward_funcs, reward]
        self.reward_func_names.append(reward.__name__)
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_weights = torch.cat([self.reward_weights, self.reward_weights.new_ones(1)])

    def _policy_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        if self.loss_type == "gmpo":  # TRL's trainer for it differs only in this method
            from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

            return GMPOTrainer._compute_loss(cast(Any, self), model, inputs)
        return super()._compute_loss(model, inputs)

    # the data order

    def start_at(self, inner_step: int) -> None:
        """Set TRL's micro-batch counter, which decides when to generate. So a later session generates at the same inner
        steps as the first session; prompts, refills and pairs follow from the counter, too."""
        self._step = inner_step * cast(Any, self.args).gradient_accumulation_steps

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        if self.share is None:
            return super()._get_train_sampler(dataset)
        rows: Any = self.train_dataset if dataset is None else dataset
        return GenerationSampler(self, len(rows), self.share)

    # 1. read the rewards

    def _guarded(self, reward: Any, weight: float) -> Any:
        if self._reward_calls is not None:
            return self._reward_calls.wrap_reward(reward, weight, self._own_columns)
        from inner.usercode.userfiles import guard_answers

        return guard_answers(reward, self._own_columns)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        own = {"completion": [row["completion"] for row in inputs]} if "completion" in inputs[0] else {}
        state = {} if self.progress is None else {"trainer_state": TrainerState(**cast(Any, self.progress()))}
        self._own_columns.clear()
        self._own_columns.update(own, **state)
        by_function = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards_by_function = by_function
        if self.reads_turns:
            self._rewards = total_rewards(by_function, self.reward_weights).tolist()
            self._completions = completions
        return by_function

    def _settle_rewards(self, rewards_B_F: Tensor) -> Tensor:
        counted_F = self.reward_weights != 0
        if getattr(self.args, "soft_overlong_tokens", 0):
            counted_F[-1] = False  # the length penalty alone, or a reward that is only logged, is not a known reward
        rewards_B_F[rewards_B_F[:, counted_F].isnan().all(dim=1)] = torch.nan
        if self._reward_calls is None:
            return rewards_B_F
        settled = self._reward_calls.settle(rewards_B_F, self.reward_weights, self._group_size())
        self._record_metric(BROKEN, self._reward_calls.broken.share)
        return settled

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with training's dtype of products. With LoRA, TRL uses float32 even under bfloat16 autocast."""
        if self.replayed is not None:
            return self.replayed.first_turns
        autocast = nullcontext() if self.use_vllm else self.accelerator.autocast()
        with self.turn(False), without_dropout(self.model), autocast:
            return super()._generate_single_turn(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Compute π_old without dropout, because the policy that sampled had no dropout; only the loss has dropout."""
        with self.turn(False), nullcontext() if torch.is_grad_enabled() else without_dropout(self.model):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    # 2. attach the lessons to the batch

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = self._generate_rollouts(inputs)
        if self._mode() == "eval":
            return batch
        if self.dynamic_sampling:
            from inner.rollouts.dynamic import refilled

            batch = refilled(self, batch)
        if self._reward_calls is not None:
            self._reward_calls.check_known(self.reward_func_names)
        return batch

    def _generate_rollouts(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self._silence_equal_groups(batch["advantages"])
        if "importance_sampling_ratio" in batch:
            from inner.rollouts.engine import masked_share

            self._record_metric(MASKED, masked_share(batch))
        return batch

    def _silence_equal_groups(self, advantages_B: Tensor) -> None:
        """Make advantages exactly 0 if a group's known rewards are equal, and record the share of such groups.

        TRL's mean in float32 leaves 1e-8 and more, and Adam would scale such a gradient to a step of full size."""
        values_B_C = self._rewards_by_function * self.reward_weights.to(self._rewards_by_function)
        if self.multi_objective_aggregation == "sum_then_normalize":
            values_B_C = total_rewards(self._rewards_by_function, self.reward_weights)[:, None]
        values_G_K_C = values_B_C.unflatten(0, (-1, self._group_size()))
        low_G_C, high_G_C = values_G_K_C.nan_to_num(torch.inf).amin(1), values_G_K_C.nan_to_num(-torch.inf).amax(1)
        same_G = (low_G_C >= high_G_C).all(1) & (low_G_C == high_G_C).any(1)
        self._metrics[self._mode()]["frac_reward_zero_std"][-1] = same_G.float().mean().item()
        first = self.accelerator.process_index * len(advantages_B)  # rewards are those of all processes
        same_B = same_G.repeat_interleave(self._group_size())[first : first + len(advantages_B)]
        advantages_B[same_B] = 0.0

    def _group_size(self) -> int:
        return cast(int, self.num_generations if self._mode() == "train" else self.num_generations_eval)

    def reward_completions(self, rows: list[dict[str, Any]]) -> Tensor:
        """Generate a completion per row with the current weights; return rewards (rows, functions), NaN if unknown."""
        with self._reward_calls.uncounted() if self._reward_calls is not None else nullcontext():
            super()._generate_and_score_completions(rows)
        return self._rewards_by_function

    # metrics and templates

    def _record_metric(self, name: str, value: float) -> None:
        # Append only: self.log() inside the loss would clear all other metrics.
        self._metrics[self._mode()][name].append(float(value))

    def _metric_counts(self) -> dict[str, int]:
        return {name: len(values) for name, values in self._metrics[self._mode()].items()}

    def _forget_metrics(self, counts: dict[str, int]) -> None:
        """Leave out the metrics recorded since `_metric_counts`, because the loss does not use their rollouts."""
        for name, values in self._metrics[self._mode()].items():
            del values[counts.get(name, 0) :]

    def _mode(self) -> str:
        return "train" if cast(Any, self.model).training else "eval"

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._record_metric("grad_norm", float(norm))
        return norm

    def _render_ids(self, messages: list[dict[str, Any]], opened: bool, tools: Any = None) -> list[int]:
        return render_ids(self.processing_class, messages, opened=opened, tools=tools, **self._template_options())


class GenerationSampler(Sampler):
    """Yield prompt indices, beginning at the trainer's current micro-batch.

    A generation's prompts are yielded once per micro-batch that it serves; TRL uses the first and reads the others from
    its buffer. The sampler is endless, because an inner loop has no last step."""

    def __init__(self, trainer: Any, n_prompts: int, share: Share) -> None:
        self.trainer = trainer
        self.at = prompt_order(n_prompts, share)

    def __iter__(self) -> Iterator[int]:
        args: Any = self.trainer.args
        repeats = args.num_generations
        per_generation = args.generation_batch_size // repeats
        served = args.steps_per_generation * self.trainer.num_iterations
        for micro in itertools.count(self.trainer._step):
            first = micro // served * per_generation
            for position in range(first, first + per_generation):
                yield from itertools.repeat(self.at(position), repeats)

    def __len__(self) -> int:
        return 2**40


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Turn dropout off inside a `with`, but keep model.training, by which TRL knows training from evaluation."""
    modes = [(part, part.training) for part in model.modules() if part is not model]
    try:
        for part, _ in modes:
            part.training = False
        yield
    finally:
        for part, mode in modes:
            part.training = mode
