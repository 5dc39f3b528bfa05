"""The distillation and the pairs on several ranks: two ranks are one process with twice the batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_channels import Told, trained, write_pairs

ROLLOUT = {"context": "rollout", "top_k": 20}


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("teacher", ["round","live","ema","frozen"])
@pytest.mark.parametrize("context", ["hint","rollout"])
def test_two_ranks_have_the_gradients_of_one_process_with_twice_the_batch(tmp_path: Path, shard, teacher, context) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    sdpo = {"sdpo": {"weight": 0.5, "teacher": teacher, "context":context}, "replay": {"weight":0.3, "pairs":pairs, "batch_size": 4}}
    one = trained(tmp_path / "one", 1, **sdpo)
    sdpo["replay"]["batch_size"]=2
    two = trained(tmp_path / "two", 2, shard=shard, **sdpo)
    print(one["lessons"],two["lessons"])
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        print(a.norm(), (a - b).norm() / a.norm())
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        assert (a - b).norm() < 2e-6 * a.norm()
