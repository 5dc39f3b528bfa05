"""θ₀ of a Hub model is named and not carried; snapshot 0 has no momentum.  The real client, a Hub on loopback."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import ignore_patterns
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPTNeoXConfig,
    PhiConfig,
    Qwen2Config,
)

from diloco.model.export import empty_state, export, model_record, state_at, write_model
from diloco.model.publish import publish, publish_model
from diloco.model.start_model import first_arrays, refuse_other_bits, theta_digest
from diloco.model.zeros import fetch_model_without_weights
from diloco.process import exitcodes
from diloco.run.config import ConfigError, RunConfig
from diloco.run.footprint import footprint
from diloco.run.founding import open_run
from diloco.run.record import ModelRecord, Parent, read_model, read_run
from diloco.run.script import Script, ScriptConfig
from inner import InnerConfig, InnerError
from inner import publish_model as made
from inner.models.drawn import refuse_drawn
from inner.models.hub_model import link_hub_files, needed_files, pin_hub_model
from inner.models.known import known_model
from inner.models.naming import HubError, HubModel
from inner.settings.task import LoraSettings
from inner.train.build import load_start
from inner.train.dry_run import load_shape
from inner.usercode import reward_form
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import RecordsLost, WrongRun
from rendezvous.records.records import Snapshot
from rendezvous.snapshots import record as snapshots
from rendezvous.stores.files import FileStore
from rendezvous.stores.open import open_store
from tests.rendezvous.test_engine import Seat, bucket
from tests.support.audit import check_run
from tests.support.fakes import ManualClock, unchecked
from tests.support.fleet import Fleet, config
from tests.support.hf_models import HubModels
from tests.support.tiny_models import tiny_model_folder

NAME = "tester/tiny"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubModels]:
    """A Hub with one model, and a cache of our own."""
    made(InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"}), tmp_path / "there")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with HubModels({NAME: tmp_path / "there"}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def from_hub(**changes: Any) -> InnerConfig:
    return InnerConfig(**{"loop": "supervised", "model": NAME, "data": {"text": "text.txt"}, **changes})


def hub_fleet(folder: Path, hub: HubModels, **changes: Any) -> Fleet:
    inner = {"model": NAME, **changes.pop("inner", {})}
    return Fleet(folder, environ={"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": ""}, inner=inner, **changes)


def blobs(run: Path) -> dict[str, int]:
    """Files below the run that are no records and no logs."""
    paths = [p for p in run.rglob("*") if p.is_file() and p.suffix not in (".json", ".jsonl")]
    return {p.relative_to(run).as_posix(): p.stat().st_size for p in paths if "code" not in p.parts}


# ---------------------------------------------------------------------- a fleet


def test_three_replicas_take_the_start_model_from_the_hub_and_the_bucket_never_has_it(
    tmp_path: Path, hub: HubModels
) -> None:
    """Each with a cache of its own; one is killed before there is a snapshot, and its successor starts from θ₀."""
    fleet = hub_fleet(tmp_path, hub, outer={"snapshot_every": 4, "lr": "auto"}, fleet={"min_replicas": 3})
    assert fleet.model.hub == {"model": NAME, "commit": hub.commit(NAME)}
    hub.asked.clear()
    for i in range(3):
        die = "after:create:/offer/@2" if i == 1 else ""
        fleet.start(f"r{i:02d}", die=die, HF_HOME=str(tmp_path / f"cache{i}"))
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None)
    fleet.start("r01", HF_HOME=str(tmp_path / "cache1"))
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    assert hub.downloaded().count("model.safetensors") == 3, "the successor had it in its slot's cache"
    run = tmp_path / "run"
    assert sorted(os.listdir(run / "model")) == ["manifest.json"]
    assert sorted(os.listdir(run / "snapshots" / f"{0:010d}")) == ["manifest.json"]
    check_run(run, 6, tmp_path / "there" / "model.safetensors")
    for step in (0, 3, 6):
        assert export(str(run), step, tmp_path / f"at{step}") == step
    start, exported = load_file(tmp_path / "there" / "model.safetensors"), load_file(tmp_path / "at0/model.safetensors")
    assert all(torch.equal(start[name], values) for name, values in exported.items())
    assert (tmp_path / "at6" / "tokenizer.json").read_bytes() == (tmp_path / "there" / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_a_replica_that_joins_where_a_snapshot_stands_asks_the_hub_for_no_weights(
    tmp_path: Path, hub: HubModels
) -> None:
    fleet = hub_fleet(tmp_path, hub, outer={"sync_every": 20}, fleet={"steps": 10, "min_replicas": 2, "keep": "all"})
    for slot in ("r00", "r01"):
        fleet.start(slot, HF_HOME=str(tmp_path / "cache"))
    fleet.wait_for(lambda: fleet.commit(3) and fleet.store.get(layout.snapshot_key(2)))
    hub.asked.clear()
    fleet.start("r02", HF_HOME=str(tmp_path / "empty"))
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert "config.json" in hub.downloaded() and not [n for n in hub.downloaded() if n.endswith(".safetensors")]
    check_run(tmp_path / "run", 10, tmp_path / "there" / "model.safetensors")  # every digest that was logged
    assert any(o.slot == "r02" for c in fleet.commits() for o in c.offers)


@pytest.mark.slow
def test_weights_that_were_not_asked_for_are_when_the_snapshot_turns_out_to_be_damaged(
    tmp_path: Path, hub: HubModels
) -> None:
    fleet = hub_fleet(tmp_path, hub, outer={"snapshot_every": 4}, fleet={"replicas": 1, "min_replicas": 1})
    fleet.start("r00", die="after:create:/offer/@6", HF_HOME=str(tmp_path / "cache"))
    fleet.wait_for(lambda: fleet.sessions["r00"][0].exitcode is not None)
    newest = next(snapshots.newest_first(fleet.store))
    assert newest.t == 4
    fleet.store.put(newest.blob, b"damaged")
    hub.asked.clear()
    fleet.start("r00", HF_HOME=str(tmp_path / "empty"))
    assert fleet.wait() == {"r00": [-9, 0]}, fleet.logs()
    asked = hub.downloaded()
    assert asked.count("model.safetensors") == 1 and asked.index("config.json") < asked.index("model.safetensors")
    check_run(tmp_path / "run", 6, tmp_path / "there" / "model.safetensors")


def test_the_same_run_of_a_folder_carries_it_and_the_bytes_are_those_of_the_formula(
    tmp_path: Path, hub: HubModels
) -> None:
    found = dict[str, int]()
    for kind, model in (("hub", NAME), ("folder", str(tmp_path / "there"))):
        (where := tmp_path / kind).mkdir()
        fleet = Fleet(where, inner={"model": model}, fleet={"replicas": 1, "steps": 1, "min_replicas": 1},
                      environ={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")})  # fmt: skip
        fleet.start("r00")
        assert fleet.wait() == {"r00": [0]}, fleet.logs()
        first = {n: s for n, s in blobs(where / "run").items() if n.startswith(("model/", f"snapshots/{0:010d}"))}
        found[kind] = sum(s for n, s in first.items() if n.endswith(".safetensors"))
        parameters = sum(int(np.prod(shape)) for _, shape, _ in fleet.model.layout)
        expected = footprint(fleet.config, parameters, 1, 1)
        assert found[kind] == pytest.approx(expected.once, rel=0.02)
        assert expected.in_all == expected.once + expected.each_step + expected.each_snapshot
    assert found["hub"] == 0 < found["folder"]


def test_a_replica_that_gets_other_bits_says_so_and_trains_nothing(tmp_path: Path, hub: HubModels) -> None:
    fleet = hub_fleet(tmp_path, hub, fleet={"replicas": 1, "min_replicas": 1})
    weights = bytearray((tmp_path / "there" / "model.safetensors").read_bytes())
    weights[-3] ^= 1
    hub.swapped["model.safetensors"] = bytes(weights)
    fleet.start("r00", HF_HOME=str(tmp_path / "mirror"))
    assert fleet.wait() == {"r00": [exitcodes.CRASHED]}
    said = fleet.logs()
    assert f"model.safetensors of {NAME} at commit {hub.commit(NAME)} has other bits here" in said
    assert "Next: give this machine access to it" in said and "inner.model = FOLDER" in said
    assert fleet.commits() == [] and fleet.store.get(layout.snapshot_key(0)) is None
    hub.swapped.clear()  # what was taken is not believed later either
    fleet.start("r00", HF_HOME=str(tmp_path / "mirror"))
    assert fleet.wait()["r00"][-1] == exitcodes.DONE, fleet.logs()


@pytest.mark.slow
def test_a_replica_without_a_way_to_the_hub_waits_and_ends_resumable(tmp_path: Path, hub: HubModels) -> None:
    fleet = hub_fleet(tmp_path, hub, fleet={"give_up_s": 2.0, "replicas": 2, "min_replicas": 1})
    hub.down = 407  # a proxy that wants to know who asks; the client tries a refused connection for half a minute
    fleet.start("r00", HF_HOME=str(tmp_path / "nothing"))
    fleet.wait_for(lambda: (b := fleet.beat("r00")) is not None and b.note.startswith("waits for the Hub"))
    fleet.wait_for(lambda: fleet.sessions["r00"][0].exitcode is not None)
    fleet.start("r01", HF_HOME=str(tmp_path / "cache"))  # whose cache is full
    assert fleet.wait() == {"r00": [exitcodes.GAVE_UP], "r01": [exitcodes.DONE]}, fleet.logs()
    said = fleet.log("r00").read_text()
    assert "cannot be taken from the Hub" in said and f"hf download {NAME} --revision {hub.commit(NAME)}" in said


# ---------------------------------------------------------------------- what is named, and what is carried


def test_a_revision_becomes_a_commit_when_the_model_is_named(tmp_path: Path, hub: HubModels) -> None:
    found = pin_hub_model(from_hub())
    assert found is not None and found.commit == hub.commit(NAME)
    assert set(found.files) == {p.name for p in (tmp_path / "there").iterdir()}
    (tmp_path / "there" / "config.json").write_bytes((tmp_path / "there" / "config.json").read_bytes() + b"\n")
    later = pin_hub_model(from_hub())
    assert later is not None and later.commit == hub.commit(NAME) != found.commit
    assert link_hub_files(found, _new(tmp_path / "old")), (
        "the commit of the run is what the cache has, whatever main is now"
    )
    with pytest.raises(HubError) as refused:
        shutil.rmtree(tmp_path / "cache")
        link_hub_files(found, _new(tmp_path / "gone"))
    assert refused.value.final, "the Hub says that it has no such commit"


def test_a_folder_of_links_is_made_a_second_time(hub: HubModels, tmp_path: Path) -> None:
    """A heal that begins again at θ₀ twice, or a try that the Hub left half done."""
    found = pin_hub_model(from_hub())
    assert found is not None
    for _ in range(2):
        link_hub_files(found, tmp_path / "model")
    assert {p.name for p in (tmp_path / "model").iterdir()} == set(found.files)


def test_pytorchs_own_files_are_weights_too(hub: HubModels, tmp_path: Path) -> None:
    there = tmp_path / "there"
    torch.save(load_file(there / "model.safetensors"), there / "pytorch_model.bin")
    (there / "model.safetensors").unlink()
    run = open_run(config(tmp_path, inner={"model": NAME}), str(tmp_path / "run"), SystemClock())
    record = publish_model(run, SystemClock())
    assert record.hub and "pytorch_model.bin" in record.files
    hub.asked.clear()
    shutil.rmtree(tmp_path / "cache")
    folder = fetch_model_without_weights(run.store, record, tmp_path / "zeros")
    assert "config.json" in hub.downloaded() and "pytorch_model.bin" not in hub.downloaded()
    assert load_start(folder, "float32")[1] == []


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_a_full_cache_needs_no_hub(hub: HubModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pin_hub_model(from_hub())
    assert found is not None
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert pin_hub_model(from_hub()) == found
    asked = len(hub.asked)
    assert load_start(link_hub_files(found, _new(tmp_path / "model")), "float32")[1] == []
    assert len(hub.asked) == asked


def test_a_gated_model_is_refused_at_once(hub: HubModels, tmp_path: Path) -> None:
    found = pin_hub_model(from_hub())
    assert found is not None
    hub.gated = {NAME}
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(HubError) as refused:
        link_hub_files(found, _new(tmp_path / "model"))
    assert refused.value.final
    with pytest.raises(InnerError, match="the Hub token"):
        pin_hub_model(from_hub())


def test_only_what_from_pretrained_reads_is_named() -> None:
    texts = ["config.json", "generation_config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["README.md", "consolidated.safetensors", "onnx/model.onnx", "pytorch_model.bin", "modeling_own.py",
              "pytorch_model.bin.index.json"]  # fmt: skip
    assert needed_files([*texts, *shards, *others]) == sorted([*texts, *shards])
    assert needed_files(["config.json", "pytorch_model.bin"]) == ["config.json", "pytorch_model.bin"]
    assert needed_files(["config.json", "model.gguf"]) == []


@pytest.mark.parametrize("gone", ["lm_head", "mlp"])
def test_a_head_that_no_file_has_is_carried_as_it_was_drawn(tmp_path: Path, hub: HubModels, gone: str) -> None:
    """Every replica would draw another.  A model that lacks other weights is refused."""
    path = tmp_path / "there" / "model.safetensors"
    settings = json.loads((path.parent / "config.json").read_text())
    (path.parent / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": False}))
    weights = {name: value for name, value in load_file(path).items() if gone not in name}
    save_file(weights, path, metadata={"format": "pt"})
    run = open_run(config(tmp_path, inner={"model": NAME}), str(tmp_path / "run"), SystemClock())
    if gone == "mlp":
        with pytest.raises(InnerError, match=r"lack \d+ of its weights"):
            publish_model(run, SystemClock())
        return
    record = publish_model(run, SystemClock())
    assert not record.hub and record.hub_model is None
    assert (tmp_path / "run" / record.files["model.safetensors"]["key"]).is_file()


@pytest.mark.parametrize(("stored", "trained"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_rounding_has_one_result(tmp_path: Path, hub: HubModels, stored: str, trained: str) -> None:
    """θ₀ = fp32 of the run's dtype of the file's values; what a folder carries has the same bits."""
    there = tmp_path / "there"
    model = AutoModelForCausalLM.from_pretrained(there, dtype=getattr(torch, stored))
    model.save_pretrained(there)
    kinds = {"hub": NAME, "folder": str(there)}
    inner = {kind: {"model": name, "dtype": trained} for kind, name in kinds.items()}
    records = dict[str, ModelRecord]()
    for kind in kinds:
        run = open_run(config(tmp_path, inner=inner[kind]), str(tmp_path / kind), SystemClock())
        records[kind] = publish_model(run, SystemClock())
    assert records["hub"].theta == records["folder"].theta and records["hub"].layout == records["folder"].layout
    expected = load_file(there / "model.safetensors")
    dtype = getattr(torch, trained)
    flat = torch.cat([expected[name].to(dtype).float().reshape(-1) for name, _, _ in records["hub"].layout])
    found = first_arrays(there, trained, config(tmp_path).outer)
    assert found["theta.0"].tobytes() == flat.numpy().tobytes() and not found["momentum.0"].any()


def test_other_bits_after_reading_are_refused(tmp_path: Path, hub: HubModels) -> None:
    model, drawn = load_start(tmp_path / "there", "float32")
    announced = theta_digest(model, "sha256")
    refuse_other_bits(announced, model)
    refuse_other_bits("", model)
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1e-6
    with pytest.raises(WrongRun, match="releases of torch and transformers"):
        refuse_other_bits(announced, model)
    assert drawn == []


@pytest.mark.slow
def test_export_of_a_run_whose_model_the_hub_does_not_give_says_what_to_do(tmp_path: Path, hub: HubModels) -> None:
    fleet = hub_fleet(tmp_path, hub, fleet={"replicas": 1, "steps": 1, "min_replicas": 1})
    fleet.start("r00", HF_HOME=str(tmp_path / "cache"))
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    shutil.rmtree(tmp_path / "cache")
    hub.down = 407
    with pytest.raises(ConfigError, match=r"cannot be taken from the Hub .* Next: give this machine access to it"):
        export(str(tmp_path / "run"), 0, tmp_path / "out")


@pytest.mark.slow
def test_an_adapter_of_a_hub_model_is_carried_and_its_base_is_not(tmp_path: Path, hub: HubModels) -> None:
    fleet = hub_fleet(tmp_path, hub, inner={"lora": {"r": 2}}, fleet={"replicas": 1, "steps": 2, "min_replicas": 1})
    fleet.start("r00", HF_HOME=str(tmp_path / "cache"))
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    carried = {name for name, stored in fleet.model.files.items() if stored["key"]}
    assert carried == {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    there = {p.name for p in (tmp_path / "run" / "model").rglob("*") if p.is_file()}
    assert there == {"manifest.json", "adapter_config.json", "adapter_model.safetensors"}
    found = fleet.model.hub_model
    assert found is not None and set(found.files) == set(fleet.model.files) - carried
    assert export(str(tmp_path / "run"), None, tmp_path / "out") == 2
    told = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == (NAME, hub.commit(NAME))
    base = json.loads((tmp_path / "out" / "base.json").read_text())
    assert (base["model"], base["commit"]) == (NAME, hub.commit(NAME)) and "model.safetensors" in base["files"]


# ---------------------------------------------------------------------- snapshot 0


def test_snapshot_0_has_no_momentum_and_is_read_with_zeros(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, fleet={"replicas": 1, "steps": 1, "min_replicas": 1}, outer={"lr": "auto"})
    fleet.start("r00")
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    store = open_store(str(tmp_path / "run"))
    first = Snapshot.decode(store.get(layout.snapshot_key(0)) or b"")
    parameters = sum(int(np.prod(shape)) for _, shape, _ in fleet.model.layout)
    assert 4 * parameters < first.size < 4 * parameters + 1024
    at, state = state_at(read_run(str(tmp_path / "run")), fleet.model, 0)
    assert at == 0 and state.digest() == first.base and not state.optimizers[0].momentum.any()


def test_minus_zero_is_written_down(tmp_path: Path) -> None:
    store, arrays = open_store(str(tmp_path)), {"theta.0": np.array([-0.0, 0.0], "f4"), "momentum.0": np.zeros(2, "f4")}
    found = snapshots.write_first(store, ManualClock(), arrays, base="b", elsewhere=False)
    read = snapshots.load(store, found, lambda *a, **k: None, arrays)
    assert read is not None and read["theta.0"].tobytes() == arrays["theta.0"].tobytes()


def test_a_snapshot_that_older_releases_wrote_with_its_zeros_is_read(tmp_path: Path) -> None:
    store, arrays = open_store(str(tmp_path)), {"theta.0": np.ones(2, "f4"), "momentum.0": np.zeros(2, "f4")}
    found = snapshots.write(store, ManualClock(), 0, arrays, base="b", prev=None)
    assert set(snapshots.load(store, found, lambda *a, **k: None, arrays) or {}) == set(arrays)


def test_a_session_that_must_begin_again_at_theta_0_asks_for_it(tmp_path: Path) -> None:
    """In the middle of its session, where no snapshot has been written yet."""
    clock = ManualClock()
    store = bucket(clock, replicas=1, m=1)
    seat = Seat(store, "r00", clock, replace_every())
    first = {name: a.copy() for f in range(1) for name, a in seat.state.arrays(f).items()}
    asked: list[int] = []

    def theta_0() -> dict[str, np.ndarray]:
        asked.append(1)
        return {name: a.copy() for name, a in first.items()}

    seat.rv.join(seat.state, theta_0)
    assert asked == [], "it is θ₀ already"
    assert [k for k in store.list("snapshots/") if k.endswith(".safetensors")] == []
    seat.offer()
    seat.step()
    base = seat.rv.base
    seat.rv._heal(upto=1)
    assert asked == [1] and seat.rv.base == base
    other = Seat(store, "r01", clock, replace_every())
    other.state.load({**first, "theta.0": first["theta.0"] + 1})
    other.rv.join(other.state, theta_0)
    assert other.rv.base == base and asked == [1, 1]


def replace_every() -> Any:
    from tests.rendezvous.test_engine import RULES

    return replace(RULES, snapshot_every=50)


@pytest.mark.parametrize("stands", [layout.snapshot_key(0), layout.commit_key(0)])
def test_no_other_model_is_published_where_the_manifest_is_lost(
    tmp_path: Path, stands: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: a resumed run published what the folder held by then, and trained an adapter on another base."""
    run = open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    run.store.put(stands, b"{}")
    before = sorted(run.store.list(""))
    assert publish(run.url) == exitcodes.USER_ERROR
    assert "model/manifest.json is lost, though the run has begun" in capsys.readouterr().err
    assert sorted(run.store.list("")) == before


def test_a_model_that_is_published_between_two_looks_is_not_lost(tmp_path: Path) -> None:
    """A second publisher saw no manifest, slept, and then saw snapshot 0 of the first publisher's replicas."""
    run = open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    record = ModelRecord({}, [], "0" * 16, 1.0)

    class Slow(FileStore):
        def get(self, key: str) -> bytes | None:
            found = super().get(key)
            if key == layout.MODEL_MANIFEST and found is None:
                run.store.put(key, record.encode())
                run.store.put(layout.snapshot_key(0), b"{}")
            return found

    assert read_model(replace(run, store=Slow(tmp_path / "run"))) == record


def test_a_fork_that_was_killed_before_its_manifest_is_no_lost_run(tmp_path: Path) -> None:
    """A fork writes snapshot 0 first; only a commit proves that the manifest was there."""
    run = open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    fork = replace(run, record=replace(run.record, parent=Parent(url="file:///a/run")))
    run.store.put(layout.snapshot_key(0), b"{}")
    assert read_model(fork) is None
    run.store.put(layout.commit_key(0), b"{}")
    with pytest.raises(RecordsLost, match=r"manifest\.json is lost, though the run has begun"):
        read_model(fork)


def test_the_publishers_check_tells_a_reward_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: a curriculum that divides by max_steps was refused, or passed, at an end of 1,000,000,000 steps."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x", "kind": 0}\n')
    (tmp_path / "rewards.py").write_text(
        "def score(trainer_state, **_):\n    raise ValueError(f'ends at {trainer_state.max_steps}')\n"
    )
    monkeypatch.setattr(reward_form.START, "max_steps", 10**9)
    raw = {"inner": {"data": {"prompts": "prompts.jsonl"}, "rewards": {"function": "rewards.py:score"}}}
    mine = RunConfig.from_dict({"name": "test", "fleet": {"steps": 3}, "outer": {"sync_every": 4}, **raw}, tmp_path)
    run = open_run(mine, str(tmp_path / "run"), SystemClock())
    assert publish(run.url) == exitcodes.USER_ERROR
    assert "ends at 12\n" in capsys.readouterr().err


def test_a_script_that_never_published_a_model_has_lost_none(tmp_path: Path) -> None:
    """Before: verify and export of a launched make_diloco script: "manifest.json is lost … Restore it"."""
    script = ScriptConfig(name="mine", own_script=Script("train.py"))
    run = open_run(script, str(tmp_path / "run"), SystemClock())
    run.store.put(layout.snapshot_key(0), b"{}")
    run.store.put(layout.commit_key(0), b"{}")
    assert read_model(run) is None
    with pytest.raises(ConfigError, match=r"has no model: DiLoCoCallback publishes it .* make_diloco saves its own"):
        model_record(run)
    run.store.put("model/5af1/config.json", b"{}")
    with pytest.raises(RecordsLost, match=r"manifest\.json is lost, though the run has begun"):
        read_model(run)


def test_a_manifest_names_a_hub_model_or_files_of_the_bucket_and_never_both() -> None:
    sha = "sha256:" + "1" * 64
    hub = {"model": NAME, "commit": "c" * 40}
    good = ModelRecord({"config.json": {"key": "", "digest": sha}}, [["w", [1], "float32"]], "n", 0.0, hub, "x")
    assert ModelRecord.decode(good.encode()).hub_model == HubModel(NAME, "c" * 40, {"config.json": "1" * 64})
    for bad in (replace(good, hub={}), replace(good, hub={"model": NAME}),
                replace(good, files={"config.json": {"key": "model/n/config.json", "digest": sha}}),
                replace(good, files={"../config.json": {"key": "", "digest": sha}})):  # fmt: skip
        with pytest.raises(Exception, match="expected a model"):
            ModelRecord.decode(unchecked(bad))
    raw = json.loads(good.encode())
    del raw["hub"], raw["theta"]
    raw["files"] = {}
    assert ModelRecord.decode(json.dumps(raw).encode()).theta == "", "as older releases wrote it"


@pytest.mark.parametrize("change", ["renamed", "lacks a layer", "lacks its head"])
def test_a_model_whose_weights_are_in_no_file_is_refused(tmp_path: Path, change: str) -> None:
    """Before: a state dict of torch.compile (`_orig_mod.…`) was trained from random weights, without a word."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    if change == "renamed":
        weights = {f"_orig_mod.{name}": value for name, value in weights.items()}
    else:
        gone = "layers.1." if change == "lacks a layer" else "lm_head"
        weights = {name: value for name, value in weights.items() if gone not in name}
    save_file(weights, file, metadata={"format": "pt"})
    start = InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"})
    if change == "lacks its head":
        made(start, tmp_path / "out")
    else:
        mend = r"They have _orig_mod\.lm_head.* DDP again" if change == "renamed" else "Set inner.model to a complete"
        with pytest.raises(InnerError, match=rf"lack \d+ of its weights .*drawn at random\. {mend}"):
            made(start, tmp_path / "out")


@pytest.mark.parametrize("kind", [PhiConfig, GPTNeoXConfig, Qwen2Config])
def test_a_base_model_is_accepted_whatever_its_head_is_called(tmp_path: Path, kind: Any) -> None:
    """Before: the head's bias and a head of another name were refused as a model of torch.compile."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    more = {"num_key_value_heads": 2} if kind is Qwen2Config else {}
    AutoModel.from_config(kind(vocab_size=64, **sizes, **more)).save_pretrained(tmp_path)
    model, drawn = load_start(tmp_path, "float32", source="org/base")
    head = {name for name, _ in model.get_output_embeddings().named_parameters()}
    assert {name.rpartition(".")[2] for name in drawn} == head and len(head) == 1 + (kind is PhiConfig)
    with pytest.raises(InnerError, match=r"Set inner\.model to a complete checkpoint"):
        refuse_drawn("org/base", model, [*drawn, next(iter(model.state_dict()))], [])


HEADS = [AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_a_model_whose_head_writes_no_text_is_refused_by_plan_and_by_the_publisher(
    tmp_path: Path, head: Any, tied: bool
) -> None:
    """Before: a classifier was trained with a language head drawn at random, and exported, without a word."""
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model", ignore=ignore_patterns("*.safetensors"))
    shape = AutoConfig.from_pretrained(folder, tie_word_embeddings=tied)
    head.from_config(shape).save_pretrained(folder)
    start = InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"})
    named = json.loads((folder / "config.json").read_text())
    for classes in [named["architectures"], ["Qwen2ForRewardModel"], [], ["LlamaModel"]][: 2 if tied else None]:
        (folder / "config.json").write_text(json.dumps({**named, "architectures": classes}))
        for refuse in (known_model, lambda config: made(config, tmp_path / "out")):
            with pytest.raises(InnerError, match=r"has a head that writes no text .*Set inner\.model"):
                refuse(start)


def test_an_export_names_no_code_that_it_does_not_have(tmp_path: Path) -> None:
    """Before: its config named modeling_own.py, and from_pretrained with trust_remote_code=True found no such file."""
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    named = json.loads((folder / "config.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (folder / "config.json").write_text(json.dumps({**named, **own}))
    run = open_run(config(tmp_path, inner={"model": str(folder)}), str(tmp_path / "run"), SystemClock())
    assert publish(run.url) == exitcodes.DONE
    record = model_record(run)
    write_model(run, record, empty_state(record, run.config.outer), at=0, to=tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)


@pytest.mark.parametrize("typed", ["https://huggingface.co/a/b", "hf.co/a/b/", "hub:a/b"])
def test_an_address_of_the_hub_is_told_its_name(typed: str) -> None:
    with pytest.raises(InnerError, match=r"Correct inner\.model\. Did you mean 'a/b'\?"):
        known_model(InnerConfig(model=typed, loop="supervised", data={"text": "text.txt"}))


def test_a_head_that_is_in_no_file_is_told_by_plan_and_by_the_publisher(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model", ignore=ignore_patterns("*.safetensors"))
    start = InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"})
    AutoModel.from_config(AutoConfig.from_pretrained(folder, tie_word_embeddings=False)).save_pretrained(folder)
    assert "(it is a base model, or config.json wrongly has tie_word_embeddings = false)" in known_model(start).note
    with pytest.warns(UserWarning, match="no file has .* begins with random values"):
        made(start, tmp_path / "out")
    assert known_model(replace(start, model=str(tmp_path / "out"))).note == ""
    AutoModel.from_config(AutoConfig.from_pretrained(folder, tie_word_embeddings=True)).save_pretrained(folder)
    assert known_model(start).note == "", "its embeddings are its head"
    tied = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, tie_word_embeddings=True))
    tied.save_pretrained(folder)
    assert known_model(start).note == ""
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**read, "tie_word_embeddings": False}))
    assert "so the head begins with random values" in known_model(start).note, "only the publisher's log told it"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("adapter", [False, True])
def test_a_start_model_with_a_weight_that_is_not_finite_is_not_published(
    tmp_path: Path, value: float, adapter: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: the first generation ended in a traceback of torch.multinomial."""
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][0] = value
    save_file(weights, file, metadata={"format": "pt"})
    lora = {"lora": LoraSettings(r=2)} if adapter else {}
    run = open_run(config(tmp_path, inner={"model": str(folder), **lora}), str(tmp_path / "run"), SystemClock())
    assert publish(run.url) == exitcodes.USER_ERROR
    assert "NaN or infinite weights in 1 of its tensors (" in capsys.readouterr().err
    assert run.store.get(layout.MODEL_MANIFEST) is None


class Planted:
    """What a pickle may do when it is read."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.victim),)


def spoil(folder: Path, fault: str) -> str:
    """Give the folder a fault of other people's folders; return what a refusal says."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    weights = load_file(file)
    if fault == "planted":
        file.unlink()
        torch.save({**weights, "x": Planted(folder / "victim")}, folder / "pytorch_model.bin")
        return "has more than weights in it, and reading the rest could run code"
    if fault == "shape":
        save_file({**weights, "model.norm.weight": torch.ones(16)}, file, metadata={"format": "pt"})
        return r"model.norm.weight has the shape \[16\] in its files, and \[32\] by its config.json"
    if fault == "package":
        config["attn_implementation"] = "flash_attention_2"
        words = "could not be loaded: ImportError: FlashAttention2"
    elif fault == "code":
        config |= {"model_type": "mine", "auto_map": {"AutoConfig": "configuration_mine.Mine"}}
        (folder / "configuration_mine.py").write_text(f"import os\nos.mkdir({str(folder / 'victim')!r})\n")
        words = "needs Python code out of its own files .* A run executes no such code"
    else:
        config["rope_parameters"] = {"rope_type": "yarn9", "rope_theta": 1.0}
        words = "could not be loaded: KeyError: 'yarn9'"
    (folder / "config.json").write_text(json.dumps(config))
    return words


@pytest.mark.parametrize("fault", ["planted", "shape", "package", "code", "newer"])
def test_a_folder_that_transformers_cannot_load_is_refused_in_words(tmp_path: Path, fault: str) -> None:
    """Before: the child that publishes the model ended in a traceback of a library."""
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    words = spoil(folder, fault)
    start = InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"})
    with pytest.raises(InnerError, match=words):
        made(start, tmp_path / "out")
    if fault in ("package", "code", "newer"):
        with pytest.raises(InnerError, match=words):
            load_shape(start, folder)
    assert not (folder / "victim").exists(), "no code of the folder has run"


def test_a_generation_config_that_transformers_refuses_is_found_before_the_start(tmp_path: Path) -> None:
    """Before: plan accepted it, and the start model could not be published."""
    folder = shutil.copytree(tiny_model_folder("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(InnerError, match="could not be loaded: `max_new_tokens` must be greater than 0"):
        load_shape(InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"}), folder)
    (folder / "generation_config.json").unlink()
    load_shape(InnerConfig(model=str(folder), loop="supervised", data={"text": "text.txt"}), folder)
