"""Tokens under mask 1 are what the model sampled, through TRL's own loop, whatever boxes answer and when they die.

_generate_single_turn(prompt ids) ──▶ sampled ids        recorded here
batch: prompt, completion, tool_mask ─▶ every run of 1s, with all that stands before it
                                         └── as a multiset, these are the recorded pairs: nothing is decoded and
                                             tokenised again, nothing of a tool is trained on, no turn is lost
"""

import json
import random
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from tests.inner.test_boxes import TASK
from tests.inner.test_toolworld import WORLD, small_folder

TOOL = '''
    def {name}(self, a: int, b: int) -> str:
        """A tool.

        Args:
            a: first
            b: second
        """
        return self.bash(f"say {{a}} {{b}}")
'''
WORLD_FILE = """
import random
import threading

from inner.extras.boxes.box import Ran
from inner.extras.boxes.starting import BoxStarter
from inner.extras.boxes.world import harbor_environment
from tests.support.planted_boxes import PlantedBox, PlantedBoxes, VirtualClock

SAID = ("", " ", "7", "<end>", "<call> t0_1 3 4 <end>", "ä 🙂 \\\\u2028", "<pad>", "{'error': 'x'}", "op0 1 2 " * 3)
chance, lock = random.Random(SEED), threading.Lock()


class Box(PlantedBox):
    def exec(self, command, *, user, timeout_s):
        ran = super().exec(command, user=user, timeout_s=timeout_s)
        with lock:
            return Ran(chance.choice((0, 0, 0, 1, 124)), chance.choice(SAID)) if command.startswith("say") else ran


class Boxes(PlantedBoxes):
    def start(self, owner, recipe, *, timeout_s):
        made = super().start(owner, recipe, timeout_s=timeout_s)
        made.__class__ = Box
        return made


clock = VirtualClock()
provider = Boxes(clock, deaths=0.5, hung=0.05, lost=0.1, turns=2)
starter = BoxStarter(provider, clock=clock, sleep=clock.sleep, seed=0)
rewards = []


class World(harbor_environment(starter)):
    numbers = iter(range(1000))

    def __init__(self):
        super().__init__()
        self._place = str(next(World.numbers))

    def get_reward(self):
        rewards.append(super().get_reward())
        return rewards[-1]
TOOLS
"""


def _loop(folder: Path, seed: int, workers: int, length: int) -> Any:
    names = [WORLD.name(kind, i) for kind in range(2) for i in range(4)]
    text = WORLD_FILE.replace("SEED", str(seed)).replace("TOOLS", "".join(TOOL.format(name=name) for name in names))
    (folder / "world.py").write_text(text)
    rows = [{"prompt": [{"role": "user", "content": f"op{i % 2} {i} {i + 1}"}], "harbor": TASK} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sampling = {"max_tool_calling_iterations": 5, "max_completion_length": length, "temperature": 1.5}
    config = InnerConfig.from_dict(
        {
            "model": str(small_folder()), "data": {"prompts": "rows.jsonl"}, "batch_size": 32, "lr": 1e-3,
            "sampling": {**sampling, "environment": "world.py:World", "tool_workers": workers},
        }
    )  # fmt: skip
    files = {"prompts": folder / "rows.jsonl", "environment": folder / "world.py"}
    return build_inner(config, small_folder(), files, Seeds(data=seed, noise=seed))


def _record(trainer: Any, seed: int) -> tuple[Counter[Any], list[dict[str, Any]]]:
    """Return what is sampled from now on, (prompt ids, sampled ids) -> how often, and the batches.

    The small model answers after one call. So in most later turns it "samples" a first turn's ids once more."""
    sampled, batches, chance = Counter[Any](), list[dict[str, Any]](), random.Random(seed)
    turn, score = trainer._generate_single_turn, trainer._generate_and_score_completions
    opening, asked = list[list[int]](), set[tuple[int, ...]]()

    def one_turn(prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        before = [tuple(row) for row in prompt_ids]
        rows, logprobs = turn(prompt_ids, *args, **kwargs)
        if not opening:
            opening.extend(rows)
            asked.update(before)
        else:
            rows = [list(chance.choice(opening)) if chance.random() < 0.8 else row for row in rows]
        for all_before, row in zip(before, rows, strict=True):
            task = next(len(one) for one in asked if all_before[: len(one)] == one)
            if kept := row[: trainer.max_completion_length - (len(all_before) - task)]:  # TRL cuts the rest off
                sampled[all_before, tuple(kept)] += 1
        return rows, logprobs

    def scored(inputs: Any) -> Any:
        opening.clear()
        batches.append(score(inputs))
        return batches[-1]

    trainer._generate_single_turn, trainer._generate_and_score_completions = one_turn, scored
    return sampled, batches


def _runs(batch: dict[str, Any]) -> Counter[Any]:
    """Return (all ids before a run of mask 1, the run's ids) -> how often."""
    found = Counter[Any]()
    masks = batch["completion_mask"] * batch["tool_mask"]
    for prompt, is_prompt, ids, is_there, mask in zip(
        batch["prompt_ids"].tolist(), batch["prompt_mask"].tolist(), batch["completion_ids"].tolist(),
        batch["completion_mask"].tolist(), masks.tolist(), strict=True,
    ):  # fmt: skip
        whole = [token for token, kept in zip(prompt, is_prompt, strict=True) if kept]
        rest = [(token, kept) for token, there, kept in zip(ids, is_there, mask, strict=True) if there]
        for kept, run in groupby(rest, key=lambda pair: pair[1]):
            tokens = [token for token, _ in run]
            if kept:
                found[tuple(whole), tuple(tokens)] += 1
            whole += tokens
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize(("seed", "workers", "length"), [(0, 1, 96), (1, 8, 96), (2, 1, 96), (3, 8, 40)])
def test_what_is_trained_on_is_what_was_sampled(tmp_path: Path, seed: int, workers: int, length: int) -> None:
    loop = _loop(tmp_path, seed, workers, length)
    sampled, batches = _record(loop.trainer, seed)
    stops = iter((False, True))
    loop.train(lambda: next(stops))
    runs = sum((_runs(batch) for batch in batches), Counter[Any]())
    assert len(batches) == 2 and runs.total() > 2.2 * 64, "rollouts have several turns"
    assert runs == sampled
    world = sys.modules[loop._environment.__module__]
    print(runs.total(), world.rewards.count(None), dict(world.starter.counts))
    assert None in world.rewards and world.starter.counts["provider"] > 0 and world.provider.alive == {}
