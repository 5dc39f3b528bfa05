"""Several devices for each replica of a place: what cannot have them, and which GPUs a slot gets."""

import re
from pathlib import Path
from typing import Any

import pytest

from diloco.replica.rank_faults import rank_fault
from diloco.run.config import RunConfig
from executors.platforms.base import ExecutorError, ReplicaSpec
from executors.platforms.on_host.affinity import gpu_of
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.places import Place
from executors.preflight import place_faults


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"inner": {"loop": "supervised", "model": "tiny", "data": {"text": "t.txt"}}}, 'inner.loop = "supervised"'),
        ({"inner": {"model": "toolworld", "process": {"head": "h.safetensors"}}}, "inner.process.head scores with a"),
        (
            {"inner": {"model": "toolworld", "process": {"function": "p.py:f"}, "grpo": {"objective": "bnpo"}}},
            r'\[inner.process\] with scale_rewards = "batch" compares',
        ),
        ({"inner": {"model": "toolworld", "optimizer": "muon"}}, 'inner.optimizer = "muon" needs matrices that'),
        ({"inner": {"model": "toolworld", "optimizer": "adamw8bit"}}, 'inner.optimizer = "adamw8bit" was seen'),
        (
            {"inner": {"model": "toolworld", "grpo": {"objective": "dapo"}}},
            'objective = "dapo" was seen',
        ),
        ({"inner": {"model": "toolworld", "trl": {"beta": 0.1}}}, "inner.trl.beta compares with a reference model"),
        ({"inner": {"model": "toolworld", "lora": {"r": 4, "base": "nf4"}}}, "inner.lora.base was seen"),
        ({"fleet": {"record_rollouts": True}}, "fleet.record_rollouts"),
        ({"rendezvous": "lighthouse://h:1"}, 'rendezvous = "lighthouse://h:1" needs one process'),
        (
            {"eval": {"prompts": "p.jsonl"}, "outer": {"sync_every": 4, "fragments": 2}},
            r"\[eval\] needs the whole",
        ),
    ],
    ids=str,
)
def test_what_needs_one_device_is_told_before_the_start(
    changed: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_faults, "bitsandbytes_user", lambda config: None)  # whether it is installed: test_nf4
    for name in ("t.txt", "p.jsonl", "p.py", "h.safetensors"):
        (tmp_path / name).write_text("{}")
    config = RunConfig.from_dict({"inner": {"model": "toolworld"}, **changed}, tmp_path)
    (fault,) = place_faults.place_faults(config, "runs/x", [Place("local", options={"devices": 2})], {})
    assert re.search(f"each replica is to have 2 devices, and .*{told}", fault)
    assert not list(place_faults.place_faults(config, "runs/x", [Place("local")], {}))


ADAPTER = {"lora": {"r": 4}}


@pytest.mark.parametrize(
    "inner",
    [
        {"sdpo": {"weight": 0.1}, "replay": {"weight": 0.1, "pairs": "p.jsonl"}},
        {"process": {"function": "p.py:f"}},
        {**ADAPTER, "process": {"head": "h.safetensors"}, "optimizer": "muon"},
    ],
    ids=str,
)
def test_the_channels_may_have_several_devices(inner: dict[str, Any], tmp_path: Path) -> None:
    for name in ("p.jsonl", "p.py", "h.safetensors"):
        (tmp_path / name).write_text("{}")
    config = RunConfig.from_dict({"inner": {"model": "toolworld", **inner}}, tmp_path)
    assert rank_fault(config, 2) == ""


def test_devices_are_a_number_and_each_has_a_gpu() -> None:
    for wrong in (0, "two", 65):
        with pytest.raises(ExecutorError, match="this many processes train a replica's model together, 1 to 64"):
            LocalProcessExecutor(devices=wrong)
    spec = ReplicaSpec("runs/x", "r01", gpu=("any",))
    assert gpu_of(spec, ["0", "1", "2", "3"], devices=2) == "2,3"
    with pytest.raises(ExecutorError, match="devices = 2: this machine has 1 such GPUs"):
        gpu_of(spec, ["0"], devices=2)
    assert Place("local", options={"devices": 3}).devices == 3 and Place("modal", gpu=("H100:8",)).devices == 1
