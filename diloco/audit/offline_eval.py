"""`diloco eval`: score θ of any committed step on held-out prompts, on this machine, at any later time.

    θ_t (model/export.py) ──▶ the run's own inner loop: its tokenizer, reward, tools ──▶ every prompt ──▶ Evaluation

The command uses the reward that the run was launched with.  Not promised: the same samples as in the run. Greedy
samples are the same if the arithmetic is the same.
"""

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from diloco.model.export import model_record, patient, put_into, start_folder, state_at
from diloco.model.fetch import fetch_files
from diloco.outer.frozen import refuse_other_base
from diloco.outer.optimizer import OuterState
from diloco.process.ranks import forget_launcher
from diloco.replica.evaluation import Scorer, score_prompts
from diloco.run.config import ConfigError, derive_seed
from diloco.run.record import ModelRecord, Run
from diloco.run.sections import EvalConfig, EvalError
from diloco.runlog.evaluation import Evaluation, read_evaluations
from inner import InnerLoop, Seeds, build_inner
from inner.data.prompts import Row, load_prompts
from inner.settings.task import EVAL
from inner.usercode import reward_calls


def evaluate_step(
    run: Run,
    step: int | None,
    *,
    prompts: Path | None = None,
    samples: int | None = None,
    report_progress: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Score θ_step (default: the newest) on `prompts` (default: the run's [eval]).   Raises ConfigError."""
    record = model_record(run)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        scorer = OfflineScorer.open(run, record, Path(scratch), prompts=prompts, samples=samples)
        at, state = state_at(run, record, step)
        return scorer.score(at, state, report_progress)


@dataclass(frozen=True)
class OfflineScorer:
    """The run's inner loop with held-out prompts, on this machine; it can score any θ of the run."""

    run: Run
    config: EvalConfig
    rows: list[Row]
    loop: InnerLoop

    @classmethod
    def open(
        cls, run: Run, record: ModelRecord, folder: Path, *, prompts: Path | None = None, samples: int | None = None
    ) -> "OfflineScorer":
        """Build a scorer of the run's θ.   folder: empty, for code and start model; needed as long as the scorer."""
        forget_launcher()
        config = _settings(run, prompts, samples)
        inner = run.config.inner
        files = fetch_files(patient(run), folder / "code")
        files |= {EVAL: prompts} if prompts is not None else {}
        rows = load_prompts(str(prompts or config.source), files, inner.data, kind=EVAL)
        start = start_folder(run, record, folder / "model")
        (scratch := folder / "inner").mkdir()
        loop = build_inner(inner, start, files, Seeds(0, 0), scratch=scratch)
        refuse_other_base(record.base, loop.model)
        return cls(run, config, rows, loop)

    def score(
        self, at: int, state: OuterState, report_progress: Callable[[str], None] = lambda text: None
    ) -> Evaluation:
        """Score θ on all prompts.   at: the outer step that θ belongs to.   Raises ConfigError."""
        rows = self.rows
        put_into(self.loop.model, state)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            scored, found = score_prompts(
                cast(Scorer, self.loop), rows, self.config, batch=self.run.config.inner.generation_size,
                seed=derive_seed(self.run.config.seed, "eval", at),
                may_go_on=lambda scored: report_progress(f"θ_{at}: {scored} of {len(rows)} prompts") or True,
            )  # fmt: skip
        shares = {"share": 0, "shares": 1, "prompts": scored, "total": len(rows)}
        failures = [one for one in warned if one.filename == reward_calls.__file__]
        if not (scores := read_evaluations([{"event": "evaluated", "step": at, **shares, **found}])):
            why = str(failures[0].message) if failures else "it returned None for each"
            raise ConfigError(
                f"the reward gave no number for any of these prompts: {why}. The prompts have columns "
                f"{', '.join(sorted(rows[0]))}. Add the columns that the reward needs, or wait until the reward's "
                "service answers"
            )
        for one in warned:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return scores[0]


def _settings(run: Run, prompts: Path | None, samples: int | None) -> EvalConfig:
    if run.config.inner.loop == "supervised":
        raise ConfigError('this run learns from text (loop = "supervised"): it has no rewards to evaluate')
    config = run.config.eval
    if config is None and prompts is None:
        raise ConfigError("this run has no [eval]. Name held-out prompts with --prompts FILE")
    try:
        config = config or EvalConfig(prompts=str(prompts))
        config = config if samples is None else replace(config, samples=samples)
    except EvalError as error:
        raise ConfigError(str(error)) from error
    return config
