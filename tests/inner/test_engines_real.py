"""The real llama.cpp, MLX and a real vLLM server as an actor's engine: SmolLM2's own file, with a LoRA adapter.

SmolLM2, dequantised ─┬▶ F32, Q8_0, Q4_0 .gguf ──▶ llama.cpp + adapter.gguf ───▶ ids, log-probs ──▶ check_rollouts
                      ├▶ MLX, fp32, bf16, 8 and 4 bits + the adapter ──────────▶ ids, log-probs ──▶ check_rollouts
                      ├▶ vLLM's server, fp32 and bf16 + adapter files ─────────▶ ids, log-probs ──▶ check_rollouts
                      └▶ transformers + the adapter, fp32 ───────────────────────────────────────────┘
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from diloco.replica.door import POSITIONS
from inner import check_rollouts
from inner.models.gguf import load_gguf
from inner.models.lora import new_adapter
from inner.settings.task import LoraSettings
from inner.settings.vllm import has_vllm
from tests.support.gguf_files import requantise
from tests.support.vllm_replica import ENVIRON

SMOLLM2 = Path(__file__).parents[2] / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches it"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
needs_llama = pytest.mark.skipif(not find_spec("llama_cpp"), reason="make test-engines runs it")
needs_mlx = pytest.mark.skipif(not find_spec("mlx_lm"), reason="make test-engines runs it")
needs_vllm = pytest.mark.skipif(not has_vllm(), reason="make test-vllm runs it")
BUNDLES, N, TOKENS = 20, 4, 48
PROMPTS = ("Name three rivers of Europe.", "What is 17 + 25?", "Write a haiku about rain.", "Why is the sky blue?")
Made = tuple[Any, Any]


@pytest.fixture(scope="module")
def made() -> Iterator[Made]:
    model, tokenizer = load_gguf(str(SMOLLM2), "float32")
    adapted = new_adapter(model, LoraSettings(r=8, targets=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    yield adapted.eval(), tokenizer


def an_engine(made: Made, folder: Path, kind: Kind) -> Any:
    from inner.extras.engines.llama import LlamaEngine

    requantise(SMOLLM2, folder / f"{kind.name}.gguf", kind)
    model, _ = made
    engine = LlamaEngine(folder / f"{kind.name}.gguf", model.peft_config["default"], folder=folder, context=512)
    engine.load(model.named_parameters())
    return engine


def a_bundle(engine: Any, tokenizer: Any, seed: int, temperature: float = 1.0) -> list[tuple[Any, Any, Any]]:
    from inner.extras.engines.sampling import DrawSettings

    asked = [{"role": "user", "content": PROMPTS[seed % len(PROMPTS)]}]
    prompt = list(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))
    settings = DrawSettings(temperature, TOKENS, frozenset([tokenizer.eos_token_id]), seed)
    ids, logprobs = engine.sample(prompt, N, settings)
    assert all(len(row) <= TOKENS and all(x <= 0 for x in ps) for row, ps in zip(ids, logprobs, strict=True))
    return [(prompt, row, ps) for row, ps in zip(ids, logprobs, strict=True)]


def checked(made: Made, engine: Any, bundles: int, temperature: float = 1.0) -> list[Any]:
    model, tokenizer = made
    return [
        check_rollouts(model, a_bundle(engine, tokenizer, i, temperature), positions=POSITIONS, temperature=temperature)
        for i in range(bundles)
    ]


@needs_llama
def test_the_exact_files_log_probs_are_the_models_with_the_adapter_and_follow_its_changes(
    made: Made, tmp_path: Path
) -> None:
    """So names, the order of the rows of q and k, and the scale are right."""
    assert_follows(made, an_engine(made, tmp_path, Kind.F32))


def assert_follows(made: Made, engine: Any) -> None:
    model, tokenizer = made
    for temperature in (1.0, 0.7):
        (found,) = checked(made, engine, 1, temperature)
        assert found.disagreement < 0.005 and not found.doubts, found
    rollouts = a_bundle(engine, tokenizer, 3)
    with model.disable_adapter():
        assert check_rollouts(model, rollouts, seed=1).doubts, "the adapter counts"
    before = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(-1)
    try:
        assert check_rollouts(model, rollouts, seed=1).doubts, "other weights"
        engine.load(model.named_parameters())
        assert not check_rollouts(model, a_bundle(engine, tokenizer, 3), seed=1).doubts
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in before:
                    parameter.copy_(before[name])


@needs_llama
def test_eight_bits_are_believed_and_four_bits_are_doubted_at_once(made: Made, tmp_path: Path) -> None:
    found = checked(made, an_engine(made, tmp_path, Kind.Q8_0), BUNDLES)
    _print("Q8_0", found)
    assert not any(one.doubts for one in found)
    found = checked(made, an_engine(made, tmp_path, Kind.Q4_0), 5)
    _print("Q4_0", found)
    assert found[0].doubts and found[1].doubts


def _print(name: str, found: list[Any]) -> None:
    worst = max(one.disagreement for one in found)
    least = min(one.disagreement for one in found)
    doubted, z = sum(bool(one.doubts) for one in found), max(abs(one.surprise) for one in found)
    print(f"{name}: {doubted} of {len(found)} doubted, disagreement {least:.3f} to {worst:.3f}, |z| at most {z:.1f}")


def an_mlx_engine(made: Made, folder: Path, dtype: str = "float32", bits: int = 0) -> Any:
    from mlx_lm.convert import convert

    from inner.extras.engines.mlx import MlxEngine

    model, _ = made
    address = folder / f"{dtype}-{bits}"
    convert(str(a_base(folder)), str(address), quantize=bool(bits), q_bits=bits or 8, dtype=dtype)
    engine = MlxEngine(str(address), model.peft_config["default"])
    engine.load(model.named_parameters())
    return engine


@needs_mlx
def test_mlxs_log_probs_are_the_models_with_the_adapter_and_follow_its_changes(made: Made, tmp_path: Path) -> None:
    assert_follows(made, an_mlx_engine(made, tmp_path))


@needs_mlx
@pytest.mark.parametrize(
    ("dtype", "bits", "is_doubted"), [("bfloat16", 0, False), ("float32", 8, False), ("float32", 4, True)]
)
def test_mlx_is_believed_with_eight_bits_and_doubted_with_four(
    made: Made, tmp_path: Path, dtype: str, bits: int, is_doubted: bool
) -> None:
    """MLX multiplies slowly on a CPU, so there are few bundles."""
    found = checked(made, an_mlx_engine(made, tmp_path, dtype, bits), 2 if is_doubted else 3)
    _print(f"MLX {dtype}, {bits or 'no'} bits", found)
    assert {bool(one.doubts) for one in found} == {is_doubted}


@contextmanager
def a_vllm_server(base: Path, log: Path, *options: str) -> Iterator[str]:
    """Start vLLM's own server of the model in `base`, and stop it in the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base), "--enable-lora",
        "--max-lora-rank", "16", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1",
        "--port", str(port), *options,
    ]  # fmt: skip
    environ = {**os.environ, **ENVIRON, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environ, stdout=out, stderr=out)
    try:
        while not is_up(address):
            assert server.poll() is None, log.read_text()[-2000:]
            time.sleep(1.0)
        yield address
    finally:
        server.terminate()
        server.wait(60)


def is_up(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").is_success
    except httpx.TransportError:
        return False


def a_base(folder: Path) -> Path:
    """The model without an adapter, as transformers and vLLM read it."""
    model, tokenizer = load_gguf(str(SMOLLM2), "float32")
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return folder / "base"


@needs_vllm
@pytest.mark.parametrize("dtype, limit", [("float32", 0.001), ("bfloat16", 0.08)])
def test_a_real_vllm_servers_rollouts_are_believed_with_the_adapter_and_follow_its_changes(
    made: Made, tmp_path: Path, dtype: str, limit: float
) -> None:
    from inner.extras.engines.server import AdapterServer

    model, tokenizer = made
    options = ("--dtype", dtype, "--logprobs-mode", "processed_logprobs")
    with a_vllm_server(a_base(tmp_path), tmp_path / "log", *options) as address:
        engine = AdapterServer(address, model.peft_config["default"], name="a00", folder=tmp_path)
        engine.load(model.named_parameters())
        for temperature in (1.0, 0.7):
            found = checked(made, engine, 3, temperature)
            _print(f"vLLM {dtype}, T = {temperature}", found)
            assert not any(one.doubts or one.disagreement > limit for one in found)
        rollouts = [one for seed in range(3) for one in a_bundle(engine, tokenizer, seed)]
        with model.disable_adapter():
            assert check_rollouts(model, rollouts).disagreement > 0.05, "the adapter counts"
        assert check_rollouts(model, rollouts).disagreement < min(limit, 0.04)
        engine.load((name, -p if "lora_B" in name else p) for name, p in model.named_parameters())
        assert check_rollouts(model, a_bundle(engine, tokenizer, 3), seed=1).doubts, "it follows"
        models = httpx.get(f"{address}/v1/models").json()["data"]
        assert sum(bool(one["parent"]) for one in models) == 1, "the adapter before is unloaded"


@needs_vllm
def test_a_vllm_servers_raw_log_probs_are_doubted_where_the_temperature_is_not_1(made: Made, tmp_path: Path) -> None:
    from inner.extras.engines.server import AdapterServer

    with a_vllm_server(a_base(tmp_path), tmp_path / "log", "--dtype", "float32") as address:
        engine = AdapterServer(address, made[0].peft_config["default"], name="a00", folder=tmp_path)
        engine.load(made[0].named_parameters())
        (fine,), (other,) = checked(made, engine, 1), checked(made, engine, 1, 0.7)
        assert not fine.doubts and other.doubts, (fine, other)
