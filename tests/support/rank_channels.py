"""The channels on the ranks of one slot without a run, beside one process with as many rollouts.

    one_and_two(folder, sdpo=…)   each gradient of some inner steps, their metrics, and how many lessons each rank had

A script writes the rollouts: what a model says is a function of the prompt and of the rollout's number in its group, so
rollout j of rank r is rollout batch · r + j of one process.

    a even   some rollouts answer right      b even   some call a tool that does not exist, and have a lesson
"""

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from trl.trainer.grpo_trainer import GRPOTrainer

from diloco.outer.ranks.group import Group
from diloco.outer.ranks.led import merged_numbers
from inner.channels.process_head import ProcessHead
from inner.models.lora import ADAPTER, new_adapter, save_adapter
from inner.replay.pairs import DPOPair, save_pairs
from inner.settings.inner import InnerConfig, Seeds
from inner.settings.task import LoraSettings
from inner.train import ranks
from inner.train.build import build_inner
from inner.train.trainer import LESSONS
from tests.inner.test_toolworld import SMALL, WORLD, small_folder
from tests.support.ranks import let_accelerate_shard, start_ranks, wait, words
from tests.support.tables import merge_tables

SEED = 208  # its first four pairs of prompts: a lesson on rank 1, on both, on none, on rank 0
START = {**SMALL, "lr": 1e-4, "max_grad_norm": 0.0}
WIDTH = 64  # of the small world's model
PROCESS = """
def score(rollouts):
    return [[(sum(r.ids[turn.start : turn.end]) % 7) / 7 for turn in r.turns] for r in rollouts]
"""
Told = dict[str, Any]  # "gradients": one vector per inner step; "metrics"; "lessons": of each rank and inner step


def write_pairs(path: Path, n: int = 11) -> str:
    """Write pairs of different lengths and weights."""
    pairs = [
        DPOPair(
            state_id=f"s{i}", state_messages=row["prompt"], n_teachers_agreeing=2, weight=1.0 + i % 3,
            chosen=f"{row['a']} " * (1 + i % 4), rejected="giveup",
        )
        for i, row in enumerate(WORLD.rows(n, seed=5))
    ]  # fmt: skip
    save_pairs(pairs, path)
    return str(path)


def one_and_two(
    folder: Path, *, steps: int = 4, shard: bool = False, tied: bool = True, **inner: Any
) -> tuple[Told, Told]:
    """Take `steps` inner steps in one process, and on two ranks with half of its rollouts and pairs each.

    tied: whether embeddings and head are one tensor."""
    children = []
    (folder / "process.py").write_text(PROCESS)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        ProcessHead(WIDTH).save(head := folder / "head.safetensors")
    model = write_model(folder / "model", inner.get("lora"), tied=tied)
    for name, count in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        config = InnerConfig(**merge_tables(merge_tables(START, inner), part_of(count, inner)))
        files = {"pairs": config.replay.pairs, "process": str(folder / "process.py"), "process_head": str(head)}
        act = partial(train, config, str(model), files, str(folder / name / "told.pt"), steps, shard and count > 1)
        children.append(start_ranks(count, folder / name / "r00.log", act))
    codes = [wait(child) for child in children]
    assert codes == [0, 0], (codes, words(folder / "one"), words(folder / "two"))
    one, two = (torch.load(folder / name / "told.pt") for name in ("one", "two"))
    return one, two


def part_of(count: int, inner: dict[str, Any]) -> dict[str, Any]:
    """The part of 16 rollouts and of 4 pairs per forward pass that one of `count` ranks has."""
    part: dict[str, Any] = {"batch_size": 16 // inner.get("gradient_accumulation_steps", 1) // count}
    return {**part, "replay": {"batch_size": 4 // count}} if "replay" in inner else part


def write_model(folder: Path, lora: dict[str, Any] | None, *, tied: bool) -> Path:
    shutil.copytree(small_folder(), folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 0.01)
        model.save_pretrained(folder)
    if lora is not None:
        save_adapter(new_adapter(model, LoraSettings(**lora)), folder / ADAPTER)
    return folder


def train(config: InnerConfig, model: str, files: Any, told: str, steps: int, shard: bool) -> int:
    torch.set_num_threads(1)
    group = Group() if "RANK" in os.environ else None
    ranks.SHARDED = ranks.SHARDED if shard else {}
    if shard:
        let_accelerate_shard()
    with patch.object(GRPOTrainer, "_generate_single_turn", says):
        found = take_steps(build_inner(config, Path(model), files, Seeds(SEED, 2)), group, steps)
    sharded = found.pop("shards")
    assert sharded == shard, (sharded, shard)
    everywhere = [found] if group is None else group.gather(found)
    if everywhere:
        metrics = merged_numbers([one["metrics"] for one in everywhere])
        lessons = [one["lessons"] for one in everywhere]
        torch.save({"gradients": everywhere[0]["gradients"], "metrics": metrics, "lessons": lessons}, told)
    return 0


def take_steps(loop: Any, group: Group | None, steps: int) -> Told:
    """Take inner steps. θ moves every second of them, and differs from the live weights."""
    start = {name: p.detach().clone() for name, p in loop.model.named_parameters() if p.requires_grad}
    taken, lessons, gradients = list[int](), list[int](), list[Tensor]()

    def theta() -> Iterator[tuple[str, Tensor]]:
        generator = torch.Generator().manual_seed(len(taken) // 2)
        for name, p in start.items():
            if group is not None:  # a run's θ comes from rank 0
                group.spread(torch.zeros(1))
            yield name, p + 0.1 * torch.randn(p.shape, generator=generator)

    if group is not None:
        loop.place()
    loop.follow(lambda: len(taken) // 2, theta, lambda: 1)
    loop.optimizer.register_step_pre_hook(lambda *_: gradients.append(whole_gradient(loop.model)))

    def stop() -> bool:
        taken.append(1)
        batches: Any = loop.trainer._buffered_inputs
        lessons.append(sum(len(each) for batch in batches for each in batch.get(LESSONS, ())))
        return len(taken) == steps

    loop.train(stop)
    shards = any(isinstance(p, DTensor) for p in loop.model.parameters())
    return {"gradients": gradients, "metrics": loop.pop_metrics(), "lessons": lessons, "shards": shards}


def whole_gradient(model: torch.nn.Module) -> Tensor:
    found = [p.grad for p in model.parameters() if p.requires_grad and p.grad is not None]
    whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
    return torch.cat([g.detach().reshape(-1) for g in whole]).clone()


def says(
    self: Any, prompt_ids: list[list[int]], images: Any, fields: Any, num_generations: int, **kwargs: Any
) -> tuple[list[list[int]], None]:
    after_a_call = num_generations == 1
    texts = []
    for i, ids in enumerate(prompt_ids):
        kind, a, b = self._tokenizer.decode(ids).split("<user>")[1].split("<end>")[0].split()
        member, kind, a, b = i % num_generations, int(kind[2:]), int(a), int(b)
        name = next(n for s in range(WORLD.names) if (n := WORLD.name(kind, s)) != WORLD.right_name(kind))
        name = name if b % 2 == 0 and member % 3 == 1 else WORLD.right_name(kind)
        right = WORLD.result(kind, a, b)
        if after_a_call:
            texts.append(f"{right if a % 2 == 0 else (right + len(ids)) % 20} <end>")
        elif member % 4 == 3:
            texts.append(f"{right if a % 2 == 0 and member == 3 else 'giveup'} <end>")
        else:
            texts.append(f"<call> {name} a {a} b {b + member if b + member < 20 else b} </call> <end>")
    return [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts], None
