"""Several devices for each replica of a place: what cannot have them, and which GPUs a slot gets."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.replica.rank_faults import rank_fault
from diloco.run.config import RunConfig
from diloco.run.footprint import footprint, lines
from diloco.run.script import Script, ScriptConfig
from executors.platforms.base import ExecutorError, ReplicaSpec
from executors.platforms.machine.gpu import asked_for
from executors.platforms.on_host.affinity import gpu_of
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.on_modal.kinds import BASE_MIB, MEMORY_MIB
from executors.platforms.places import Place
from executors.preflight import place_faults
from executors.preflight.needs.gpu_faults import gigabytes_of
from executors.preflight.quote import fitted_places


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"inner": {"loop": "supervised", "model": "tiny", "data": {"text": "t.txt"}}}, 'inner.loop = "supervised"'),
        ({"inner": {"model": "toolworld", "process": {"head": "h.safetensors"}}}, "inner.process.head scores with a"),
        (
            {"inner": {"model": "toolworld", "process": {"function": "p.py:f"}, "grpo": {"objective": "bnpo"}}},
            r'\[inner.process\] with scale_rewards = "batch" compares',
        ),
        ({"inner": {"model": "toolworld", "optimizer": "muon"}}, 'inner.optimizer = "muon" needs whole matrices'),
        ({"inner": {"model": "toolworld", "optimizer": "adamw8bit"}}, 'inner.optimizer = "adamw8bit" was tested'),
        (
            {"inner": {"model": "toolworld", "grpo": {"objective": "dapo"}}},
            'objective = "dapo" was tested',
        ),
        ({"inner": {"model": "toolworld", "trl": {"beta": 0.1}}}, "inner.trl.beta compares with a reference model"),
        ({"inner": {"model": "toolworld", "lora": {"r": 4, "base": "nf4"}}}, "inner.lora.base was tested"),
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


def test_actors_need_replicas_with_a_whole_model(tmp_path: Path) -> None:
    config = RunConfig.from_dict({"inner": {"model": "toolworld"}}, tmp_path)
    places = [Place("local", options={"devices": 2}), Place("local", count=1, actors=True)]
    (fault,) = place_faults.place_faults(config, "runs/x", places, {})
    assert "trains on its own rollouts only. Start no actors, add [inner.lora], or use one device" in fault
    adapter = RunConfig.from_dict({"inner": {"model": "toolworld", **ADAPTER}}, tmp_path)
    assert not list(place_faults.place_faults(adapter, "runs/x", places, {}))


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
        with pytest.raises(ExecutorError, match="devices must be 1 to 64, the processes that train"):
            LocalProcessExecutor(devices=wrong)
    spec = ReplicaSpec("runs/x", "r01", gpu=("any",))
    assert gpu_of(spec, ["0", "1", "2", "3"], devices=2) == "2,3"
    for slot, gpu in (("a00", "3"), ("a01", "2"), ("a04", "3")):  # an actor uses one, from the last
        assert gpu_of(replace(spec, slot=slot), ["0", "1", "2", "3"], devices=2) == gpu
    with pytest.raises(ExecutorError, match="devices = 2: this machine has 1 such GPUs"):
        gpu_of(spec, ["0"], devices=2)
    assert gpu_of(spec, "4, 5") == "5" and gpu_of(spec, 4) == "4"  # `--option gpus=4,5`, `--option gpus=4`
    assert Place("local", options={"devices": 3}).devices == 3 and Place("local", gpu=("0",)).devices == 1


@pytest.mark.parametrize(
    ("executor", "gpu", "devices"),
    [
        ("modal", "H100:8", 8), ("modal", "H100", 1), ("modal", "A100-80GB", 1), ("sky", "L4:1", 1), ("sky", "L4:4", 4),
        ("hf-jobs", "a10g-largex4", 4), ("hf-jobs", "a100-large", 1), ("hf-jobs", "l4x1", 1), ("slurm", "h100:2", 2),
        ("slurm", "rtx4090", 1),
    ],
)  # fmt: skip
def test_a_place_s_gpu_says_its_number_of_devices(executor: str, gpu: str, devices: int) -> None:
    place = Place(executor, gpu=(gpu,))
    assert place.devices == devices and asked_for((gpu,)) == devices
    assert not place_faults.devices_fault(RunConfig.from_dict({"inner": {"model": "toolworld"}}), place, [place])


@pytest.mark.parametrize(
    ("place", "told"),
    [
        (Place("modal", gpu=("H100:8", "A100-80GB:4")), "H100:8 has 8, A100-80GB:4 has 4.* --place modal:N:H100:8 --"),
        (Place("modal", gpu=("H100:8",), actors=True), "rents 8 GPUs for each actor .* 7 would be billed and idle"),
        (Place("hf-jobs", gpu=("a10g-largex4",), actors=True), "rents 4 GPUs for each actor"),
    ],
)
def test_devices_that_would_be_idle_or_unequal_are_told(place: Place, told: str) -> None:
    assert re.search(told, place_faults.devices_fault(RunConfig(), place, [place]))


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("L4", 24), ("l4x4", 24), ("L40S", 48), ("l40sx8", 48), ("A10G", 24), ("a10g-largex4", 24), ("A100-40GB:2", 40),
        ("a100-large", 80), ("H100!:8", 80), ("RTX-PRO-6000", 96), ("t4-small", 16), ("h200x8", 141), ("any", None),
        ("A1000", None), ("0", None),
    ],
)  # fmt: skip
def test_a_kind_s_name_says_its_memory(kind: str, gigabytes: int | None) -> None:
    assert gigabytes_of(kind) == gigabytes


def test_a_gpu_with_less_memory_than_a_replica_needs_is_told_before_it_is_rented(tmp_path: Path) -> None:
    """Before, `plan` named 388 GB "on each of 8 devices" beside H100:8, and `train` named nothing."""
    (tmp_path / "config.json").write_text("{}")
    weights = json.dumps({"w.weight": {"dtype": "BF16", "shape": [60_000, 100_000], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(weights)) + weights)
    places = [Place("modal", gpu=("H100", "H200", "any")), Place("modal", gpu=("L4",), actors=True)]
    for name in ("p.jsonl", "r.py"):
        (tmp_path / name).touch()
    inner = {"model": str(tmp_path), "data": {"prompts": "p.jsonl"}, "rewards": {"function": "r.py:f"}}
    config = RunConfig.from_dict({"inner": inner}, tmp_path)
    (told,) = place_faults.notes_about(config, "s3://b/r", places)
    assert told.startswith("warning: a replica needs 96 GB on each GPU (weights, gradients, Adam;")
    assert told.endswith("and H100 has 80 GB. Name a larger kind, or train an adapter (inner.lora)")
    assert not [*place_faults.notes_about(config, "s3://b/r", [Place("modal", gpu=("H100:2",))])], "shards of two"


def test_a_node_of_four_has_memory_and_cores_for_four_processes() -> None:
    config = RunConfig.from_dict({"inner": {"model": "toolworld"}})
    one, four = fitted_places([Place("modal", gpu=("H100",)), Place("modal", gpu=("H100:4",))], config)
    assert "cores" not in one.options and four.options["cores"] == 8.0
    assert four.options["max_memory_mib"] >= one.options["max_memory_mib"] + 3 * BASE_MIB


def test_a_node_of_four_has_memory_for_four_processes_of_a_model_of_unknown_size() -> None:
    """Before, four processes of a script had 16 GiB together, as one process has."""
    script = ScriptConfig(own_script=Script("train.py"))
    four, typed = fitted_places(
        [Place("modal", gpu=("H100:4",)), Place("modal", gpu=("H100:4",), options={"max_memory_mib": 1024})], script
    )
    assert four.options["max_memory_mib"] == 4 * MEMORY_MIB and typed.options["max_memory_mib"] == 1024


def test_shards_divide_what_a_device_holds_and_adapters_do_not() -> None:
    whole = RunConfig.from_dict({"inner": {"model": "toolworld"}})
    one, four, eight = (footprint(whole, 10**9, 2, 10, devices=k) for k in (1, 4, 8))
    assert one.device == 16 * 10**9, "weights, gradients and two moments in fp32"
    assert four.device == (4 + 12 / 4) * 10**9, "all weights while it generates, and a quarter of three"
    assert eight.device == (4 + 12 / 8) * 10**9 and eight.host == one.host
    assert "on each of 8 devices" in lines(eight, 10)[0] and "on the device" in lines(one, 10)[0]
    lora = RunConfig.from_dict({"inner": {"model": "toolworld", "lora": {"r": 4}}})
    assert len({footprint(lora, 10**9, 2, 10, 10**6, devices=k).device for k in (1, 8)}) == 1
    held = RunConfig.from_dict({"inner": {"model": "toolworld", "sdpo": {"weight": 0.1}}})
    assert footprint(held, 10**9, 2, 10, devices=2).device == (4 + 16 / 2) * 10**9, "all weights in a backward pass"


@pytest.mark.parametrize(
    ("devices", "adapter", "told"),
    [(1, None, "20 GB of host memory ("), (4, None, "20 GB of host memory ("),
     (8, None, "20 GB of host memory, and 32 GB while its 8 processes load the model ("),
     (4, 10**6, "20 MB of host memory, and 16 GB while its 4 processes load the model (")],
    ids=str,
)  # fmt: skip
def test_each_process_has_a_copy_in_host_memory_while_it_loads(devices: int, adapter: int | None, told: str) -> None:
    """`plan` named rank 0's vectors alone: with an adapter, a thousandth of what a node needs."""
    table = {"lora": {"r": 4}} if adapter else {}
    config = RunConfig.from_dict({"inner": {"model": "toolworld", **table}})
    assert told in lines(footprint(config, 10**9, 2, 10, adapter, devices=devices), 10)[0]
