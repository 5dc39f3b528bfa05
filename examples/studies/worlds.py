"""The two tasks of the studies: what a replica trains on, and what θ is worth there.

    toolworld    find 1 tool name in 16 per kind by reward; the value is the held-out reward, sampled, 256 prompts
    text         go on with sums ("12 plus 13 is 25."); the value is the held-out loss, nats per byte, 64 windows

Both models are built in code (0.1 M parameters) and have seen neither: a trial takes seconds of one core.

Not promised: anything about language models; docs/studies/replicas.md says what these can show.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from inner import InnerConfig, InnerLoop, Seeds, ToolWorld, build_inner, publish_model
from inner.task_settings import DataSettings, ToolworldSettings
from inner.text_loss import text_losses

NAMES, PROMPTS = 16, 256
WIDTH = 32  # bytes of context


@dataclass(frozen=True)
class World:
    """config: (sequences per inner step, learning rate) -> settings.   value: of θ, as the loop's model has it."""

    name: str
    batch: int
    lr: float
    upwards: bool  # is a larger value better?
    config: Callable[[int, float], InnerConfig]
    value: Callable[[InnerLoop], float]

    def build(self, folder: Path, seed: int, machine: int, *, batch: int, lr: float) -> InnerLoop:
        """The loop of one machine.   seed: of the trial; the same data order and sampling in every arm."""
        number = 1000 * seed + machine
        files = {"text": folder / "train.txt"} if self.name == "text" else {}
        return build_inner(self.config(batch, lr), folder / self.name, files, Seeds(data=number, noise=number))

    def prepare(self, folder: Path) -> None:
        """Write the start model and the text, once."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.txt").write_text(sums(20_000, seed=0))
        if not (folder / self.name).exists():
            publish_model(self.config(self.batch, self.lr), folder / self.name)


def sums(lines: int, seed: int) -> str:
    rng = random.Random(seed)
    drawn = ((rng.randrange(100), rng.randrange(100), rng.random() < 0.5) for _ in range(lines))
    return "".join(f"{a} plus {b} is {a + b}.\n" if plus else f"{a} minus {b} is {a - b}.\n" for a, b, plus in drawn)


def reward(loop: InnerLoop) -> float:
    rows = ToolWorld(names=NAMES).rows(PROMPTS, seed=99)
    return fmean(loop.score(rows, greedy=False, seed=99)["reward"])  # type: ignore[attr-defined]


def loss(loop: InnerLoop) -> float:
    return fmean(text_losses(loop.model, np.frombuffer(sums(400, seed=1).encode(), np.uint8), WIDTH))


def toolworld_config(batch: int, lr: float) -> InnerConfig:
    return InnerConfig(batch_size=batch, lr=lr, toolworld=ToolworldSettings(names=NAMES))


def text_config(batch: int, lr: float) -> InnerConfig:
    data = DataSettings(text="train.txt", context_length=WIDTH)
    return InnerConfig(loop="supervised", model="tiny", batch_size=batch, lr=lr, data=data)


WORLDS = {
    "toolworld": World("toolworld", 32, 1e-3, True, toolworld_config, reward),
    "text": World("text", 16, 1e-3, False, text_config, loss),
}
