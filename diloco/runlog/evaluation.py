"""Read held-out evaluations from a run's log: the exact mean, its standard error, the number of prompts.

    events "evaluated", one per replica and step   step 5, share 1 of 3: greedy reward [75 prompts, Σ = 24.5, Σ² = 20.1]
      └─▶ one per share ─▶ Σ over shares ─▶ mean = Σ / n,   se = √((Σ² − n·mean²) / (n·(n − 1)))

The standard error is over prompts: the samples of one prompt are similar, so only their mean counts.
Pure functions, without torch.

Not promised: that a log is true (diloco/process/journal.py).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rendezvous.records.records import Count, Step
from rendezvous.records.schema import from_json

WHOLE = 0.9  # an evaluation with at least this share of the largest number of prompts counts as complete
KINDS = ("greedy", "sampled")  # the first kind that was measured is the headline


@dataclass(frozen=True)
class _Share:
    """An event with the scores of one replica.   greedy, sampled: name -> [prompts, Σ, Σ²]."""

    step: Step
    share: Count
    shares: Count
    prompts: Count
    total: Count
    greedy: dict[str, Any] = field(default_factory=dict[str, Any])
    sampled: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Score:
    """A mean over `prompts` held-out prompts, and its standard error (nan for one prompt)."""

    mean: float
    error: float
    prompts: int


@dataclass(frozen=True)
class Evaluation:
    """The scores of θ_step.   total: number of held-out prompts.   scores: kind -> name of the reward -> Score."""

    step: int
    total: int
    scores: Mapping[str, Mapping[str, Score]]

    @property
    def rewards(self) -> list[tuple[str, Score]]:
        """(kind, score of the whole reward) for each measured kind."""
        return [(kind, self.scores[kind]["reward"]) for kind in KINDS if "reward" in self.scores.get(kind, {})]

    @property
    def headline(self) -> tuple[str, Score]:
        """The greedy score if it was measured, else the sampled one."""
        return self.rewards[0]


def read_evaluations(events: Iterable[Mapping[str, Any]]) -> list[Evaluation]:
    """Return all evaluated steps, in order.  Skip events that are not valid."""
    by_step = defaultdict[int, list[_Share]](list)
    for event in events:
        if event.get("event") == "evaluated" and (share := _decode_share(event)) is not None:
            by_step[share.step].append(share)
    found = [_combine_shares(step, shares) for step, shares in sorted(by_step.items())]
    return [evaluation for evaluation in found if evaluation.rewards]


def best_evaluation(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the highest headline, the earliest of equal evaluations; None if there are none.

    An evaluation that was cut short does not count beside complete evaluations: its few prompts may be easy.
    """
    most = max((e.headline[1].prompts for e in evaluations), default=0)
    whole = [e for e in evaluations if e.headline[1].prompts >= WHOLE * most]
    return max(whole, key=lambda e: (e.headline[1].mean, -e.step), default=None)


def evaluation_words(evaluations: Sequence[Evaluation]) -> str:
    """Return "@8: greedy 0.316 ± 0.011, sampled 0.307 ± 0.011, 225 prompts" for step 8; "" without evaluations."""
    if not evaluations:
        return ""
    newest = evaluations[-1]
    numbers = ", ".join(f"{kind} {score_words(score)}" for kind, score in newest.rewards)
    return f"@{newest.step}: {numbers}, {prompts_words(newest)}"


def evaluation_dict(evaluation: Evaluation) -> dict[str, Any]:
    """Return plain data: {"step", "total", "greedy": {"reward": {"mean", "error", "prompts"}}, …}."""
    scores = {
        kind: {name: _finite(vars(score)) for name, score in names.items()} for kind, names in evaluation.scores.items()
    }
    return {"step": evaluation.step, "total": evaluation.total, **scores}


def _finite(numbers: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in numbers.items()}


def score_words(score: Score) -> str:
    return f"{score.mean:.3f}" if math.isnan(score.error) else f"{score.mean:.3f} ± {score.error:.3f}"


def prompts_words(evaluation: Evaluation) -> str:
    """Return "225 prompts", or "150/225 prompts" if a replica was lost."""
    scored = evaluation.headline[1].prompts
    return f"{scored} prompts" if scored == evaluation.total else f"{scored}/{evaluation.total} prompts"


def _decode_share(event: Mapping[str, Any]) -> _Share | None:
    try:
        share = from_json(_Share, {k: v for k, v in event.items() if k in _Share.__dataclass_fields__})
        for kind in KINDS:
            for sums in getattr(share, kind).values():
                _check_sums(sums, share.prompts)
    except ValueError:
        return None
    return share if share.share < share.shares and share.prompts <= share.total else None


def _check_sums(sums: Any, most: int) -> None:
    if not (isinstance(sums, list) and len(sums) == 3 and all(isinstance(v, int | float) for v in sums)):
        raise ValueError(f"it must have three numbers; found {sums!r:.80}")
    if not 0 <= sums[0] <= most or not all(math.isfinite(v) for v in sums):
        raise ValueError("it counts more prompts than it scored")


def _combine_shares(step: int, shares: Sequence[_Share]) -> Evaluation:
    """Combine one event per share, because a restarted replica may have scored the same prompts again."""
    by_split = defaultdict[tuple[int, int], dict[int, _Share]](dict)
    for share in shares:
        split = by_split[share.shares, share.total]
        if share.share not in split or share.prompts > split[share.share].prompts:
            split[share.share] = share
    (_, total), chosen = max(by_split.items(), key=lambda item: sum(s.prompts for s in item[1].values()))
    scores = {kind: _scores([getattr(share, kind) for share in chosen.values()]) for kind in KINDS}
    return Evaluation(step, total, {kind: names for kind, names in scores.items() if names})


def _scores(shares: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Score]:
    names = sorted({name for share in shares for name in share})
    sums = {name: [math.fsum(share[name][i] for share in shares if name in share) for i in range(3)] for name in names}
    return {name: _score(*of_name) for name, of_name in sums.items() if of_name[0]}


def _score(count: float, total: float, squares: float) -> Score:
    mean = total / count
    variance = max(0.0, squares - count * mean * mean) / (count - 1) if count > 1 else math.nan
    return Score(mean, math.sqrt(variance / count), int(count))
