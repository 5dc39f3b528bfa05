"""The tasks of the studies: their training data, and the value of θ on them.

    toolworld    find 1 tool name in 16 per kind by reward; the value is the held-out reward, sampled, 256 prompts
    text         continue sums ("12 plus 13 is 25."); the value is the held-out loss, nats per byte, 64 windows
    errands      twelve questions, answered in 49 tokens (errands.py); the held-out reward, sampled, 128 prompts
    sums         the task of `make real`: a pretrained model of 135 M parameters with LoRA; held-out reward, sampled
    products     the same model on reasoning-gym's `products` of two digits: 70 of the 100 questions, 30 are held out
                 (pip install reasoning-gym==0.1.25)

The first three models are built in code (0.1 M parameters) and know no right answer: a trial takes seconds of one core.
With the pretrained one (`make smollm2`) it takes eighteen minutes.

Not promised: anything about other language models; docs/studies explains what these can show.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import errands
import numpy as np
import torch

from inner import InnerConfig, InnerLoop, Seeds, ToolWorld, build_inner, publish_model
from inner.settings.inner import SamplingSettings
from inner.settings.task import DataSettings, LoraSettings, RewardSettings, ToolworldSettings
from inner.train.supervised import text_losses

NAMES, PROMPTS = 16, 256
ERRANDS = errands.Errands(kinds=4, names=8)
WIDTH = 32  # bytes of context
HELD_OUT, GYM_HELD_OUT = 64, 30  # prompts of the pretrained model's tasks
ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
REAL = ROOT / "examples" / "real"
GYM, GYM_OPTIONS = "reasoning-gym:products", {"max_digits": 1}


@dataclass(frozen=True)
class World:
    """config: (sequences per inner step, learning rate) -> settings.   value: returns the value of the loop's θ.

    files: kind -> text, written into the study's folder.   start: the world whose start model it shares, "" for its
    own.   steps: inner steps of one machine alone; every arm has as many samples.   points: limit for a curve.
    publish: writes the start model into a folder.
    """

    name: str
    batch: int
    lr: float
    upwards: bool  # is a larger value better?
    config: Callable[[int, float], InnerConfig]
    value: Callable[[InnerLoop], float]
    files: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    steps: int = 320
    points: int = 16
    start: str = ""
    publish: Callable[[InnerConfig, Path], None] = publish_model

    def build(
        self, folder: Path, seed: int, machine: int, *, batch: int, lr: float,
        session: int = 1, start: int = 0, warmup: int = 0,
    ) -> InnerLoop:  # fmt: skip
        """Build the loop of one session of a machine.   seed: the trial's; data order and sampling are each arm's.

        start: inner steps already taken.   warmup: inner steps in which the learning rate rises.
        """
        data = 1000 * seed + machine
        seeds = Seeds(data=data, noise=data + 500 * (session - 1), start=start)
        files = {kind: self._file(folder, kind) for kind in self.files}
        return build_inner(self.config(batch, lr), folder / (self.start or self.name), files, seeds, warmup)

    def prepare(self, folder: Path) -> None:
        """Write the start model and the files, once."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind, text in self.files.items():
            self._file(folder, kind).write_text(text())
        model = folder / (self.start or self.name)
        if not model.exists():
            self.publish(self.config(self.batch, self.lr), model)

    def _file(self, folder: Path, kind: str) -> Path:
        return folder / f"{self.name}-{kind}{'.py' if kind == 'reward' else '.txt' if kind == 'text' else '.jsonl'}"


# -------------------------------------------------------------------- built in code


def sums(lines: int, seed: int) -> str:
    rng = random.Random(seed)
    drawn = ((rng.randrange(100), rng.randrange(100), rng.random() < 0.5) for _ in range(lines))
    return "".join(f"{a} plus {b} is {a + b}.\n" if plus else f"{a} minus {b} is {a - b}.\n" for a, b, plus in drawn)


def reward(loop: InnerLoop) -> float:
    return mean_reward(loop, ToolWorld(names=NAMES).rows(PROMPTS, seed=99))


def mean_reward(loop: InnerLoop, rows: list[dict[str, Any]], seed: int = 99) -> float:
    return fmean(loop.score(rows, greedy=False, seed=seed)["reward"])  # type: ignore[attr-defined]


def loss(loop: InnerLoop) -> float:
    return fmean(text_losses(loop.model, np.frombuffer(sums(400, seed=1).encode(), np.uint8), WIDTH))


def errands_reward(loop: InnerLoop) -> float:
    return mean_reward(loop, ERRANDS.rows(128, seed=99))


def toolworld_config(batch: int, lr: float) -> InnerConfig:
    return InnerConfig(batch_size=batch, lr=lr, toolworld=ToolworldSettings(names=NAMES))


def text_config(batch: int, lr: float) -> InnerConfig:
    data = DataSettings(text="train.txt", context_length=WIDTH)
    return InnerConfig(loop="supervised", model="tiny", batch_size=batch, lr=lr, data=data)


def errands_config(batch: int, lr: float) -> InnerConfig:
    return InnerConfig(
        model="errands", batch_size=batch, lr=lr, data=DataSettings(prompts="prompts.jsonl"),
        rewards=RewardSettings(function="reward.py:errands_done"),
        sampling=SamplingSettings(max_completion_length=errands.LONGEST),
    )  # fmt: skip


def publish_errands(config: InnerConfig, folder: Path) -> None:
    model, tokenizer = ERRANDS.model(), ERRANDS.tokenizer()
    ERRANDS.warm_start(model, tokenizer)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -------------------------------------------------------------------- pretrained


def lora_config(batch: int, lr: float) -> InnerConfig:
    """Return examples/real/run.toml's settings; float32 also on a GPU, so that rows of both can be compared."""
    has_amx = torch.cpu.get_capabilities().get("amx_bf16", False)
    return InnerConfig(
        model=str(SMOLLM2), batch_size=batch, lr=lr, autocast="bfloat16" if has_amx else "off",
        data=DataSettings(prompts="prompts.jsonl"), rewards=RewardSettings(function="rewards.py:answer"),
        sampling=SamplingSettings(num_generations=8, max_completion_length=16), lora=LoraSettings(r=8, alpha=16.0),
    )  # fmt: skip


def gym_config(batch: int, lr: float) -> InnerConfig:
    return replace(lora_config(batch, lr), data=DataSettings(task=GYM), rewards=RewardSettings())


def sums_reward(loop: InnerLoop) -> float:
    return mean_reward(loop, [json.loads(line) for line in (REAL / "held_out.jsonl").open()][:HELD_OUT])


def gym_reward(loop: InnerLoop) -> float:
    """Return the mean reward of two completions of each held-out prompt."""
    return fmean(mean_reward(loop, gym_rows()[-GYM_HELD_OUT:], seed) for seed in (98, 99))


def gym_prompts() -> str:
    return lines_of(gym_rows()[:-GYM_HELD_OUT])


@cache
def gym_rows() -> list[dict[str, Any]]:
    """Return each row once; the last GYM_HELD_OUT are held out."""
    from inner.tasks.make import make_rows
    from inner.tasks.spec import TaskSpec

    found = make_rows("a study", TaskSpec(task=GYM, size=900, seed=1, options=GYM_OPTIONS), chat=True).rows
    return list({row["prompt"][0]["content"]: row for row in found}.values())


WORLDS = {
    world.name: world
    for world in (
        World("toolworld", 32, 1e-3, True, toolworld_config, reward),
        World("text", 16, 1e-3, False, text_config, loss, {"text": partial(sums, 20_000, seed=0)}),
        World(
            "errands", 16, 1e-3, True, errands_config, errands_reward,
            {"prompts": lambda: lines_of(ERRANDS.rows()), "reward": Path(errands.__file__).read_text},
            publish=publish_errands,
        ),
        World(
            "sums", 16, 3e-4, True, lora_config, sums_reward,
            {k: partial(Path.read_text, REAL / n) for k, n in (("prompts", "prompts.jsonl"), ("reward", "rewards.py"))},
            steps=80, points=5,
        ),
        World(
            "products", 16, 3e-4, True, gym_config, gym_reward,
            {"prompts": gym_prompts},
            steps=80, points=5, start="sums",
        ),
    )
}  # fmt: skip
