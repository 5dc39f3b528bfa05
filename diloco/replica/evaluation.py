"""Held-out evaluation inside a run: every replica answers its share of the prompts with the same θ.

    commit t ──▶ θ_{t+1} on all replicas that it lists ──▶ prompts i, i + n, i + 2n, … ──▶ event "evaluated" in the log
                 n replicas, in the order of their names       rewards: count, Σ, Σ²        read by runlog/evaluation.py

The evaluation needs no extra machine and no synchronisation: all replicas have the committed θ and the commit, which
determines the shares.  If a replica is lost during the evaluation, its share is missing, and the mean is over the
scored prompts.
The event reaches the bucket with the next heartbeat, long before the replica's next offer (decision 038).

Not promised: an evaluation of a step that the replica caught up or healed over, as it never had that θ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from diloco.process.session import Session
from diloco.run.config import derive_seed
from diloco.run.sections import EvalConfig

Row = dict[str, Any]
Sums = dict[str, list[float]]  # name -> [prompts, Σ of their means, Σ of the squares]


class Scorer(Protocol):
    def score(self, rows: Sequence[Row], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        """Return name -> one number per row, NaN if unknown."""
        ...


@dataclass(eq=False)
class Evaluator:
    """The evaluation by one replica.   rows: held-out prompts.   batch: prompts per call.   seed: the run's seed.

    stands_at: returns the run's committed outer step.   must_go: whether to stop; called between batches."""

    config: EvalConfig
    rows: list[Row]
    scorer: Scorer
    session: Session
    batch: int
    seed: int
    stands_at: Callable[[], int]
    must_go: Callable[[], bool]

    def __post_init__(self) -> None:
        self._looked_at = self.stands_at() or -1  # steps taken before this session do not count

    def is_due(self) -> bool:
        """Whether the run has reached a step with an evaluation. Called after every inner step, so it is cheap."""
        return self.stands_at() != self._looked_at and self.config.is_due(
            self.stands_at(), self.session.rv.wanted.steps
        )

    def evaluate(self) -> None:
        """Score this replica's share and log the sums."""
        step = self._looked_at = self.stands_at()
        share = share_of(self.session, step)
        if share is None:
            return
        clock = self.session.clock
        began = clock.now()
        mine = self.rows[share[0] :: share[1]]
        scored, found = self._score_share(step, mine)
        status = self.session.rv.members.status
        status.note, status.evaluates = "", False
        if not scored:
            return
        self.session.emit(
            "evaluated", step=step, share=share[0], shares=share[1], prompts=scored, total=len(self.rows),
            seconds=clock.now() - began, **found,
        )  # fmt: skip
        self.session.flush_soon()

    def _score_share(self, step: int, rows: list[Row]) -> tuple[int, dict[str, Sums]]:
        """Return how many rows were scored before this replica had to stop, and their sums by kind."""

        def may_go_on(scored: int) -> bool:
            status = self.session.rv.members.status
            status.note, status.evaluates = f"evaluates θ_{step}: {scored} of {len(rows)} prompts", True
            self.session.watchdog.resume()
            return not self.must_go()

        seed = derive_seed(self.seed, "eval", self.session.rv.slot, step)
        return score_prompts(self.scorer, rows, self.config, batch=self.batch, seed=seed, may_go_on=may_go_on)


def score_prompts(
    scorer: Scorer,
    rows: Sequence[Row],
    config: EvalConfig,
    *,
    batch: int,
    seed: int,
    may_go_on: Callable[[int], bool] = lambda scored: True,
) -> tuple[int, dict[str, Sums]]:
    """Return how many rows were scored, and kind -> name -> sums.

    may_go_on(rows scored so far): called before each batch; False ends the evaluation there."""
    values: dict[str, dict[str, list[float]]] = {}
    for start in range(0, len(rows), batch):
        if not may_go_on(start):
            return start, _sums_by_kind(values)
        scored = _score_batch(scorer, rows[start : start + batch], config, derive_seed(seed, start))
        for kind, scores in scored.items():
            for name, of_rows in scores.items():
                values.setdefault(kind, {}).setdefault(name, []).extend(of_rows)
    return len(rows), _sums_by_kind(values)


def _score_batch(
    scorer: Scorer, rows: Sequence[Row], config: EvalConfig, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Return kind -> name -> one number per row, the mean of its samples."""
    found: dict[str, dict[str, list[float]]] = {}
    if config.greedy:
        found["greedy"] = scorer.score(rows, greedy=True, seed=seed)
    seeds = [derive_seed(seed, n) for n in range(config.samples)]
    if samples := [scorer.score(rows, greedy=False, seed=seed) for seed in seeds]:
        found["sampled"] = {name: _means([sample[name] for sample in samples]) for name in samples[0]}
    return found


def share_of(session: Session, step: int) -> tuple[int, int] | None:
    """Return (i, n): this replica scores prompts i, i + n, …; None if it did not take part in θ_step.

    The commit of θ_step lists the participants. Without a commit (θ₀, no bucket), all wanted slots take part.
    """
    commit = session.rv.chain.read(step - 1) if step else None
    slots = sorted({offer.slot for offer in commit.fresh_offers}) if commit else [*session.rv.wanted.slot_names]
    return (slots.index(session.rv.slot), len(slots)) if session.rv.slot in slots else None


def _means(samples: Sequence[Sequence[float]]) -> list[float]:
    """Compute the mean of each row's samples that are not NaN; NaN if all are."""
    sums = (sums_of(of_row) for of_row in zip(*samples, strict=True))
    return [total / count if count else math.nan for count, total, _ in sums]


def _sums_by_kind(values: dict[str, dict[str, list[float]]]) -> dict[str, Sums]:
    return {kind: {name: sums_of(of_rows) for name, of_rows in by_name.items()} for kind, by_name in values.items()}


def sums_of(values: Sequence[float]) -> list[float]:
    """Return [number of known values, their sum, the sum of their squares]."""
    known = [value for value in values if not math.isnan(value)]
    return [len(known), math.fsum(known), math.fsum(value * value for value in known)]
