"""Checks a rollout from another party's engine: its tokens, and the log-probs that the engine claims.

    tokens, claimed log-probs ──▶ one forward of the model that should have made them
        agreement   median over 32 positions of exp|log π_claimed − log π| − 1 ≤ .10     are the log-probs the model's?
        surprise    z = Σ (−log π(token) − H(π)) / √Σ Var(log π),  |z| ≤ 5               are the tokens drawn from it?
                    or a chance of more than e^(−5²/2): min over s of Π E[exp s(−log π − H)] · exp(−s·Σ…)    (Chernoff)

Agreement is the check of grail's validators (one-covenant/grail, "median importance ratio").  Agreement detects another
model, precision or temperature if the worker sends the log-probs that it sampled with.  A worker that computes
log-probs with the right model afterwards passes this check; surprise detects this: tokens drawn from any π have, on
average, a surprisal equal to the entropy of π.  H and the variance are exact, from the same forward.

z alone is not enough if π is nearly certain of most tokens: then one rare token of an honest worker is worth many
standard deviations (at .001 per token, one honest worker in a hundred has |z| > 5).  So beyond 5, a worker is doubted
only if Chernoff's bound, valid for every π, gives its z at most the chance that a normal variable has there, 4e-6.

The checker's seed chooses the positions. A worker must not know the seed before it has answered.

Not promised: a proof.  The checks do not find a worker that samples from the right model but keeps only rollouts with
reward (so count the requested rollouts), or a worker that changes few tokens.  Top-p, top-k and greedy decoding do not
sample from π, so surprise reports them.
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
TOLERANCE = 0.10  # grail's limit; of 430,650 honest rollouts on three kinds of GPU the worst had 0.066
SIGMAS = 5.0
MISSING = 0.05  # share of the claimed log-probs that may be NaN: vLLM has no log-prob for a few tokens
TILTS = tuple(2.0**k for k in range(-8, 3))  # tried values of s; 1 is the best s for a normal variable


@dataclass(frozen=True)
class RolloutCheck:
    """The result for one rollout, or for several rollouts of one worker together.

    disagreement: median of exp|Δ log π| − 1.   surprise: z.   positions, tokens: how many these checks compared.
    chance: upper bound for the probability of such a z with draws from the model; 1 if |z| ≤ sigmas.
    """

    disagreement: float
    surprise: float
    positions: int
    tokens: int
    tolerance: float = TOLERANCE
    sigmas: float = SIGMAS
    chance: float = 0.0

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the rollout, as texts; [] without a reason."""
        found: list[str] = []
        if not self.disagreement <= self.tolerance:
            found.append(
                f"its log-probs are not the model's: exp|Δ| − 1 is {self.disagreement:.3f} in the median of "
                f"{self.positions} positions, and at most {self.tolerance:g} is accepted (possible causes: another "
                "model, precision or temperature)"
            )
        if not abs(self.surprise) <= self.sigmas and not self.chance > math.exp(-(self.sigmas**2) / 2):
            way = "likelier" if self.surprise < 0 else "less likely"
            found.append(
                f"its tokens are {way} than draws from the model would be: {self.surprise:+.1f} standard deviations "
                f"over {self.tokens} tokens, chance below {self.chance:.0e} (possible causes: another temperature or "
                "model, truncated sampling, or a choice among many)"
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
    """Check the rollouts of one worker together: one forward per rollout, and a second one if |z| is above `sigmas`.

    model: a causal language model in eval mode, with the weights that the worker should have used.
    rollouts: (prompt token ids, completion token ids, log-prob of each completion token at that temperature; NaN if the
    engine gave no log-prob: at most a share MISSING may be NaN).
    positions: number of checked positions, of all completions together; `seed` chooses them.   Raises ValueError if
    lengths do not fit, a token is not in the vocabulary, or there is no rollout.
    """
    known = _vocabulary(model)
    differences: list[float] = []
    told: list[float] = []
    surplus = variance = 0.0
    for prompt, completion, claimed in rollouts:
        if not prompt or not completion or len(completion) != len(claimed):
            raise ValueError(
                f"a rollout has {len(prompt)} prompt tokens, {len(completion)} completion tokens and {len(claimed)} "
                "log-probs; it needs a prompt, and as many log-probs as completion tokens"
            )
        if wrong := [token for token in (*prompt, *completion) if not 0 <= token < known]:
            raise ValueError(f"a rollout has the token {wrong[0]}; the model has {known:,.0f} tokens, numbered from 0")
        logps, entropy, spread = _token_statistics(model, prompt, completion, temperature)
        differences += (logps - torch.tensor(claimed, dtype=torch.float64)).abs().tolist()
        told += claimed
        surplus += float((-logps - entropy).sum())
        variance += float(spread.sum())
    if not differences:
        raise ValueError("no rollout was given; give at least one")
    z = surplus / math.sqrt(max(variance, 1e-12))
    chance = 1.0
    if not abs(z) <= sigmas:
        chance = _chance(model, [(p, c) for p, c, _ in rollouts], temperature, surplus=surplus, variance=variance)
    compared = _compared(differences, told)
    chosen = random.Random(seed).sample(compared, min(positions, len(compared)))
    return RolloutCheck(
        disagreement=math.expm1(min(700.0, median(chosen))) if not any(map(math.isnan, chosen)) else math.nan,
        surprise=z,
        positions=len(chosen),
        tokens=len(differences),
        tolerance=tolerance,
        sigmas=sigmas,
        chance=chance,
    )


def _compared(differences: Sequence[float], told: Sequence[float]) -> Sequence[float]:
    """Return the differences of the tokens with a claimed log-prob; all differences if too many claims are missing."""
    known = [off for off, claim in zip(differences, told, strict=True) if claim == claim]
    return known if len(differences) - len(known) <= MISSING * len(differences) else differences


def _vocabulary(model: Any) -> float:
    """Return the vocabulary's size, to refuse other tokens before a GPU gets them; ∞ if the model has no table."""
    table = getattr(model, "get_input_embeddings", None)
    return math.inf if table is None else table().weight.shape[0]


def _chance(
    model: Any,
    rollouts: Sequence[tuple[Sequence[int], Sequence[int]]],
    temperature: float,
    *,
    surplus: float,
    variance: float,
) -> float:
    """Return Chernoff's bound: P(Σ X ≥ x) ≤ exp(Σ log E[exp s·X] − s·x), s > 0, X = −log π − H; for x < 0, s < 0."""
    if not math.isfinite(surplus):
        return 0.0  # a token that the model never draws
    tilts = torch.tensor(TILTS, dtype=torch.float64) * surplus / max(variance, 1e-12)
    exponents = -tilts * surplus
    for prompt, completion in rollouts:
        every = _log_softmax(model, prompt, completion, temperature)
        entropy = _entropy(every)
        for i, s in enumerate(tilts.tolist()):
            scaled = torch.where(every == -math.inf, -math.inf, (1 - s) * every)
            exponents[i] += float((scaled.logsumexp(-1) - s * entropy).sum())
    return math.exp(min(0.0, float(exponents.nan_to_num(0.0).min())))


def _token_statistics(
    model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log π of each completion token, the entropy there, and the variance of log π: (T,) each, fp64."""
    every = _log_softmax(model, prompt, completion, temperature)
    entropy = _entropy(every)
    share = every.exp()
    spread = (share * every.masked_fill(share == 0, 0.0).square()).sum(-1) - entropy.square()
    logps = every.gather(-1, torch.tensor(completion, device=every.device)[:, None])[:, 0]
    return logps.cpu(), entropy.cpu(), spread.clamp(min=0.0).cpu()


def _log_softmax(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> Tensor:
    """Return log π of every token at each position of the completion: (T, V), fp64."""
    ids = torch.tensor([[*prompt, *completion]], device=model.device)
    return (model(input_ids=ids).logits[0, len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def _entropy(every: Tensor) -> Tensor:
    share = every.exp()
    return -(share * every.masked_fill(share == 0, 0.0)).sum(-1)  # 0 · log 0 = 0
