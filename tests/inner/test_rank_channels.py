"""The distillation and the pairs on several ranks: two ranks are one process with twice the batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rank_channels import Told, one_and_two, write_pairs

slow = pytest.mark.slow
HINT = {"weight": 5.0}
ROLLOUT = {"weight": 5.0, "context": "rollout", "top_k": 20}
PROCESS = {"function": "process.py:score", "weight": 20.0}
TWICE = {"gradient_accumulation_steps": 2}
OWN = ("samples", "entropy", "grpo_grad_norm", "sdpo_grad_norm", "replay_grad_norm")  # metrics of one rank


@pytest.mark.parametrize(
    ("shard", "inner"),
    [
        (False, {"sdpo": HINT}),
        pytest.param(True, {"sdpo": HINT}, marks=slow),
        pytest.param(True, {"sdpo": {"weight": 0.9, "teacher": "live"}}, marks=slow),
        pytest.param(True, {"sdpo": {**HINT, "teacher": "frozen"}}, marks=slow),
        pytest.param(True, {"sdpo": {**HINT, "teacher": "ema", "ema_rate": 0.5}}, marks=slow),
        pytest.param(False, {"sdpo": {**HINT, "teacher": "ema", "ema_rate": 0.5}}, marks=slow),
        pytest.param(True, {"sdpo": ROLLOUT}, marks=slow),
        pytest.param(True, {"sdpo": HINT, "tied": False}, marks=slow),
        pytest.param(False, {"sdpo": ROLLOUT, **TWICE}, marks=slow),
        pytest.param(True, {"sdpo": HINT, **TWICE}, marks=slow),
        pytest.param(False, {"sdpo": HINT, "gradient_checkpointing": True}, marks=slow),
        pytest.param(True, {"sdpo": HINT, "gradient_checkpointing": True}, marks=slow),
        pytest.param(False, {"sdpo": HINT, "lora": {"r": 4}}, marks=slow),
        pytest.param(False, {"sdpo": ROLLOUT, "grpo": {"weight": 0.0}, "mask": True}, marks=slow),
        pytest.param(False, {"sdpo": HINT, "process": PROCESS}, marks=slow),
        pytest.param(True, {"sdpo": ROLLOUT, "process": {**PROCESS, "credit": "rest"}}, marks=slow),
        pytest.param(False, {"sdpo": HINT, "lora": {"r": 4}, "optimizer": "muon", "lr": 1e-3}, marks=slow),
    ],
    ids=str,
)
def test_two_ranks_are_one_process_with_twice_the_batch(shard: bool, inner: dict[str, Any], tmp_path: Path) -> None:
    """In the four steps a lesson is on rank 1, on both ranks, on none, on rank 0."""
    if inner.pop("mask", None):
        inner = {**inner, "trl": {"mask_truncated_completions": True}, "sampling": {"max_completion_length": 9}}
    replay = {"weight": 0.3, "pairs": write_pairs(tmp_path / "pairs.jsonl")}
    one, two = one_and_two(tmp_path, shard=shard, replay=replay, **inner)
    print(one["lessons"], two["lessons"], one["metrics"].keys())
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        print(a.norm(), (a - b).norm() / a.norm())
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        assert (a - b).norm() < 1e-5 * a.norm()
    means = {name: value for name, value in one["metrics"].items() if name not in OWN}
    assert two["metrics"].keys() == one["metrics"].keys()
    assert {name: two["metrics"][name] for name in means} == pytest.approx(means, rel=1e-4)
