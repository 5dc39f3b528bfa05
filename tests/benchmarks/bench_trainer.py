"""CPU time of an inner step: TRL's trainer, ours with every term off, and what each channel adds.

    python -m tests.benchmarks.bench_trainer [BLOCKS=6] [STEPS=6] [BATCH=64] [CASES=turn,tools]

    block 0:  TRL s s s s s   ours s s s s s   +sdpo s s s s s  …      block 1: the same, in turn reversed      …

All trainers start from the same weights and seeds, so with every term off they do the same work on the same rollouts.
CPU seconds of this process (one thread) between the begin and the end of an inner step, so that other processes on the
machine matter less. A row is the median inner step over TRL's median inner step; in brackets the same of the first and
of the second half of the blocks, to see what such a number is worth.

Not promised: the same ratios where the model is larger: the terms' own forwards grow, our Python does not.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.grpo_trainer import GRPOTrainer

from inner import ComposerReplicationTrainer, InnerConfig, Seeds, ToolWorld, publish_model
from inner.train.grpo import _silence_libraries, trainer_arguments
from tests.inner.test_channels import world_pairs

WORLD = ToolWorld()
CHANNELS: dict[str, dict[str, Any]] = {
    "ours, all off": {},
    "+ sdpo": {"alpha_sdpo": 0.1},
    "+ replay": {"beta_replay": 0.3},
    "+ both": {"alpha_sdpo": 0.1, "beta_replay": 0.3},
}


class Stopwatch(TrainerCallback):
    def __init__(self) -> None:
        self.spent: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.spent.append(time.process_time() - self._began)

    def take(self) -> list[float]:
        spent, self.spent = self.spent, []
        return spent


@_silence_libraries()
def make(folder: Path, steps: int, batch: int, tools: bool, options: dict[str, Any] | None) -> tuple[Any, Stopwatch]:
    """options: None for TRL's own."""
    arguments = trainer_arguments(InnerConfig(batch_size=batch), Seeds(data=0, noise=1), tempfile.mkdtemp(dir=folder))
    arguments.max_steps = steps
    own: dict[str, Any] = {} if options is None else {"hint": WORLD.hint, **options}
    if own.get("beta_replay"):
        own["pairs"] = world_pairs(64, WORLD)
    trainer = (GRPOTrainer if options is None else ComposerReplicationTrainer)(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=WORLD.reward,
        args=arguments,
        train_dataset=WORLD.dataset(),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        environment_factory=WORLD.environment() if tools else None,
        **own,
    )
    watch = Stopwatch()
    trainer.add_callback(watch)
    trainer.remove_callback(PrinterCallback)
    return trainer, watch


def measure(folder: Path, tools: bool, blocks: int, steps: int, batch: int) -> None:
    rows = {"TRL": None, "ours, all off": {}} if not tools else {"TRL": None, **CHANNELS}
    made = {name: make(folder, steps, batch, tools, options) for name, options in rows.items()}
    spent: dict[str, list[float]] = {name: [] for name in made}
    for block in range(blocks + 1):
        for name in sorted(made, reverse=bool(block % 2)):
            trainer, watch = made[name]
            with _silence_libraries():
                trainer.train()
            seconds = watch.take()
            if block:  # the first one warms up
                spent[name] += seconds
    for name, seconds in spent.items():
        half = len(seconds) // 2
        parts = (slice(None), slice(half), slice(half, None))
        whole, early, late = (over(seconds[part], spent["TRL"][part]) for part in parts)
        row = f"{'tools' if tools else 'one turn':9s} {name:14s} {1e3 * statistics.median(seconds):7.1f} ms/step"
        print(f"{row}   {whole:6.3f} × TRL   [{early:.3f}, {late:.3f}]", flush=True)


def over(mine: list[float], trl: list[float]) -> float:
    return statistics.median(mine) / statistics.median(trl)


def main() -> None:
    torch.set_num_threads(1)
    *numbers, cases = [*sys.argv[1:], *("6", "6", "64", "turn,tools")[len(sys.argv) - 1 :]]
    blocks, steps, batch = (int(number) for number in numbers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        publish_model(InnerConfig(), folder / "model")
        for case in cases.split(","):
            measure(folder, case == "tools", blocks, steps, batch)


if __name__ == "__main__":
    main()
