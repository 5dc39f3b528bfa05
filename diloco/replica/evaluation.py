"""Held-out evaluation inside a run: every replica answers its share of the prompts under the same θ.

    commit t ──▶ θ_{t+1} on all replicas that it lists ──▶ prompts i, i + n, i + 2n, … ──▶ event "evaluated" in the log
                 n replicas, in the order of their names       rewards: count, Σ, Σ²        read by runlog/evaluation.py

No extra machine and no extra synchronisation: θ is the committed one, and the share follows from the commit, which
all replicas have.  A replica that is lost in the middle of it takes its share with it; the mean is of the prompts that
were scored.
The event reaches the bucket with the next beat, long before the replica's next offer (decision 038).

Not promised: an evaluation of a step that a replica caught up with, or healed to: it never stood there.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from diloco.process.session import Session
from diloco.run.eval_config import EvalConfig
from diloco.run.seeds import derive_seed

Row = dict[str, Any]
Sums = dict[str, list[float]]  # name -> [prompts, Σ of their means, Σ of the squares]


class Scorer(Protocol):
    def score(self, rows: Sequence[Row], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        """name -> a number for each row, NaN where none is known."""
        ...


class Evaluator:
    """rows: the held-out prompts.   batch: prompts that the scorer takes at once.   seed: the run's.

    stands_at: the run's committed outer step.   must_go: is this replica to end?  Asked between batches."""

    def __init__(
        self,
        config: EvalConfig,
        rows: list[Row],
        scorer: Scorer,
        session: Session,
        *,
        batch: int,
        seed: int,
        stands_at: Callable[[], int],
        must_go: Callable[[], bool],
    ) -> None:
        self._config = config
        self._rows = rows
        self._scorer = scorer
        self._session = session
        self._batch = batch
        self._seed = seed
        self._stands_at = stands_at
        self._must_go = must_go
        self._looked_at = self._stands_at()  # steps taken before this session do not count
        if self._looked_at == 0:
            self._looked_at = -1

    def is_due(self) -> bool:
        """Whether the run has come to a step that is to be evaluated.  Costs nothing: asked after every inner step."""
        return self._stands_at() != self._looked_at and self._config.is_due(
            self._stands_at(), self._session.rv.wanted.steps
        )

    def evaluate(self) -> None:
        """Score this replica's share, and write the sums into the log."""
        step = self._looked_at = self._stands_at()
        share = share_of(self._session, step)
        if share is None:
            return
        clock = self._session.clock
        began = clock.now()
        mine = self._rows[share[0] :: share[1]]
        scored, found = self._score_share(step, mine)
        self._session.rv.members.status.note = ""
        if not scored:
            return
        self._session.emit(
            "evaluated", step=step, share=share[0], shares=share[1], prompts=scored, total=len(self._rows),
            seconds=clock.now() - began, **found,
        )  # fmt: skip
        self._session.flush_soon()

    def _score_share(self, step: int, rows: list[Row]) -> tuple[int, dict[str, Sums]]:
        """-> how many of the rows were scored before this replica had to go, and their sums by kind."""

        def may_go_on(scored: int) -> bool:
            self._session.rv.members.status.note = f"evaluates θ_{step}: {scored} of {len(rows)} prompts"
            self._session.watchdog.resume()
            return not self._must_go()

        seed = derive_seed(self._seed, "eval", self._session.rv.slot, step)
        return score_prompts(self._scorer, rows, self._config, batch=self._batch, seed=seed, may_go_on=may_go_on)


def score_prompts(
    scorer: Scorer,
    rows: Sequence[Row],
    config: EvalConfig,
    *,
    batch: int,
    seed: int,
    may_go_on: Callable[[int], bool] = lambda scored: True,
) -> tuple[int, dict[str, Sums]]:
    """-> how many rows were scored, and kind -> name -> sums.

    may_go_on(rows scored so far): asked before each batch; False ends it with the rows scored so far."""
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
    """kind -> name -> a number per row, the mean of its samples."""
    found: dict[str, dict[str, list[float]]] = {}
    if config.greedy:
        found["greedy"] = scorer.score(rows, greedy=True, seed=seed)
    seeds = [derive_seed(seed, n) for n in range(config.samples)]
    if samples := [scorer.score(rows, greedy=False, seed=seed) for seed in seeds]:
        found["sampled"] = {name: _means([sample[name] for sample in samples]) for name in samples[0]}
    return found


def share_of(session: Session, step: int) -> tuple[int, int] | None:
    """Return (i, n): this replica scores prompts i, i + n, …; None if it has no part in θ_step.

    The commit that made θ_step lists its participants; without one (θ₀, no bucket) the wanted slots take their place.
    """
    commit = session.rv.chain.read(step - 1) if step else None
    slots = sorted({offer.slot for offer in commit.fresh_offers}) if commit else [*session.rv.wanted.slot_names]
    return (slots.index(session.rv.slot), len(slots)) if session.rv.slot in slots else None


def _means(samples: Sequence[Sequence[float]]) -> list[float]:
    """Per row the mean over its samples, without those that are NaN; NaN if all are."""
    return [_mean([x for x in of_row if not math.isnan(x)]) for of_row in zip(*samples, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _sums_by_kind(values: dict[str, dict[str, list[float]]]) -> dict[str, Sums]:
    return {kind: {name: sums_of(of_rows) for name, of_rows in by_name.items()} for kind, by_name in values.items()}


def sums_of(values: Sequence[float]) -> list[float]:
    """[how many are known, their sum, the sum of their squares]."""
    known = [value for value in values if not math.isnan(value)]
    return [len(known), math.fsum(known), math.fsum(value * value for value in known)]
