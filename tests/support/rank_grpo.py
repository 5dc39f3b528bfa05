"""GRPO on the ranks of one slot without a run: to compare shards with replicas, and ranks that generate apart."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from diloco.outer.ranks.group import Group, join_ranks
from inner.models.shards import whole_weights
from inner.settings.inner import InnerConfig, Seeds
from inner.train import ranks
from inner.train.build import build_inner
from tests.support.ranks import let_accelerate_shard


def train(config: InnerConfig, model: str, told: str, placement: dict[str, object], steps: int) -> int:
    """Take `steps` inner steps as one rank; rank 0 saves the weights, and whether they are in shards."""
    torch.set_num_threads(1)
    join_ranks()
    ranks.SHARDED = placement
    if placement:
        let_accelerate_shard()
    loop: Any = build_inner(config, Path(model), {}, Seeds(1, 2))
    loop.place()
    sharded = [isinstance(p, DTensor) for p in loop.model.parameters()]
    taken: list[int] = []

    def stop() -> bool:
        taken.append(1)
        return len(taken) == steps

    loop.train(stop)
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in loop.model.parameters()]
    if os.environ["RANK"] == "0":
        torch.save((torch.cat([p.detach().reshape(-1) for p in whole]), all(sharded), loop.pop_metrics()), told)
    return 0


def generate_apart(config: InnerConfig, model: str, told: str) -> int:
    """Let rank 1 of a model in shards generate twice, and rank 0 once, as where only rank 1 has called a tool."""
    torch.set_num_threads(1)
    group = Group()
    let_accelerate_shard()
    loop: Any = build_inner(config, Path(model), {}, Seeds(1, 2))
    loop.place()
    ids = torch.tensor([[3]])
    with torch.no_grad(), whole_weights(loop.model):
        for _ in range(1 + group.index):
            loop.trainer.model.generate(input_ids=ids, attention_mask=ids > 0, max_new_tokens=3 + group.index)
    if found := group.gather(group.index):
        Path(told).write_text(str(found))
    return 0
