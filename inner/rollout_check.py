"""Can I believe this rollout?   Two checks of what somebody else's engine says that it sampled.

    tokens, claimed log-probs ──▶ one forward of the model that they should come from
        agreement   median over 32 positions of exp|log π_claimed − log π| − 1 ≤ .10     are the log-probs the model's?
        surprise    z = Σ (−log π(token) − H(π)) / √Σ Var(log π),  |z| ≤ 5               are the tokens drawn from it?

Agreement is the check of grail's validators (one-covenant/grail, "median importance ratio").  It finds another model,
precision or temperature where the worker sends the numbers that it sampled with.  A worker that asks the right model
for the numbers afterwards passes it, and is found by surprise: tokens drawn from π have, on average, the entropy of π
as their surprisal, whatever π is; H and the variance are exact, from the same forward.

Positions are chosen by the reader's seed, which a worker must not know before it has answered.

Not promised: a proof.  A worker who samples from the right model and keeps only what pays is not found (count how many
it was asked for), nor is one that changes few tokens; top-p, top-k and greedy decoding are not sampling from π, and
surprise calls them out.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

POSITIONS = 32
TOLERANCE = 0.10  # grail's; its worst honest rollout of 430,650 on three kinds of GPU had 0.066
SIGMAS = 5.0  # z of an honest worker has a longer tail than the normal: a rare token surprises much


@dataclass(frozen=True)
class RolloutCheck:
    """What was found of one rollout, or of several of one worker together.

    disagreement: median of exp|Δ log π| − 1.   surprise: z.   positions, tokens: how many each is of.
    """

    disagreement: float
    surprise: float
    positions: int
    tokens: int
    tolerance: float = TOLERANCE
    sigmas: float = SIGMAS

    @property
    def doubts(self) -> list[str]:
        """In words; empty: believed."""
        found: list[str] = []
        if not self.disagreement <= self.tolerance:
            found.append(
                f"its log-probs are not the model's: exp|Δ| − 1 is {self.disagreement:.3f} in the median of "
                f"{self.positions} positions, at most {self.tolerance:g} is believed (another model, precision or "
                "temperature)"
            )
        if not abs(self.surprise) <= self.sigmas:
            way = "likelier" if self.surprise < 0 else "less likely"
            found.append(
                f"its tokens are {way} than draws from the model would be: {self.surprise:+.1f} standard deviations "
                f"over {self.tokens} tokens (another temperature or model, truncated sampling, or a choice among many)"
            )
        return found


@torch.no_grad()
def check_rollouts(
    model: Any,
    rollouts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]],
    *,
    temperature: float = 1.0,
    seed: int = 0,
    positions: int = POSITIONS,
    tolerance: float = TOLERANCE,
    sigmas: float = SIGMAS,
) -> RolloutCheck:
    """Check the rollouts of one worker together; one forward each.

    model: a causal language model in eval mode, with the weights that the worker was asked to use.
    rollouts: (prompt token ids, completion token ids, log-prob of each completion token at that temperature).
    positions: of all completions together, chosen by `seed`.   Raises ValueError where lengths do not fit, or nothing
    was said.
    """
    differences: list[float] = []
    surplus = variance = 0.0
    for prompt, completion, claimed in rollouts:
        if not prompt or not completion or len(completion) != len(claimed):
            raise ValueError(
                f"a rollout has {len(prompt)} prompt tokens, {len(completion)} completion tokens and {len(claimed)} "
                "log-probs; it needs a prompt, and as many log-probs as completion tokens"
            )
        logps, entropy, spread = _token_statistics(model, prompt, completion, temperature)
        differences += (logps - torch.tensor(claimed, dtype=torch.float64)).abs().tolist()
        surplus += float((-logps - entropy).sum())
        variance += float(spread.sum())
    if not differences:
        raise ValueError("there is no rollout to be checked")
    chosen = random.Random(seed).sample(differences, min(positions, len(differences)))
    return RolloutCheck(
        disagreement=math.expm1(min(700.0, median(chosen))) if not any(map(math.isnan, chosen)) else math.nan,
        surprise=surplus / math.sqrt(max(variance, 1e-12)),
        positions=len(chosen),
        tokens=len(differences),
        tolerance=tolerance,
        sigmas=sigmas,
    )


def _token_statistics(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log π of each completion token, the entropy there, and the variance of log π: (T,) each, fp64."""
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature
    every = logits.log_softmax(-1)
    share = every.exp()
    finite = every.masked_fill(share == 0, 0.0)  # 0 · log 0 = 0
    entropy = -(share * finite).sum(-1)
    spread = (share * finite.square()).sum(-1) - entropy.square()
    logps = every.gather(-1, torch.tensor(completion, device=ids.device)[:, None])[:, 0]
    return logps.cpu(), entropy.cpu(), spread.clamp(min=0.0).cpu()
