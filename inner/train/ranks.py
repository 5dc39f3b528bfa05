"""Runs the RL inner loop on one of K ranks: TRL's own rules deal one generation's rows to the ranks.

    a generation   prompts of K · batch rows ──▶ rank 0: the first batch · rank 1: the second · …    generate, reward
                   rewards of all ranks ──gather──▶ one tensor on each: groups, advantages ──▶ each rank's own rows
    a step         whole models on GPUs are in shards (FSDP2), adapters and models on CPUs are copied (DDP)

A slot of K ranks reads the same prompts, in the same order, as one rank with K times the batch.  Each rank draws noise
from its own seed, so the completions differ from the completions of one rank.

If only one rank knows a fact (a failed reward, a completion that broke a judge), it tells all ranks before they act.

rank_channels.py has [inner.sdpo], [inner.replay] and [inner.process]; it is imported only if a run uses them.

Not promised: vLLM, dynamic sampling (refused by name before the start).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.tensor import DTensor

from inner.models.shards import whole_weights
from inner.settings.inner import InnerConfig, Progress, Theta
from inner.train.grpo import GrpoLoop
from inner.train.policy import PolicyTrainer
from inner.train.task import Task
from inner.usercode.attempts import Scored
from inner.usercode.reward_calls import RewardCalls, reward_name

SHARDED: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True}}


class RankRewardCalls(RewardCalls):
    """RewardCalls whose batches are the rows of all ranks, in the ranks' order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._called: dict[str, tuple[Any, Scored]] = {}  # reward's name -> its result since the last `settle`

    def _refuse_rewardless(self, reward: Any, scored: Scored) -> None:
        self._called[reward_name(reward)] = reward, scored

    def _refuse_batch(self) -> None:
        """Raise RewardFailed, on all ranks, if some reward gave no rank a number."""
        here = {name: len(scored.failed) < len(scored.values) for name, (_, scored) in self._called.items()}
        numbered = {name for found in gather_object([here]) for name, has_any in found.items() if has_any}
        for name, (reward, scored) in sorted(self._called.items()):
            told = replace(scored, failed=()) if name in numbered else scored
            super()._refuse_rewardless(reward, told)
        self._called = {}

    def settle(self, rewards_B_F: Tensor, weights_F: Tensor, group: int) -> Tensor:
        self._refuse_batch()
        state = PartialState()
        first = state.process_index * (len(rewards_B_F) // state.num_processes)
        rows = self._failed | self.broken.blamed
        known = [(first + row, row in self._failed, row in self.broken.blamed) for row in rows]
        everywhere: list[tuple[int, bool, bool]] = gather_object(known)
        self._failed = {row for row, failed, _ in everywhere if failed}
        self.broken.blamed = {row for row, _, blamed in everywhere if blamed}
        return super().settle(rewards_B_F, weights_F, group)


class RankLoop(GrpoLoop):
    """The InnerLoop of loop = "grpo" on one of several ranks."""

    calls = RankRewardCalls

    def __init__(self, config: InnerConfig, model: Any, *args: Any, **kwargs: Any) -> None:
        self.placement = {} if config.lora is not None else SHARDED
        super().__init__(config, model, *args, **kwargs)

    def _trainer_kind(self, task: Task) -> tuple[type[PolicyTrainer], dict[str, Any]]:
        kind, given = super()._trainer_kind(task)
        if kind is not PolicyTrainer:
            from inner.train.rank_channels import RankReplicationTrainer as kind
        return kind, given

    def place(self) -> None:
        """Place the parameters on the ranks now, for the outer loop. Trainer.train would do so later."""
        trainer: Any = self.trainer
        accelerator = trainer.accelerator
        ready = accelerator.prepare(trainer.model, self.optimizer)
        prepare = accelerator.prepare

        def prepare_others(*objects: Any, **options: Any) -> Any:
            return ready if objects and objects[0] is trainer.model else prepare(*objects, **options)

        accelerator.prepare = prepare_others
        if self.config.channels.sdpo.is_used:
            trainer.place_teacher()

        def generate_whole(*arguments: Any) -> Any:
            with whole_weights(trainer.model):
                return type(trainer)._generate(trainer, *arguments)  # looked up now: recorded.py changes the class

        trainer._generate = generate_whole
        # else sharded ranks wait for each other's tokens, and wait forever for a rank that calls no tool
        trainer.model.generate = partial(trainer.model.generate, synced_gpus=False)

    def follow(self, step: Callable[[], int], theta: Theta, replicas: Callable[[], int], at: Progress = None) -> None:
        super().follow(step, theta, replicas, at)
        if any(isinstance(p, DTensor) for p in self.model.parameters()):
            self._theta = None  # evaluations follow an outer step of the whole model, so the live weights are θ

    def score(self, rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        """Score a part of the rows on each rank. Return the scores of all rows on every rank."""
        state = PartialState()
        part = -(-len(rows) // state.num_processes)
        padded = [*rows, *[rows[-1]] * (part * state.num_processes - len(rows))]
        mine = padded[state.process_index * part :][:part]
        found = super().score(mine, greedy=greedy, seed=seed + state.process_index)
        return {name: numbers[: len(rows)] for name, numbers in found.items()}
