"""Computes the channels on one of K ranks: together the ranks act as one process with K times the batch.

    lessons     of this rank's own rollouts: all rollouts of a group are on one rank, so a rollout's siblings are, too
                (the scores of turns are also compared within a group)
    loss        each rank divides by its own rollouts, its own pairs, or the mean of all ranks' tokens
                gradients are averaged over the ranks, so the sum is divided by the number of all
    pairs       micro-batch m of rank r takes entries P·(K·m + r) … + P - 1 of the order that one process reads
    teacher     its weights change on all ranks at once: "ema" in each step, other teachers if any rank has a lesson

    ranks with lessons   │ teacher's forward │ student's logits │ loss
    a rank without any   │ the same on one token                │ 0 · loss      so all ranks gather and reduce alike

A rank in shards (FSDP2) holds all weights from the loss to the end of the backward pass, because the channels call the
backbone and the head by themselves (decision 086).

Not promised: shared hints, or one cost ceiling for all ranks (each rank asks about its own rollouts); the norm of a
channel's gradient over all ranks (the log has the mean of the ranks' norms).
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels.reference import ReplayPairs
from inner.channels.spans import Lesson
from inner.models.shards import whole_weights
from inner.replay.pairs import DPOPair
from inner.train.rank_teacher import RankTeacher
from inner.train.trainer import LESSONS, ComposerReplicationTrainer
from inner.usercode.reward_calls import StandaloneHost


class RankReplicationTrainer(ComposerReplicationTrainer):
    """A ComposerReplicationTrainer on one of several ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.report_to(StandaloneHost())  # rank 0 gets the run's host later
        self._held = ExitStack()

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Return all ranks' rewards. Keep the rewards of this rank's rollouts for its lessons."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        first = self.accelerator.process_index * len(prompts)
        self._rewards = self._rewards[first : first + len(prompts)]
        return rewards

    def _new_teacher(self, other: nn.Module | None) -> RankTeacher:
        student = self.accelerator.unwrap_model(self.model)
        return RankTeacher(self.channels.sdpo.teacher, student, self.channels.sdpo.ema_rate, other)

    def place_teacher(self) -> None:
        assert isinstance(self._teacher, RankTeacher)
        self._teacher.place()

    def _read_pairs(self, pairs: Sequence[DPOPair] | str | Path) -> ReplayPairs:
        student = self.accelerator.unwrap_model(self.model)
        home = next(student.parameters()).device
        student.to(self.accelerator.device)  # before its parameters are placed, a model for FSDP2 is on the CPU
        replay = super()._read_pairs(pairs)
        student.to(home)
        order, size, ranks = self._pair_at, self.channels.replay.batch_size, self.accelerator

        def at(position: int) -> int:
            micro, i = divmod(position, size)
            return order((micro * ranks.num_processes + ranks.process_index) * size + i)

        self._pair_at = at
        return replay

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._held:
            return super().training_step(*args, **kwargs)

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        self._held.enter_context(whole_weights(model))
        return super()._compute_loss(model, inputs)

    def _sdpo_loss(self, caught: list[Tensor], inputs: Any) -> Tensor:
        mine = float(sum(map(len, inputs[LESSONS])))
        known = torch.tensor([mine, super()._tokens_to_learn(inputs)], device=self.accelerator.device)
        means: Any = self.accelerator.reduce(known, "mean")
        lessons, self._tokens = means.tolist()
        if mine or not lessons:
            return super()._sdpo_loss(caught, inputs)
        without = [[Lesson(0, 1, [0, 0], (1,))], *([] for _ in inputs[LESSONS][1:])]
        return 0.0 * super()._sdpo_loss(caught, {**inputs, LESSONS: without})

    def _tokens_to_learn(self, inputs: Any) -> float:
        return self._tokens
