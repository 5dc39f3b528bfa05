"""The tool loop beside TRL's as shipped: CPU time per step, and the same numbers.

    python -m tests.benchmarks.bench_tools                    batch 64, 5 pairs of runs of 10 steps, about 2 minutes

    one pair:  as shipped, then ours; in turns, so that a busy machine hurts both     ratio = as shipped / ours
    as shipped: the same trainer with TRL's own methods where inner/rollouts/toolloop.py has others

ToolWorld, K = 6, S = 32, one thread. Both runs of a pair end with the same bits in every parameter, or this fails.

Not promised: the same ratio for large models: what is saved is Python on the CPU, per rollout.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from inner import InnerConfig, Seeds, build_inner, publish_model
from inner.rollouts.toolloop import LeanToolLoop

OURS = ("_generate", "_tokenize_prompts", "_get_tool_suffix_ids", "_cache_schemas")


@contextmanager
def as_shipped() -> Iterator[None]:
    kept = {name: LeanToolLoop.__dict__[name] for name in OURS}
    try:
        for name in OURS[:3]:
            setattr(LeanToolLoop, name, GRPOTrainer.__dict__[name])
        LeanToolLoop._cache_schemas = lambda self: setattr(self, "_schemas", [])  # pyright: ignore
        yield
    finally:
        for name, method in kept.items():
            setattr(LeanToolLoop, name, method)


def run(model: Path, batch: int, steps: int, **settings: Any) -> tuple[float, list[float], torch.Tensor]:
    """CPU milliseconds per step after the first, rewards, parameters."""
    loop = build_inner(InnerConfig(**{**settings, "batch_size": batch}), model, {}, Seeds(data=0, noise=0))
    rewards: list[float] = []
    at: list[float] = []

    def stop() -> bool:
        at.append(time.process_time())
        rewards.append(loop.pop_metrics()["reward"])
        return len(rewards) >= steps

    loop.train(stop)
    return (
        1000 * (at[-1] - at[0]) / (steps - 1),
        rewards,
        torch.cat([p.detach().flatten() for p in loop.model.parameters()]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        publish_model(InnerConfig(), Path(folder))
        ratios = []
        for _ in range(given.pairs):
            with as_shipped():
                shipped, rewards, there = run(Path(folder), given.batch, given.steps)
            ours, same, here = run(Path(folder), given.batch, given.steps)
            if rewards != same or not torch.equal(there, here):
                raise SystemExit("the two runs differ: a cache changes what is learned")
            ratios.append(shipped / ours)
            print(f"as shipped {shipped:5.0f} ms, ours {ours:5.0f} ms per step: {ratios[-1]:.2f} ×", flush=True)
    print(f"batch {given.batch}: {median(ratios):.2f} × (median of {given.pairs} pairs), parameters equal bit for bit")


if __name__ == "__main__":
    main()
