"""Runs the supervised inner loop: next-token loss on one sequence of tokens.

    tokens   ………┊──── window ────┊………          batch_size random windows of context_length + 1 tokens
    step i   has the micro-batches i·GA … i·GA + GA - 1; (data seed, micro-batch number) decides each: data/order.py

The loss on a held-out text (`text_losses`), in nats per token. Every call gives the same numbers.

    tokens   ┊─w─┊……┊─w─┊……┊─w─┊        at most MOST windows of `width` + 1 tokens, evenly spaced
    loss     of each window: the mean over its tokens

Not promised: that each epoch shows every token once (windows are drawn with replacement); the loss that other programs
report for a text (their windows and contexts differ). No trl here.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from inner.data.order import window_starts
from inner.data.prompts import local_file
from inner.data.tokens import IDS, open_ids
from inner.host import Host
from inner.models.optim import RunSchedule, make_optimizer
from inner.models.precision import casts_products, check_precision, gpu_has_bfloat16
from inner.settings.inner import Files, InnerConfig, InnerError, Progress, Seeds, Theta
from inner.train.metric_means import MetricMeans

MOST, AT_ONCE = 64, 8  # maximal number of windows in `text_losses`: in all, and per forward pass


class SupervisedLoop:
    """The InnerLoop of loop = "supervised". A second `train` call continues in the data where the first one ended."""

    boundary = 1

    def __init__(
        self, config: InnerConfig, model: nn.Module, tokens: np.ndarray, seeds: Seeds, warmup_steps: int = 0
    ) -> None:
        if len(tokens) <= config.data.context_length:
            raise InnerError(
                f"inner.data.text = {config.data.text!r} has {len(tokens)} tokens, fewer than one window of "
                f"context_length + 1 = {config.data.context_length + 1}. Give a longer text, or lower "
                "inner.data.context_length."
            )
        check_precision(model)
        torch.manual_seed(seeds.noise)
        self.config = config
        self.tokens = tokens
        self.seeds = seeds
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model: nn.Module = model.to(self.device)
        self.optimizer: Optimizer = make_optimizer(config, self.model)
        self._schedule = RunSchedule(self.optimizer, config, seeds.start, warmup_steps)
        self._casts = casts_products(config.autocast, config.dtype, gpu_has_bfloat16())
        self._next = seeds.start
        self._means = MetricMeans()

    def start_at(self, inner_step: int) -> None:
        self._next = inner_step

    def train(self, stop: Callable[[], bool]) -> None:
        """Take inner steps until `stop()` returns True."""
        self.model.train()
        while True:
            self._train_step()
            if stop():
                return

    def pop_metrics(self) -> dict[str, float]:
        return self._means.pop_metrics()

    def follow(self, step: Callable[[], int], theta: Theta, replicas: Callable[[], int], at: Progress = None) -> None:
        """Join a run. Only the learning rate depends on the run's step."""
        self._schedule.follow(step, replicas)

    def report_to(self, host: Host) -> None:
        """Do nothing: no code of the user runs in this loop."""

    def sample(self, n: int) -> dict[str, Any]:
        return {}

    def batch(self, micro: int) -> Tensor:
        """Return micro-batch number `micro` of the data order: ids (B, context_length + 1)."""
        width = self.config.data.context_length + 1
        size = self.config.batch_size
        starts = window_starts(len(self.tokens), width, size, self.seeds.data, micro)
        ids_B_T = np.stack([self.tokens[start : start + width] for start in starts]).astype(np.int64)
        return torch.from_numpy(ids_B_T).to(self.device)

    def _train_step(self) -> None:
        ga = self.config.gradient_accumulation_steps
        self.optimizer.zero_grad(set_to_none=True)
        loss = sum(self._backward_pass(self._next * ga + k) for k in range(ga))
        limit = self.config.max_grad_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._means.note("loss", loss)
        self._means.note("grad_norm", float(norm))
        self._means.note("lr", self.optimizer.param_groups[0]["lr"])
        self._means.count("samples", ga * self.config.batch_size)
        self._next += 1  # before optimizer.step: its hooks count this step as done
        self.optimizer.step()
        self._schedule.step()

    def _backward_pass(self, micro: int) -> float:
        ids_B_T = self.batch(micro)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._casts):
            logits = self.model(input_ids=ids_B_T[:, :-1]).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids_B_T[:, 1:].flatten())
        loss = loss / self.config.gradient_accumulation_steps
        loss.backward()
        return float(loss.detach())


def open_loop(
    config: InnerConfig,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    files: Files,
    seeds: Seeds,
    *,
    warmup_steps: int,
) -> SupervisedLoop:
    """Read the config's text and make the loop on it.   Raises InnerError if the text cannot be used."""
    path = local_file("text", str(config.data.text), files)
    tokens = load_tokens(path, str(config.data.text), tokenizer, model.config.vocab_size)
    return SupervisedLoop(config, model, tokens, seeds, warmup_steps)


def load_tokens(path: Path, spelling: str, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> np.ndarray:
    """Return ids (n,): a .txt is tokenised, a .npy holds token ids, a .bin holds raw uint16 token ids."""
    if path.suffix in IDS:
        tokens = open_ids(path, spelling)
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        tokens = np.asarray(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InnerError(
            f"inner.data.text = {spelling!r} contains {tokens.dtype} of shape {tokens.shape}; token ids must be "
            "integers in one dimension. Save such an array."
        )
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocabulary:
        raise InnerError(
            f"inner.data.text = {spelling!r} holds token ids from {tokens.min()} to {tokens.max()}; the model knows 0 "
            f"to {vocabulary - 1}. Tokenise it with this model's tokenizer."
        )
    return tokens


# -------------------------------------------------------------------- the loss on a held-out text


@torch.inference_mode()
def text_losses(model: nn.Module, tokens: np.ndarray, width: int) -> list[float]:
    """Return one loss per window; [] if the text is shorter than a window.   tokens: ids, (n,)."""
    training = model.training
    model.eval()
    losses = [loss for batch in _windows(tokens, width) for loss in _window_losses(model, batch)]
    model.train(training)
    return losses


def _windows(tokens: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield ids (B, width + 1), B ≤ AT_ONCE."""
    last = len(tokens) - width - 1
    count = 0 if last < 0 else min(MOST, last // width + 1)
    starts = np.linspace(0, max(0, last), count).astype(int)
    for at in range(0, count, AT_ONCE):
        yield np.stack([tokens[start : start + width + 1] for start in starts[at : at + AT_ONCE]]).astype(np.int64)


def _window_losses(model: nn.Module, ids: np.ndarray) -> list[float]:
    ids_B_T = torch.from_numpy(ids).to(next(model.parameters()).device)
    logits = model(input_ids=ids_B_T[:, :-1]).logits.float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids_B_T[:, 1:], reduction="none")
    return losses.mean(dim=1).tolist()
