"""[inner.lora] base = "nf4": the base in 4 bits, the adapter as on any base. `make test-nf4` has bitsandbytes."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from diloco.model.export import export, put_into, state_at
from diloco.outer.flat import trainable_parameters
from diloco.outer.frozen import frozen_digest, refuse_changed_base
from diloco.run.config import RunConfig
from diloco.run.footprint import footprint
from diloco.run.record import read_run
from diloco.run.sizing import sizes_of
from executors.platforms.places import Place
from executors.preflight.checks import check_places
from executors.preflight.place_faults import few_bits
from executors.preflight.run_url import UsageError
from inner import InnerConfig, InnerError, Seeds, build_inner
from inner import publish_model as publish_start
from inner.models.lora import adapter_off
from inner.settings.task import DataSettings, LoraSettings, VllmSettings
from inner.train.build import load_start
from rendezvous.errors import Diverged
from tests.diloco.test_lora import LORA
from tests.inner.test_toolworld import SMALL
from tests.support.fleet import TEXT, Fleet

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
NF4 = {**LORA, "base": "nf4"}
IDS = torch.arange(1, 25).reshape(2, 12)
real = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="make test-nf4 has bitsandbytes")


@real
def test_two_replicas_train_an_adapter_on_four_bits_one_is_killed_and_its_merge_is_what_was_trained(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, inner={"lora": NF4, "lr": 1e-2}, fleet={"replicas": 2, "steps": 4})
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer/@1")
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None)
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0]}, fleet.logs()

    run = read_run(str(tmp_path / "run"))
    assert export(run.url, None, tmp_path / "merged", merge=True) == 4
    assert export(run.url, None, tmp_path / "adapter") == 4
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config, "the whole model needs no bitsandbytes"
    trained = load_start(start_of(fleet, tmp_path), "float32", LoraSettings(**NF4))[0].eval()
    assert frozen_digest(trained) == fleet.model.base
    put_into(trained, state_at(run, fleet.model, None)[1])
    with torch.no_grad():
        expected = trained(input_ids=IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(input_ids=IDS).logits
        with adapter_off(trained):
            untrained = trained(input_ids=IDS).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)
    assert (untrained - expected).abs().max() > 0.01


def start_of(fleet: Fleet, folder: Path) -> Path:
    from diloco.model.fetch import fetch_model

    return fetch_model(fleet.run.store, fleet.model, folder / "start")


@real
def test_the_adapter_stays_fp32_and_no_generation_or_step_changes_the_base(tmp_path: Path) -> None:
    """TRL rounds an adapter on 4 bits to bfloat16, and bitsandbytes packs weights anew when a CPU generates."""
    inner = InnerConfig(**{**SMALL, "lora": LoraSettings(**NF4)})
    publish_start(inner, tmp_path / "model")
    loop: Any = build_inner(inner, tmp_path / "model", {}, Seeds(data=1, noise=2))
    before, start = frozen_digest(loop.model), [p.detach().clone() for _, p in trainable_parameters(loop.model)]
    steps = iter((False, False, True))
    loop.train(lambda: next(steps))
    assert {p.dtype for _, p in trainable_parameters(loop.model)} == {torch.float32}
    assert any(not torch.equal(a, p) for a, (_, p) in zip(start, trainable_parameters(loop.model), strict=True))
    refuse_changed_base(before, loop.model)
    scale = next(p.quant_state for p in loop.model.parameters() if hasattr(p, "quant_state")).state2.absmax
    scale[0] *= 1.01
    with pytest.raises(Diverged, match="base model was changed"):
        refuse_changed_base(before, loop.model)


def supervised(folder: Path) -> InnerConfig:
    (folder / "a.txt").write_text(TEXT)
    return InnerConfig(loop="supervised", model="tiny", data=DataSettings(text=str(folder / "a.txt")))


def test_without_the_package_a_run_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.nn", None)
    publish_start(supervised(tmp_path), tmp_path / "model")
    with pytest.raises(InnerError, match=r"needs bitsandbytes: pip install 'serverless-diloco\[nf4\]'"):
        load_start(tmp_path / "model", "float32", LoraSettings(**NF4))


def test_vllm_beside_four_bits_is_refused() -> None:
    with pytest.raises(InnerError, match=r'base = "nf4" with \[inner.vllm\].*another policy'):
        InnerConfig(**{**SMALL, "lora": LoraSettings(**NF4), "vllm": VllmSettings()})


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place("local"), r"is not installed here, where replicas run\. `pip install bitsandbytes`, or leave base out"),
        (Place("modal"), r"will not be in the image on modal\. Add `--pip bitsandbytes`"),
        (Place("modal", options={"pip": "bitsandbytes"}), ""),
    ],
    ids=["here", "rented", "rented, with it"],
)
def test_a_missing_package_is_found_before_the_run(
    place: Place, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    run = RunConfig(inner=InnerConfig(model="toolworld", lora=LoraSettings(**NF4)))
    said = few_bits(run, place)
    assert re.search(words, said) if words else not said
    if place == Place("local"):
        with pytest.raises(UsageError, match=words):
            check_places(run, "run.toml", "", [place])


def test_a_plan_counts_four_bits_for_linear_layers(tmp_path: Path) -> None:
    publish_start(supervised(tmp_path), tmp_path / "model")
    text = {"loop": "supervised", "data": {"text": str(tmp_path / "a.txt")}}
    run = RunConfig.from_dict({"inner": {**text, "model": str(tmp_path / "model"), "lora": NF4}})
    whole, trained, linear = sizes_of(run).values()
    model, _ = load_start(tmp_path / "model", "float32")
    linears = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    assert linear == sum(m.weight.numel() for m in linears) < whole
    assert trained is not None
    found = footprint(run, whole, 2, 4, trained, linear)
    assert found.device == pytest.approx(4 * (whole - linear) + 0.516 * linear + 16 * trained, abs=1)
    assert not sizes_of(RunConfig.from_dict({"inner": {"model": "toolworld", "lora": LORA}}))["quantised"]
