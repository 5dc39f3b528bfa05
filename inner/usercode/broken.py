"""Decide the reward of a completion that breaks its judge (the reward's code). A policy must not gain by that
(decision 065).

    inner.rewards.broken = "worst"    the rewards of its worst judged sibling; if all siblings are equal, of the batch's
                                      worst completion; if all the batch is equal, of the worst completion so far
                           -0.5       this number instead of the broken reward
                           "none"     unknown: no advantage, and no part in the group's mean

    scored.blamed, one reward ──note──▶ values      all rewards (B, F) ──settle──▶ (B, F)

Siblings must differ: if all of them are right, their worst reward would not punish the completion that broke its judge.

Not promised: that a completion is to blame; inner/usercode/attempts.py infers the blame from the results of the others.
"""

import torch
from torch import Tensor

from inner.usercode.attempts import Scored, Value

WORST, NONE = "worst", "none"


class BrokenRewards:
    """Rewards of one trainer's broken completions.   counts: "worst", "none" or a number.   share: the part of the last
    batch that broke its judge.   lowest: the total and the rewards of the worst judged completion so far."""

    def __init__(self, counts: str | float) -> None:
        self.counts = counts
        self.blamed: set[int] = set()  # blamed completions of the batch that is being scored
        self.lowest: tuple[float, Tensor | None] = (torch.inf, None)
        self.share = 0.0

    def note(self, scored: Scored) -> tuple[list[Value], set[int]]:
        """Return one reward's values for TRL, and the completions for which the reward has no value."""
        blamed, failed = set(scored.blamed), set(scored.failed)
        if self.counts == NONE:
            failed |= blamed
            return [None if i in blamed else value for i, value in enumerate(scored.values)], failed
        self.blamed |= blamed
        if isinstance(number := self.counts, str):
            return scored.values, failed
        known = [number if i in failed else min(number, value or 0.0) for i, value in enumerate(scored.values)]
        return [known[i] if i in blamed else value for i, value in enumerate(scored.values)], failed - blamed

    def settle(self, rewards_B_F: Tensor, weights_F: Tensor, group: int) -> Tensor:
        """Return the batch's rewards, with broken completions' rewards set; NaN if a completion has no reward."""
        blamed = sorted(self.blamed)
        self.blamed = set()
        self.share = len(blamed) / len(rewards_B_F)
        totals_B = (rewards_B_F * weights_F.to(rewards_B_F)).nansum(dim=1)
        totals_B = totals_B.masked_fill(rewards_B_F.isnan().all(dim=1), torch.nan)
        judged_B = totals_B.clone()
        judged_B[blamed] = torch.nan
        settled = rewards_B_F.clone()
        for row in blamed if self.counts == WORST else ():
            first = row // group * group
            worst, worst_F = self._worst_row(rewards_B_F, judged_B, slice(first, first + group))
            if worst_F is not None and not totals_B[row] <= worst:
                settled[row] = worst_F
        self.lowest = min(self.lowest, _lowest_row(rewards_B_F, judged_B), key=lambda found: found[0])
        return settled

    def _worst_row(self, rewards_B_F: Tensor, judged_B: Tensor, group: slice) -> tuple[float, Tensor | None]:
        """Return (total, rewards) for a broken completion of this group; (inf, None) if none was judged so far."""
        for near in (group, slice(None)):
            known = judged_B[near][~judged_B[near].isnan()]
            if len(known) and known.min() < known.max():
                return _lowest_row(rewards_B_F[near], judged_B[near])
        return min(_lowest_row(rewards_B_F, judged_B), self.lowest, key=lambda found: found[0])


def _lowest_row(rewards_B_F: Tensor, judged_B: Tensor) -> tuple[float, Tensor | None]:
    """Return the lowest total and its row of rewards; (inf, None) if all are NaN."""
    judged_B = judged_B.nan_to_num(torch.inf)
    at = int(judged_B.argmin())
    return (judged_B[at].item(), rewards_B_F[at].clone()) if judged_B[at] < torch.inf else (torch.inf, None)
