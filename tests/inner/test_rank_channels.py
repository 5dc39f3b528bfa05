"""The channels on several ranks: two ranks are one process with twice the batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_channels import one_and_two, write_pairs

slow = pytest.mark.slow
HINT = {"sdpo": {"weight": 5.0}}
LIVE, FROZEN = ({"sdpo": {"weight": 0.9, "teacher": teacher}} for teacher in ("live", "frozen"))
EMA = {"sdpo": {"weight": 5.0, "teacher": "ema", "ema_rate": 0.5}}
ROLLOUT = {"sdpo": {"weight": 5.0, "context": "rollout", "top_k": 20}}
TRUNCATED = {
    "grpo": {"weight": 0.0},
    "trl": {"mask_truncated_completions": True},
    "sampling": {"max_completion_length": 9},
}
TWICE = {"gradient_accumulation_steps": 2}
LEAN = {"gradient_checkpointing": True}
PROCESS = {"function": "process.py:score", "weight": 20.0}
HEAD = {"head": "head.safetensors", "weight": 20.0}
LORA = {"lora": {"r": 4}}
OWN = ("samples", "grpo_grad_norm", "sdpo_grad_norm", "replay_grad_norm")  # of one rank; the log has their mean
SHUFFLED = ("entropy",)  # of one forward pass, and each process shuffles its rollouts in another way


@pytest.mark.parametrize(
    ("shard", "inner"),
    [
        (False, HINT),
        pytest.param(True, HINT, marks=slow),
        pytest.param(True, {**HINT, "tied": False}, marks=slow),
        pytest.param(True, {**HINT, **TWICE}, marks=slow),
        pytest.param(True, {**HINT, **LEAN}, marks=slow),
        pytest.param(True, LIVE, marks=slow),
        pytest.param(True, FROZEN, marks=slow),
        pytest.param(True, EMA, marks=slow),
        pytest.param(True, {**ROLLOUT, "process": {**PROCESS, "credit": "rest"}}, marks=slow),
        pytest.param(False, {**ROLLOUT, **TWICE}, marks=slow),
        pytest.param(False, {**ROLLOUT, **TRUNCATED}, marks=slow),
        pytest.param(False, {**EMA, **LEAN, "process": PROCESS}, marks=slow),
        pytest.param(False, {**HINT, **LORA, "optimizer": "muon", "lr": 1e-3}, marks=slow),
        pytest.param(False, {**ROLLOUT, **LORA, "process": HEAD}, marks=slow),
    ],
    ids=str,
)
def test_two_ranks_are_one_process_with_twice_the_batch(shard: bool, inner: dict[str, Any], tmp_path: Path) -> None:
    """In the four steps a lesson is on rank 1, on both ranks, on none, on rank 0."""
    replay = {"weight": 0.3, "pairs": write_pairs(tmp_path / "pairs.jsonl")}
    one, two = one_and_two(tmp_path, shard=shard, replay=replay, **inner)
    for whole, halves in zip(one["gradients"], two["gradients"], strict=True):
        assert whole.norm() > 1 and (whole - halves).norm() < 1e-5 * whole.norm()
    if inner["sdpo"].get("context") != "rollout":
        assert two["lessons"] == [[0, 2, 0, 2], [2, 2, 0, 0]]
    assert two["metrics"].keys() == one["metrics"].keys()
    means = {name: value for name, value in one["metrics"].items() if name not in (*OWN, *SHUFFLED)}
    assert {name: two["metrics"][name] for name in means} == pytest.approx(means, rel=1e-4)
