"""Memory, bytes and seconds before a run: formulas, and what a real run left in its folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.run import footprint as sizes
from diloco.run.config import RunConfig
from diloco.run.sizing import BUILT_IN
from executors.preflight.outlook import rate_line
from inner import InnerConfig
from inner.settings.task import DataSettings, LoraSettings, RewardSettings, ScheduleSettings
from rendezvous.codecs import DENSE, get_codec
from rendezvous.keeping.garbage import parse_blob_key
from tests.support.fleet import Fleet


def stored(run: Path) -> dict[str, int]:
    """kind -> bytes of all blobs of that kind."""
    found = {"delta": 0, "mean": 0, "snapshot": 0}
    for path in run.rglob("*"):
        blob = parse_blob_key(path.relative_to(run).as_posix()) if path.is_file() else None
        if blob is not None:
            found[blob[0]] += path.stat().st_size
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["int8", "fp32"])
def test_the_bytes_of_a_real_run(tmp_path: Path, name: str) -> None:
    """Three real replicas, six steps: every replica's pseudogradient counts in all of them."""
    fleet = Fleet(tmp_path, outer={"codec": name, "snapshot_every": 3}, fleet={"min_replicas": 3})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    found, parameters, steps = stored(tmp_path / "run"), fleet_parameters(tmp_path), len(fleet.commits())
    offers = len(list((tmp_path / "run").glob("steps/*/delta/*.bin")))
    assert found["delta"] == pytest.approx(offers * sizes.delta_bytes(parameters, name), rel=0.01)
    mean = sizes.mean_bytes(parameters, 3, name)
    assert (mean > 0) is (name == "fp32")  # three bodies of int8 are less than the mean twice
    assert found["mean"] == pytest.approx(steps * mean, rel=0.2)  # who closes announces it; one may be late
    snapshots = len(list((tmp_path / "run").glob("snapshots/*/*.safetensors")))
    later = (snapshots - 1) * sizes.snapshot_bytes(parameters)
    assert found["snapshot"] == pytest.approx(later + 4 * parameters, rel=0.01), "snapshot 0 has no momentum"
    whole = found["delta"] + found["mean"]
    assert whole == pytest.approx(steps * sizes.step_bytes(parameters, 3, name), rel=0.25)


def fleet_parameters(folder: Path) -> int:
    from diloco.run.record import ModelRecord
    from rendezvous import layout
    from rendezvous.stores.open import open_store

    body = open_store(str(folder / "run")).get(layout.MODEL_MANIFEST)
    assert body is not None
    total = 0
    for _, shape, _ in ModelRecord.decode(body).layout:
        count = 1
        for n in shape:
            count *= n
        total += count
    return total


@pytest.mark.parametrize("name", [*DENSE, "topk"])
def test_a_pseudogradient_is_as_long_as_its_codec_says(name: str) -> None:
    n = 1_000_000
    assert sizes.delta_bytes(n, name) == pytest.approx(get_codec(name).max_body_size(n), rel=0.05)


def test_what_a_gsm8k_run_leaves_without_a_budget() -> None:
    """The 175 GB that were seen at 0.5 B, three replicas, 20 steps, a snapshot every 5 (issue 13, B.4)."""
    raw = {"fleet": {"replicas": 3, "steps": 20, "keep": "all"}, "outer": {"snapshot_every": 5}}
    found = sizes.footprint(RunConfig.from_dict(raw), 494_032_768, 3, 20)
    assert found.each_step == 4 * 4 * 494_032_768 and found.each_snapshot == 8 * 494_032_768
    assert found.in_all / 1e9 == pytest.approx(175, rel=0.05)


def test_a_long_mean_travels_in_the_codec_of_the_bodies() -> None:
    """Reduced in shards from 8 MiB and three replicas on."""
    assert sizes.mean_bytes(50_000_000, 3, "int8") == sizes.delta_bytes(50_000_000, "int8") == 50_000_000
    assert sizes.mean_bytes(50_000_000, 2, "int8") == 0 and sizes.mean_bytes(50_000_000, 2, "fp32") == 200_000_000


def test_recorded_rollouts_are_in_the_plan() -> None:
    """64 inner steps of 8 rollouts on two replicas, 100 tokens each."""
    raw = {"fleet": {"record_rollouts": True}, "outer": {"sync_every": 64}}
    inner = {"batch_size": 8, "sampling": {"max_completion_length": 100}}
    found = sizes.footprint(RunConfig.from_dict({**raw, "inner": inner}), 1_000_000, 2, 10)
    assert found.rollouts == 9 * 64 * 8 * 2 * 100 and "up to 922 kB of recorded tokens" in "".join(
        sizes.lines(found, 10)
    )
    silent = RunConfig.from_dict({"fleet": {"log_rollouts": 0}})
    assert not silent.fleet.record_rollouts
    assert "recorded" not in "".join(sizes.lines(sizes.footprint(silent, 1_000_000, 2, 10), 10))


def test_fragments_divide_a_step_and_not_the_run() -> None:
    whole, part = sizes.step_bytes(1_000_000, 2, "fp32"), sizes.step_bytes(1_000_000, 2, "fp32", fragments=4)
    assert part * 4 == whole


def test_memory_follows_the_dtype() -> None:
    fp32 = sizes.footprint(RunConfig.from_dict({}), 1_000_000, 2, 10)
    bf16 = sizes.footprint(RunConfig.from_dict({"inner": {"dtype": "bfloat16"}}), 1_000_000, 2, 10)
    assert (fp32.device, bf16.device) == (16_000_000, 8_000_000) and fp32.host == bf16.host == 20_000_000


def test_one_replica_syncs_with_nobody() -> None:
    raw = {"fleet": {"replicas": 1}}
    assert sizes.footprint(RunConfig.from_dict(raw), 1_000_000, 1, 10).sync_s == 0.0


def test_an_automatic_codec_is_the_one_for_the_assumed_link() -> None:
    raw = {"outer": {"codec": "auto", "sync_every": 1}}
    found = sizes.footprint(RunConfig.from_dict(raw), 7_000_000_000, 4, 10)
    assert found.codec != "fp32" and found.codec in sizes.lines(found, 10)[1]


def test_the_words() -> None:
    found = sizes.footprint(RunConfig.from_dict({}), BUILT_IN["toolworld"], 3, 40)
    memory, bucket, sync = sizes.lines(found, 40)
    assert "on the device" in memory and "of host memory" in memory
    assert "per outer step (fp32)" in bucket and "after 40 steps" in bucket
    assert "stay (fleet.keep)" in sizes.lines(found, 40, keep=1_000_000)[1]
    assert "that a replica may need, up to" in sizes.lines(found, 40, keep=0)[1]
    assert "at an assumed 1 Gbit/s up and down" in sync and "diloco doctor" in sync


def test_plan_says_the_rate_that_so_many_replicas_train_with() -> None:
    whole = InnerConfig(model="toolworld")
    adapter = InnerConfig(
        model="a/model", data=DataSettings(prompts="p.jsonl"), rewards=RewardSettings(function="r.py:f"),
        lora=LoraSettings(r=4, alpha=8.0),
    )  # fmt: skip
    assert rate_line(RunConfig(inner=whole), 4).startswith(
        "learning rate 0.002: inner.lr = 0.001 is for one machine, × √4"
    )
    assert rate_line(RunConfig(inner=whole), 1) == "learning rate 0.001"
    assert rate_line(RunConfig(inner=adapter), 4).startswith("learning rate 0.0002: inner.lr = 0.0001 is for one machi")
    constant = replace(adapter, schedule=ScheduleSettings(lr_replicas="constant"))
    assert rate_line(RunConfig(inner=constant), 4) == "learning rate 0.0001, as for one machine, for 4 replicas"
    linear = InnerConfig(model="toolworld", schedule=ScheduleSettings(lr_replicas="linear", lr_warmup=3))
    assert rate_line(RunConfig(inner=linear), 4).startswith(
        "learning rate 0.004: inner.lr = 0.001 is for one machine, × 4 for"
    )
