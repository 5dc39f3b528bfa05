"""[inner.lora]: the adapter is what is trained, synchronised, snapshotted and digested; the base keeps its bits."""

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    set_seed,
)
from trl.trainer.grpo_trainer import GRPOTrainer

from diloco import StoreManager, make_diloco
from diloco.model.export import export, put_into, refuse_merge, state_at
from diloco.model.publish import publish_model
from diloco.outer.frozen import frozen_digest, refuse_changed_base, refuse_other_base
from diloco.run.config import ConfigError, RunConfig
from diloco.run.footprint import footprint, step_bytes
from diloco.run.founding import open_run
from diloco.run.record import Run, RunRecord, read_run
from diloco.run.sizing import parameters_of, trained_parameters_of
from executors.platforms.on_modal.kinds import memory_limit_mib
from executors.platforms.places import Place
from executors.preflight.quote import fitted_places
from inner import InnerConfig, InnerError, Seeds, build_inner
from inner import publish_model as publish_start
from inner.models.hub_model import cached_file
from inner.models.lora import ADAPTER, adapter_off, drop_reference_copy, load_adapter, new_adapter, save_adapter
from inner.models.optim import make_optimizer
from inner.settings.task import LoraSettings
from inner.train.build import load_start
from inner.train.grpo import _silence_libraries, trainer_arguments
from inner.train.trainer import ComposerReplicationTrainer
from inner.worlds.tiny import tiny_model
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import Diverged, WrongRun
from tests.diloco.test_outer_safety import events
from tests.inner.test_toolworld import SMALL, WORLD
from tests.support.audit import check_run
from tests.support.fleet import TEXT, Fleet, config
from tests.support.gguf_files import write_gguf
from tests.support.hf_models import HubModels

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
LORA = {"r": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "down_proj"]}


def supervised(**changes: Any) -> InnerConfig:
    return InnerConfig(
        **{"loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}, "lora": LoraSettings(**LORA), **changes}
    )


def grpo(**changes: Any) -> InnerConfig:
    return InnerConfig(**{**SMALL, "lora": LoraSettings(**LORA), **changes})


def loop_on(folder: Path, inner: InnerConfig) -> Any:
    (folder / "a.txt").write_text(TEXT)
    publish_start(inner, folder / "model")
    return build_inner(inner, folder / "model", {"text": folder / "a.txt"}, Seeds(data=1, noise=2))


# ---------------------------------------------------------------------- a fleet


def test_three_replicas_train_the_adapter_one_is_killed_and_all_hold_the_same_bits(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, inner={"lora": LORA, "lr": 1e-2})
    for i in range(3):
        fleet.start(f"r{i:02d}", die="after:create:/offer/@2" if i == 1 else "")
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None)
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    commits = fleet.commits()
    assert len(commits) == 6
    check_run(tmp_path / "run", 6)
    names = [name for name, _, _ in fleet.model.layout]
    assert names and all(".lora_A." in name or ".lora_B." in name for name in names)
    trained = sum(math.prod(shape) for _, shape, _ in fleet.model.layout)
    for body in (tmp_path / "run" / "steps").rglob("delta/*"):
        assert body.stat().st_size < 4 * trained + 1024, "a sync moves the adapter alone"
    check_cross_terms(fleet)
    check_adapter_export(fleet, tmp_path)


def check_cross_terms(fleet: Fleet) -> None:
    """Every replica has logged ‖mean(BA) − mean(B) mean(A)‖ / ‖mean(BA)‖ of the first layer, as the blobs give it."""
    (_, a_shape, _), (_, b_shape, _) = fleet.model.layout[:2]
    cut, stop = math.prod(a_shape), math.prod(a_shape) + math.prod(b_shape)
    by_step: dict[int, list[float]] = {}
    for event in events(fleet, "step"):
        by_step.setdefault(event["step"], []).append(event["cross_term"])
    for commit in fleet.commits():
        theta = state_at(read_run(fleet.url), fleet.model, commit.t)[1].all_arrays()["theta.0"]
        local = [theta - np.frombuffer((fleet.store.get(o.blob) or b""), np.float32) for o in commit.offers]
        w = np.array([o.weight for o in commit.offers]) / sum(o.weight for o in commit.offers)
        a = [x[:cut].reshape(a_shape).astype(float) for x in local]
        b = [x[cut:stop].reshape(b_shape).astype(float) for x in local]
        products = sum(w_i * b_i @ a_i for w_i, a_i, b_i in zip(w, a, b, strict=True))
        of_means = np.tensordot(w, b, 1) @ np.tensordot(w, a, 1)
        found = np.linalg.norm(products - of_means) / np.linalg.norm(products)
        assert by_step[commit.t] == pytest.approx([found] * len(by_step[commit.t]), rel=1e-6) and 0 < found < 1


def check_adapter_export(fleet: Fleet, tmp_path: Path) -> None:
    """The exported adapter on the base gives the logits of the replicas' model; merged they are the same but for
    rounding; and it is not what it was."""
    run = str(tmp_path / "run")
    assert export(run, None, tmp_path / "adapter") == export(run, None, tmp_path / "merged", merge=True) == 6
    assert {p.name for p in (tmp_path / "adapter").iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors", "base.json", "tokenizer.json"
    }  # fmt: skip
    assert not (tmp_path / "adapter" / "config.json").exists()
    start = tmp_path / "start"
    base = tiny_from(fleet, start)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    ids = torch.arange(1, 25).reshape(2, 12)
    model, _ = load_start(start, "float32", fleet.config.inner.lora)
    put_into(model, state_at(read_run(run), fleet.model, None)[1])
    with torch.no_grad():
        expected, found = model.eval()(input_ids=ids).logits, loaded.eval()(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=ids).logits
        with adapter_off(model):
            untrained = model(input_ids=ids).logits
    assert torch.equal(expected, found)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert (untrained - expected).abs().max() > 0.01
    told = json.loads((tmp_path / "adapter" / "base.json").read_text())
    assert told["model"] == "tiny" and told["weights"] == fleet.model.base and told["outer_step"] == 6


def tiny_from(fleet: Fleet, folder: Path) -> Any:
    from diloco.model.fetch import fetch_model

    return AutoModelForCausalLM.from_pretrained(fetch_model(fleet.run.store, fleet.model, folder))


def test_a_b_that_is_trained_alone_halves_what_travels(tmp_path: Path) -> None:
    for freeze in (False, True):
        (where := tmp_path / str(freeze)).mkdir()
        run = open_run(config(where, inner={"lora": {**LORA, "freeze_a": freeze}}), str(where / "run"), SystemClock())
        names = [name for name, _, _ in publish_model(run, SystemClock()).layout]
        assert any(".lora_A." in name for name in names) is not freeze and any(".lora_B." in n for n in names)


def test_where_a_is_frozen_the_cross_term_is_zero(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, inner={"lora": {**LORA, "freeze_a": True}, "lr": 1e-2}, fleet={"replicas": 2, "steps": 2})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    assert [e["cross_term"] for e in events(fleet, "step")] == [0.0] * 4


def test_the_first_values_are_published_and_loaded_by_everybody(tmp_path: Path) -> None:
    """Two processes that each draw A would train two models."""
    torch.manual_seed(1)
    first = loop_on(tmp_path, supervised())
    torch.manual_seed(2)
    second = build_inner(supervised(), tmp_path / "model", {"text": tmp_path / "a.txt"}, Seeds(data=1, noise=3))
    stored = load_file(tmp_path / "model" / ADAPTER / "adapter_model.safetensors")
    for (name, p), (_, q) in zip(first.model.named_parameters(), second.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        if "lora" in name:
            assert torch.equal(p, stored[name.replace(".default", "")])
            assert p.any() == (".lora_A." in name), "B is zero at first"
    held = {id(p) for group in first.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in first.model.named_parameters() if "lora" in n}, "made after the adapter"


def test_an_adapter_is_made_and_loaded_without_a_warning(tmp_path: Path) -> None:
    """`diloco export` printed one of transformers', for a name that PEFT asks for."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        publish_start(supervised(), tmp_path)
        load_start(tmp_path, "float32", LoraSettings(**LORA))


def test_the_adapter_is_fp32_on_a_base_in_bfloat16(tmp_path: Path) -> None:
    run = open_run(config(tmp_path, inner={"lora": LORA, "dtype": "bfloat16"}), str(tmp_path / "run"), SystemClock())
    record = publish_model(run, SystemClock())
    assert {dtype for _, _, dtype in record.layout} == {"float32"}


# ---------------------------------------------------------------------- against TRL and PEFT


def world_task() -> dict[str, Any]:
    return {
        "reward_funcs": WORLD.reward, "train_dataset": WORLD.dataset(64), "environment_factory": WORLD.environment()
    }  # fmt: skip


def plain_trainer(folder: Path, cls: type, inner: InnerConfig, steps: int, task: dict[str, Any]) -> tuple[Any, Any]:
    """The adapter that lies in the folder, in TRL's trainer or in ours; -> trainer, optimizer."""
    assert inner.lora is not None
    model = load_adapter(AutoModelForCausalLM.from_pretrained(folder), folder / ADAPTER, inner.lora)
    optimizer = make_optimizer(inner, model)
    arguments = trainer_arguments(inner, Seeds(data=0, noise=11), str(folder / "out"))
    arguments.max_steps = steps
    with _silence_libraries():
        trainer = cls(
            model=model, args=arguments, processing_class=AutoTokenizer.from_pretrained(folder),
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)), **task,
        )  # fmt: skip
    return trainer, optimizer


def check_equal_to_plain(
    folder: Path, inner: InnerConfig, *, steps: int, sync_every: int, task: dict[str, Any], atol: float = 1e-6
) -> None:
    """`steps` inner steps of TRL and PEFT, and of ours with steps / sync_every outer steps between them."""
    publish_start(inner, folder)
    plain, _ = plain_trainer(folder, GRPOTrainer, inner, steps, task)
    ours, optimizer = plain_trainer(folder, ComposerReplicationTrainer, inner, steps, task)
    base = frozen_digest(ours.model)
    with _silence_libraries():
        set_seed(5)
        plain.train()
        set_seed(5)
        manager = StoreManager(f"memory://{folder}", replicas=1, min_replicas=1, steps=steps // sync_every)
        with make_diloco(ours.model, optimizer, manager, sync_every=sync_every, outer_lr=1.0, outer_momentum=0.0):
            ours.train()
    moved = 0.0
    for (name, p), (_, q) in zip(plain.model.named_parameters(), ours.model.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=atol, msg=name)
        moved += p.detach().norm().item() if ".lora_B." in name else 0.0
    assert moved > 0.01 and manager.done and frozen_digest(ours.model) == base


def test_one_replica_with_a_plain_outer_step_is_trl_with_peft(tmp_path: Path) -> None:
    """N = 1, lr 1, mu 0: an outer step is what the inner steps did, to within the rounding of a subtraction."""
    check_equal_to_plain(tmp_path, grpo(lr=5e-3), steps=6, sync_every=2, task=world_task())


@pytest.mark.slow
def test_the_reference_of_a_kl_term_is_the_base_and_no_copy_of_the_adapter(tmp_path: Path) -> None:
    inner = grpo()
    publish_start(inner, tmp_path)
    assert inner.lora is not None
    model = load_adapter(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / ADAPTER, inner.lora)
    names = [n for n, _ in model.named_parameters()]
    arguments = trainer_arguments(inner, Seeds(data=0, noise=11), str(tmp_path / "out"))
    arguments.beta = 0.1
    with _silence_libraries():
        trainer = GRPOTrainer(
            model=model, reward_funcs=WORLD.reward, args=arguments, train_dataset=WORLD.dataset(64),
            processing_class=AutoTokenizer.from_pretrained(tmp_path), environment_factory=WORLD.environment(),
        )  # fmt: skip
    assert len(list(model.named_parameters())) > len(names), "TRL has made a copy"
    drop_reference_copy(model)
    assert [n for n, _ in model.named_parameters()] == names and trainer.ref_model is None


@pytest.mark.slow
def test_checkpointing_reaches_the_adapter(tmp_path: Path) -> None:
    inner = grpo(gradient_checkpointing=True)
    loop = loop_on(tmp_path, inner)
    before = {n: p.detach().clone() for n, p in loop.model.named_parameters() if ".lora_B." in n}
    loop.train(lambda: True)
    assert all(not torch.equal(p, before[n]) for n, p in loop.model.named_parameters() if n in before)


# ---------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"r": 0}, r"lora\.r = 0: an adapter of that rank has no parameters.* leave the table \[inner\.lora\] out"),
        ({"r": -2}, r"lora\.r = -2"),
        ({"alpha": 0.0}, r"lora\.alpha = 0\.0 must be greater"),
        ({"dropout": 1.0}, r"lora\.dropout = 1\.0 must be at least 0 and below 1"),
        ({"targets": "q_proj"}, 'neither "all-linear" nor a list of names'),
        ({"targets": []}, "nor a list of names"),
        ({"rank": 3}, r"unknown setting inner\.lora\.rank"),
        ({"r": 2.5}, r"inner\.lora\.r = 2\.5 must be int"),
        ({"freeze_a": "yes"}, r"inner\.lora\.freeze_a = 'yes' must be bool"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(tmp_path, inner={"lora": settings})


def test_a_config_with_an_adapter_survives_json(tmp_path: Path) -> None:
    raw = json.loads(json.dumps(config(tmp_path, inner={"lora": LORA}).to_dict()))
    again = RunConfig.from_dict(raw, tmp_path)
    assert again.inner.lora == LoraSettings(**LORA) and InnerConfig.from_dict(raw["inner"]) == again.inner
    assert again.mathematics()["inner"]["lora"]["r"] == 4


@pytest.mark.parametrize("targets", [["q_prj"], ["q_proj", "kproj"]])
def test_targets_that_match_nothing_are_refused_before_a_replica_starts(tmp_path: Path, targets: list[str]) -> None:
    run = open_run(config(tmp_path, inner={"lora": {"targets": targets}}), str(tmp_path / "run"), SystemClock())
    with pytest.raises(InnerError, match=rf"is called {targets[-1]}\. It has .*q_proj.*Correct inner\.lora\.targets"):
        publish_model(run, SystemClock())
    assert run.store.get(layout.MODEL_MANIFEST) is None


def mixture(cls: Any, config_: Any) -> Any:
    """A tiny mixture of experts."""
    sizes = {"num_local_experts": 4, "intermediate_size": 16, "intermediate_size_mlp": 16, "vocab_size": 32}
    more = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return cls(config_(**sizes, **more, pad_token_id=0, bos_token_id=1, eos_token_id=2))


@pytest.mark.parametrize(("cls", "config"), [(PhimoeForCausalLM, PhimoeConfig), (Llama4ForCausalLM, Llama4TextConfig)])
def test_a_router_that_is_a_linear_layer_has_no_adapter(cls: Any, config: Any, tmp_path: Path) -> None:
    """Before: the first forward pass failed, in a replica: 'tuple' object has no attribute 'dtype'."""
    base = mixture(cls, config)
    model = new_adapter(copy.deepcopy(base), LoraSettings(r=2))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}
    assert {"q_proj", "o_proj"} <= adapted and "router" not in adapted
    model(torch.arange(1, 7)[None]).logits.sum().backward()
    save_adapter(model, tmp_path)
    again = PeftModel.from_pretrained(base, str(tmp_path))
    assert again.state_dict().keys() == model.state_dict().keys(), "PEFT reads the exported folder in the same way"


def test_a_base_with_other_bits_is_refused_and_one_that_changes_is_noticed() -> None:
    model = new_adapter(tiny_model(16), LoraSettings(**LORA))
    announced = frozen_digest(model)
    refuse_other_base(announced, model)
    refuse_changed_base("", model)
    with torch.no_grad():
        model.get_parameter("base_model.model.model.norm.weight")[0] += 1e-6
    with pytest.raises(WrongRun, match="An adapter means nothing on another base"):
        refuse_other_base(announced, model)
    with pytest.raises(Diverged, match="was changed in this session"):
        refuse_changed_base(announced, model)


def test_a_replica_whose_base_is_another_trains_nothing(tmp_path: Path) -> None:
    """The manifest names another base: as if torch here rounded in another way."""
    from dataclasses import replace

    run = open_run(config(tmp_path, inner={"lora": LORA}), str(tmp_path / "run"), SystemClock())
    record = publish_model(run, SystemClock())
    run.store.delete([layout.MODEL_MANIFEST])
    run.store.put(layout.MODEL_MANIFEST, replace(record, base="0" * 32).encode())
    fleet = Fleet(tmp_path, inner={"lora": LORA})
    fleet.start("r00")
    assert fleet.wait() == {"r00": [2]}
    assert "An adapter means nothing on another base" in fleet.logs() and fleet.commits() == []


def test_merge_is_for_adapters(tmp_path: Path) -> None:
    run = open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    publish_model(run, SystemClock())
    with pytest.raises(ConfigError, match=r"no \[inner\.lora\].* Leave --merge out"):
        export(str(tmp_path / "run"), None, tmp_path / "out", merge=True)
    stored = {**run.record.config, "script": {"path": "train.py"}}
    script = Run("memory://", run.store, RunRecord(stored, {}, {}, "", 0.0))
    with pytest.raises(ConfigError, match=r"a script trains this run\. Leave --merge out"):  # it may train an adapter
        refuse_merge(script, merge=True)


# ---------------------------------------------------------------------- sizes


@pytest.mark.parametrize("lora", [LORA, {"r": 2}, {"r": 4, "targets": ["up_proj"], "freeze_a": True}])
def test_what_travels_is_reckoned_before_the_run_from_the_shapes_in_the_files(tmp_path: Path, lora: Any) -> None:
    publish_start(supervised(lora=None), tmp_path / "model")
    fleet = config(tmp_path, inner={"model": str(tmp_path / "model"), "lora": lora})
    record = publish_model(open_run(fleet, str(tmp_path / "run"), SystemClock()), SystemClock())
    trained = sum(math.prod(shape) for _, shape, _ in record.layout)
    assert trained_parameters_of(fleet) == trained
    whole = parameters_of(fleet)
    found = footprint(fleet, whole, 3, 6, trained)
    assert found.parameters == whole and found.each_step == step_bytes(trained, 3, "fp32")
    assert found.device == 4 * whole + 16 * trained and found.each_snapshot == 8 * trained


@pytest.mark.parametrize(
    ("cls", "config_"),
    [(PhimoeForCausalLM, PhimoeConfig), (Llama4ForCausalLM, Llama4TextConfig), (MixtralForCausalLM, MixtralConfig)],
)
def test_what_travels_of_a_mixture_is_what_the_loaded_model_has(cls: Any, config_: Any, tmp_path: Path) -> None:
    """Before, by the names in the files: routers counted, and Phi-MoE's adapter was five times too large."""
    base = mixture(cls, config_)
    base.save_pretrained(tmp_path / "model")
    model = new_adapter(base, LoraSettings(r=2))
    fleet = config(tmp_path, inner={"model": str(tmp_path / "model"), "lora": {"r": 2}})
    assert trained_parameters_of(fleet) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("mixed", [False, True])
def test_what_travels_of_a_model_on_the_hub_is_what_travels_of_its_folder(
    mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, an adapter's run was reckoned as one of all weights, unless the model's files were in the cache."""
    model = mixture(MixtralForCausalLM, MixtralConfig) if mixed else tiny_model(128)
    model.save_pretrained(tmp_path / "model")
    here, there = (
        config(tmp_path, inner={"model": name, "lora": {"r": 2}}) for name in (str(tmp_path / "model"), "tester/model")
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with HubModels({"tester/model": tmp_path / "model"}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert trained_parameters_of(there) == trained_parameters_of(here) != parameters_of(here)
        assert parameters_of(there) == parameters_of(here)
        (limit,) = (place.options["max_memory_mib"] for place in fitted_places([Place("modal")], there))
        assert limit == memory_limit_mib(parameters_of(here), trained_parameters_of(here))
        cached_file("tester/model", "main", "config.json")
        cached_file("tester/model", "main", "model.safetensors")
        hub.asked.clear()
        assert trained_parameters_of(there) == trained_parameters_of(here) and not hub.asked


def test_of_a_gguf_file_every_layer_counts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    fleet = config(tmp_path, inner={"model": str(tmp_path / "m.gguf"), "lora": {"r": 2, "freeze_a": True}})
    record = publish_model(open_run(fleet, str(tmp_path / "run"), SystemClock()), SystemClock())
    assert trained_parameters_of(fleet) == sum(math.prod(shape) for _, shape, _ in record.layout)


SMOLLM2 = Path(__file__).parents[2] / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="`make smollm2` fetches it")
def test_a_sync_of_the_real_model_moves_a_fiftieth(tmp_path: Path) -> None:
    changes = {"inner": {"model": str(SMOLLM2), "lora": {"r": 8}, "batch_size": 1}, "outer": {"sync_every": 1}}
    fleet = Fleet(tmp_path, fleet={"replicas": 1, "steps": 1, "min_replicas": 1}, **changes)
    fleet.start("r00")
    assert fleet.wait(600.0) == {"r00": [0]}, fleet.logs()
    (delta,) = [p for p in (tmp_path / "run" / "steps").rglob("delta/*") if p.is_file()]
    assert delta.stat().st_size <= 0.02 * 4 * parameters_of(fleet.config)


def digits(completions: list[Any], **_: Any) -> list[float]:
    """More digits are worth more: groups of a model that has not been trained differ in it."""
    return [float(sum(c.isdigit() for c in completion[0]["content"])) for completion in completions]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="`make smollm2` fetches it")
def test_the_real_model_learns_what_trl_with_peft_teaches_it(tmp_path: Path) -> None:
    """To a hundredth of one of AdamW's steps: it divides by √v, which makes a rounding larger where gradients are
    almost zero (seen: 3e-6 in a thousandth of one matrix, 3e-7 in all others)."""
    inner = InnerConfig(
        model=str(SMOLLM2), lr=1e-3, batch_size=4, lora=LoraSettings(r=8), data={"prompts": "unread.jsonl"},
        rewards={"function": "unread.py:digits"}, sampling={"num_generations": 4, "max_completion_length": 8},
    )  # fmt: skip
    rows = [{"prompt": [{"role": "user", "content": f"What is {i} + {i + 3}?"}]} for i in range(8)]
    task = {"reward_funcs": digits, "train_dataset": Dataset.from_list(rows)}
    check_equal_to_plain(tmp_path, inner, steps=6, sync_every=2, task=task, atol=1e-2 * inner.learning_rate)


def test_a_run_of_an_adapter_keeps_everything_unless_it_says_otherwise(tmp_path: Path) -> None:
    assert config(tmp_path, inner={"lora": LORA}).fleet.keep == "all"
    assert config(tmp_path, inner={"lora": LORA}, fleet={"keep": "1 GB"}).fleet.keep == "1 GB"
    assert config(tmp_path).fleet.keep == "20 GB"
    founded = config(tmp_path, inner={"lora": LORA}, fleet={"keep": "window"})
    assert RunConfig.from_dict(founded.to_dict(), tmp_path).fleet.keep == "window"
