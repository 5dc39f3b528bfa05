"""Metrics of θ for `diloco blame`: a loss on a text, a reward on held-out prompts, a command's output.

    θ ──▶ TextLoss        lower is better      the run's own text, or --text FILE
      ──▶ HeldOutReward   higher is better     the run's [eval], or --prompts FILE
      ──▶ CommandNumber   unknown              -- COMMAND prints it

Each metric measures every θ with the same text, seeds and settings.

Not promised: speed; a reward needs generation.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import torch

from diloco.audit.bisect import Judge
from diloco.audit.offline_eval import OfflineScorer
from diloco.model.export import patient, put_into, start_folder
from diloco.model.fetch import fetch_files
from diloco.outer.frozen import refuse_other_base
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run
from inner.data.prompts import local_file
from inner.train.build import load_start
from inner.train.supervised import load_tokens, text_losses

WIDTH = 256  # tokens in a window, if the run's loop has no context_length
LOWER, HIGHER, UNKNOWN = -1, +1, 0  # the better direction


@dataclass(frozen=True)
class Measurement:
    """One value of a metric.   error: its standard error, nan if unknown.   parts: numbers whose mean is the value.

    Two measurements with parts have corresponding parts in the same order, so that they can be compared in pairs."""

    value: float
    error: float = math.nan
    parts: tuple[float, ...] = ()

    def change_from(self, other: "Measurement") -> tuple[float, float]:
        """Return (difference, its standard error)."""
        if len(self.parts) > 1 and len(self.parts) == len(other.parts):
            return self.value - other.value, error_of([a - b for a, b in zip(self.parts, other.parts, strict=True)])
        return self.value - other.value, math.hypot(self.error, other.error)


def error_of(parts: Sequence[float]) -> float:
    """Compute the standard error of the mean of `parts`; nan for a single part."""
    return stdev(parts) / math.sqrt(len(parts)) if len(parts) > 1 else math.nan


class Metric(Protocol):
    """A number for θ.   name: its description.   better: LOWER, HIGHER or UNKNOWN."""

    @property
    def name(self) -> str: ...
    @property
    def better(self) -> int: ...
    def measure(self, step: int, state: OuterState) -> Measurement:
        """Measure θ.   step: the outer step of θ, or the step with which a recomputed θ is compared."""
        ...


@dataclass(frozen=True)
class TextLoss:
    name: str
    model: Any
    tokens: np.ndarray
    width: int
    better: int = LOWER

    def measure(self, step: int, state: OuterState) -> Measurement:
        put_into(self.model, state)
        losses = text_losses(self.model, self.tokens, self.width)
        return Measurement(fmean(losses), error_of(losses), tuple(losses))


@dataclass(frozen=True)
class HeldOutReward:
    name: str
    scorer: OfflineScorer
    better: int = HIGHER

    def measure(self, step: int, state: OuterState) -> Measurement:
        _, score = self.scorer.score(step, state).headline
        return Measurement(score.mean, score.error)


@dataclass(frozen=True)
class CommandNumber:
    judge: Judge
    better: int = UNKNOWN

    @property
    def name(self) -> str:
        return f"what {' '.join(self.judge.words)!r} prints"

    def measure(self, step: int, state: OuterState) -> Measurement:
        return Measurement(self.judge.measure(step, state))


@contextmanager
def open_metric(
    run: Run, record: ModelRecord, *, text: Path | None = None, prompts: Path | None = None
) -> Iterator[Metric | None]:
    """Open the requested metric, or else a metric on the run's own text or [eval]; None for a run without both.

    Raises ConfigError."""
    with TemporaryDirectory(prefix="diloco-blame-", ignore_cleanup_errors=True) as scratch:
        supervised = run.config.inner.loop == "supervised"
        if text is not None or (supervised and prompts is None):
            yield _open_text(run, record, Path(scratch), text)
        elif prompts is not None or run.config.eval is not None:
            scorer = OfflineScorer.open(run, record, Path(scratch), prompts=prompts)
            yield HeldOutReward(f"reward on {prompts}" if prompts else "reward on the run's held-out prompts", scorer)
        else:
            yield None


def _open_text(run: Run, record: ModelRecord, folder: Path, text: Path | None) -> TextLoss:
    from transformers import AutoTokenizer

    inner = run.config.inner
    start = start_folder(run, record, folder / "model")
    model, _ = load_start(start, inner.dtype, inner.lora)
    refuse_other_base(record.base, model)
    tokenizer: Any = AutoTokenizer.from_pretrained(start)
    spelling = str(text or inner.data.text)
    path = text or local_file("text", spelling, fetch_files(patient(run), folder / "code"))
    tokens = load_tokens(path, spelling, tokenizer, model.config.vocab_size)
    width = inner.data.context_length if inner.loop == "supervised" else WIDTH
    if len(tokens) <= width:
        raise ConfigError(f"{spelling} has {len(tokens)} tokens; the loss needs {width + 1}. Name a longer text")
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    name = f"loss on {text}" if text else "loss on the run's text"
    return TextLoss(name, model.to(device), tokens, width)
