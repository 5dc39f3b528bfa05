"""The RL inner loop on one of K ranks: TRL's own rules deal one generation to them.

    a generation   prompts of K · batch rows ──▶ rank 0: the first batch · rank 1: the second · …    generate, reward
                   rewards of all ranks ──gather──▶ one tensor on each: groups, advantages ──▶ each rank's own rows
    a step         gradients are averaged (DDP), so each rank takes the same step

A slot of K ranks reads the prompts, in the order, that one rank with K times the batch reads.  Ranks draw their noise
from seeds of their own, so completions differ from that one rank's.

What is known on one rank alone reaches the others before it counts: failed rewards, completions that broke a judge.

Not promised: sdpo, replay and process channels, vLLM, dynamic sampling (diloco/run/ranks.py refuses them by name); a
reward's pauses and events of ranks other than 0 in the run's log, as only rank 0 has a session.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from inner.train.grpo import GrpoLoop
from inner.usercode.reward_calls import RewardCalls


class RankRewardCalls(RewardCalls):
    """RewardCalls whose batches are the rows of all ranks, in the ranks' order."""

    def settle(self, rewards_B_F: Tensor, weights_F: Tensor, group: int) -> Tensor:
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

    def score(self, rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        """Score on all ranks, each its part. Return the scores of all rows on each of them."""
        state = PartialState()
        part = -(-len(rows) // state.num_processes)
        padded = [*rows, *[rows[-1]] * (part * state.num_processes - len(rows))]
        mine = padded[state.process_index * part :][:part]
        found = super().score(mine, greedy=greedy, seed=seed + state.process_index)
        return {name: numbers[: len(rows)] for name, numbers in found.items()}
