"""Convert the scores of single turns into advantages of the turns' tokens.

    reward    r_i    of rollout i           ─▶ A_i      TRL's, unchanged                                      (B,)
    scores    s_i,k  of its k-th turn       ─▶ z_i,k  = (s_i,k − mean) / std     over the k-th turns of i's group
                                               A_i,t  = A_i + w · z_i,k(t)       credit "turn"                (B, T)
                                               A_i,t  = A_i + w · Σ_{k ≥ k(t)} z_i,k      "rest"

"rest" is the process supervision of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.3); "turn" is turn-level credit
(arXiv 2505.11821). DeepSeekMath's mean is over all turns; ours is over the k-th turns only. So a turn gains
nothing from its position, and a rollout gains nothing from more turns. Scores are divided by a standard deviation
if TRL divides its advantages by one (scale_rewards).

A turn's score may also be a list with one number per token; then `k(t)` is the token. A turn has no z if its score is
None, and z = 0 if no other rollout of the group has a k-th turn. A rollout without a reward gets no scores.

Not promised: losses with one ratio and one advantage per sequence (GMPO): they refuse advantages of shape (B, T).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from inner.channels.lessons import Rollout
from inner.errors import InnerError
from inner.replay.actions import Message, action_text
from inner.replay.states import TraceState

EPSILON = 1e-4  # added to a standard deviation, as in TRL

TurnScore = float | None | Sequence[float]  # a turn's score: a number, None, or a number per token


@dataclass(frozen=True)
class ProcessReward:
    """Settings of a process reward.   score: rollouts -> a list of turn scores per rollout; or a ProcessHead.

    weight: w.   credit: "turn" or "rest"."""

    score: Any
    weight: float = 1.0
    credit: str = "turn"

    @property
    def name(self) -> str:
        return getattr(self.score, "__name__", type(self.score).__name__)


@dataclass(frozen=True)
class ScoredSpan:
    """One score, which counts for tokens start … end - 1 in turn `turn` of rollout `row`."""

    row: int
    turn: int
    start: int
    end: int
    score: float


# -------------------------------------------------------------------- from scores to advantages


def process_advantages(
    advantages_B: Tensor, steps: Sequence[ScoredSpan], *, group: int, width: int, process: ProcessReward, scale: str
) -> Tensor:
    """Return TRL's advantages plus the turns' advantages, (B, T).   width: T.   scale: TRL's scale_rewards."""
    added = torch.zeros(len(advantages_B), width, dtype=advantages_B.dtype)
    gains = standardise(steps, group, scale)
    later = defaultdict(float)  # row -> sum of a turn's gain and all later gains, for "rest"
    for step, gain in sorted(zip(steps, gains, strict=True), key=lambda pair: -pair[0].start):
        later[step.row] += gain
        added[step.row, step.start : step.end] = later[step.row] if process.credit == "rest" else gain
    if process.credit == "rest":
        _fill_unscored(added, steps, later)
    return advantages_B[:, None] + process.weight * added.to(advantages_B.device)


def _fill_unscored(added_B_T: Tensor, steps: Sequence[ScoredSpan], total: Mapping[int, float]) -> None:
    """For "rest": give tokens without a score the sum of all later gains, too."""
    for row in total:
        mine = sorted((step for step in steps if step.row == row), key=lambda step: step.start)
        before = 0
        for step in mine:
            added_B_T[row, before : step.start] = added_B_T[row, step.start]
            before = step.end


def standardise(steps: Sequence[ScoredSpan], group: int, scale: str) -> list[float]:
    """Return z of each score.   scale: "group", "batch" or "none", as TRL's scale_rewards."""
    cells: dict[tuple[int, int], list[ScoredSpan]] = defaultdict(list)
    for step in steps:
        cells[step.row // group, step.turn].append(step)
    measured = {at: _Cell.of(cell) for at, cell in cells.items()}
    everywhere = _spread([step.score for step in steps])
    gains = []
    for step in steps:
        cell = measured[step.row // group, step.turn]
        divisor = {"group": cell.spread + EPSILON, "batch": everywhere + EPSILON}.get(scale, 1.0)
        gains.append(0.0 if cell.rollouts == 1 else (step.score - cell.mean) / divisor)
    return gains


@dataclass(frozen=True)
class _Cell:
    """Statistics of the k-th turns of one group."""

    rollouts: int
    mean: float
    spread: float

    @classmethod
    def of(cls, steps: Sequence[ScoredSpan]) -> "_Cell":
        scores = [step.score for step in steps]
        return cls(len({step.row for step in steps}), fmean(scores), _spread(scores))


def _spread(scores: Sequence[float]) -> float:
    return stdev(scores) if len(scores) > 1 else 0.0


# -------------------------------------------------------------------- from the user's function to scores


def score_steps(process: ProcessReward, rollouts: Sequence[Rollout]) -> list[ScoredSpan]:
    """Ask for the scores and read them.   Raises InnerError for an answer that cannot be read."""
    known = [i for i, rollout in enumerate(rollouts) if not math.isnan(rollout.reward)]
    answers = process.score([rollouts[i] for i in known]) if known else []
    if not isinstance(answers, Sequence) or len(answers) != len(known):
        raise InnerError(_fault(process, f"answered {_size(answers)} for {len(known)} rollouts", "one list for each"))
    return [
        step
        for i, scores in zip(known, answers, strict=True)
        for step in _read_rollout(process, i, rollouts[i], scores)
    ]


def _read_rollout(process: ProcessReward, row: int, rollout: Rollout, scores: Any) -> list[ScoredSpan]:
    turns = rollout.turns
    if not isinstance(scores, Sequence) or len(scores) != len(turns):
        raise InnerError(
            _fault(process, f"answered {_size(scores)} for a rollout of {len(turns)} turns", "one for each")
        )
    steps = []
    for k, (turn, score) in enumerate(zip(turns, scores, strict=True)):
        if score is None:
            continue
        if isinstance(score, Sequence) or getattr(score, "ndim", 0):
            values = [float(value) for value in score]  # type: ignore[union-attr]
            if len(values) != turn.end - turn.start:
                raise InnerError(
                    _fault(
                        process, f"gave {len(values)} numbers for a turn of {turn.end - turn.start} tokens", "one each"
                    )
                )
            steps += [ScoredSpan(row, k, turn.start + i, turn.start + i + 1, value) for i, value in enumerate(values)]
        else:
            steps.append(ScoredSpan(row, k, turn.start, turn.end, float(score)))
    if wrong := [step.score for step in steps if not math.isfinite(step.score)]:
        raise InnerError(_fault(process, f"gave {wrong[0]} as a score", "a finite number, or None for 'cannot say'"))
    return steps


def _fault(process: ProcessReward, seen: str, wanted: str) -> str:
    return f"the process reward {process.name} {seen}. Return {wanted}."


def _size(answer: Any) -> str:
    return f"{len(answer)} entries" if isinstance(answer, Sequence) else f"a {type(answer).__name__}"


# -------------------------------------------------------------------- turns as states


def turn_states(rollout: Rollout) -> list[TraceState]:
    """Return one TraceState per turn, in the form of recorded traces: the messages before it and its action."""
    before = as_messages(rollout.row["prompt"], "user")
    written = as_messages(rollout.completion, "assistant")
    places = [at for at, message in enumerate(written) if message.get("role") == "assistant"]
    states: list[TraceState] = []
    for k, (turn, at) in enumerate(zip(rollout.turns, places, strict=False)):
        state: TraceState = {
            "state_id": f"turn-{k}",
            "state_messages": [*before, *written[:at]],
            "student_action": action_text(written[at]),
        }
        if rollout.tools:  # a teacher needs the schemas to make calls
            state["tools"] = [dict(tool) for tool in rollout.tools]
        if turn.error is not None:
            state["error"] = turn.error
        states.append(state)
    return states


def as_messages(content: Any, role: str) -> list[Message]:
    """Return a chat as it is, and a text as one message."""
    return [{"role": role, "content": content}] if isinstance(content, str) else [dict(m) for m in content]
