"""A .gguf file as inner.model: dequantised, said so, published as a folder like any other; and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.run.config import RunConfig
from diloco.run.sizing import parameters_of
from executors.platforms.places import Place
from executors.preflight.place_faults import place_faults
from inner import InnerConfig, InnerError, publish_model
from inner.models.gguf import read_gguf_header
from inner.models.known import known_model
from inner.models.naming import is_hub_name
from tests.support.fleet import Fleet
from tests.support.gguf_files import write_gguf


def gguf_config(path: Path, **changes: Any) -> InnerConfig:
    return InnerConfig(**{"loop": "supervised", "model": str(path), "data": {"text": "a.txt"}, **changes})


def test_the_published_folder_has_the_dequantised_weights_the_tokenizer_and_the_template(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    publish_model(gguf_config(tmp_path / "m.gguf"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.float32 and not hasattr(model.config, "quantization_config")
    down = weights["blk.0.ffn_down.weight"]
    found = model.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy()
    assert np.array_equal(found, dequantize(quantize(down, Kind.Q8_0), Kind.Q8_0))
    assert 0 < np.abs(found - down).max() < 0.01, "rounded, and not by much"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "user: ab\n"
    assert tokenizer.decode(tokenizer("abc")["input_ids"], skip_special_tokens=True) == "abc"


def test_it_is_said_that_weights_are_rounded(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q8.gguf")
    write_gguf(tmp_path / "f32.gguf", kind=Kind.F32)
    note = known_model(gguf_config(tmp_path / "q8.gguf")).note
    assert "q8.gguf is dequantised to float32 (from Q8_0; training begins at these rounded weights)" in note
    assert "without loss" in known_model(gguf_config(tmp_path / "f32.gguf")).note


def test_its_parameters_are_counted_from_its_header_and_it_is_not_on_the_hub(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    raw = {"inner": {"loop": "supervised", "model": str(tmp_path / "m.gguf"), "data": {"text": "a.txt"}}}
    (tmp_path / "a.txt").write_text("text")
    config = RunConfig.from_dict(raw, tmp_path)
    assert parameters_of(config) == sum(w.size for w in weights.values())
    assert not is_hub_name(config.inner.model)
    (fault,) = place_faults(config, "s3://b/r", [Place("modal", options={"gpu": "T4"}, secrets=("aws",))], {})
    assert "m.gguf' is a file of this machine" in fault


@pytest.mark.slow
def test_a_fleet_trains_from_it_and_every_replica_starts_from_the_same_bits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    fleet = Fleet(tmp_path, inner={"model": str(tmp_path / "m.gguf")}, fleet={"replicas": 2, "steps": 2})
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    assert "model.safetensors" in fleet.model.files and not fleet.model.hub


@pytest.mark.parametrize("architecture", ["rwkv6", "clip"])
def test_an_architecture_that_transformers_cannot_read_is_refused(tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "m.gguf", architecture)
    for read in (known_model, lambda config: publish_model(config, tmp_path / "out")):
        with pytest.raises(InnerError, match=f"architecture '{architecture}', which transformers cannot read .* Give"):
            read(gguf_config(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty file"),
        (b"version https://git-lfs.github.com/spec/v1", "magic invalid"),
        (b"GGUF\3\0\0\0", "Error"),
        (b"GGUF" + b"\xff" * 40, "version 4294967295"),
        (b"GGUF\3\0\0\0" + b"\0" * 8 + b"\1" + b"\0" * 7 + b"\xff" * 8, "Error"),
    ],
)
def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path, body: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(body)
    with pytest.raises(InnerError, match=f"is not a GGUF file .*{words}.*Download it again"):
        known_model(gguf_config(tmp_path / "m.gguf"))


def test_a_file_that_is_cut_off_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    body = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(body[: len(body) // 2])
    with pytest.raises(InnerError, match=r"is not a GGUF file that can be read"):
        publish_model(gguf_config(tmp_path / "m.gguf"), tmp_path / "out")


def test_a_file_that_is_not_there_and_a_missing_package_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InnerError, match=r"there is no such file here .*`make smollm2`"):
        known_model(gguf_config(tmp_path / "m.gguf"))
    write_gguf(tmp_path / "m.gguf")
    monkeypatch.setattr("inner.models.gguf.find_spec", lambda name: None)
    with pytest.raises(InnerError, match=r"pip install 'serverless-diloco\[gguf\]'"):
        known_model(gguf_config(tmp_path / "m.gguf"))


def test_the_header_says_what_is_in_the_file(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "m.gguf")
    header = read_gguf_header(tmp_path / "m.gguf")
    assert header.architecture == "llama" and header.quantised == ["Q8_0"]
    assert {n: s[::-1] for n, s in header.shapes.items()} == {n: w.shape for n, w in weights.items()}
