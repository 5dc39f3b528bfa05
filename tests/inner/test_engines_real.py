"""The real llama.cpp as an actor's engine: SmolLM2's own file in three precisions, with a LoRA adapter.

SmolLM2, dequantised ──▶ F32, Q8_0, Q4_0 .gguf ──▶ llama.cpp + adapter.gguf ──▶ ids, log-probs ──▶ check_rollouts
                    └──▶ transformers + the adapter, fp32 ────────────────────────────────────────────┘
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from diloco.replica.door import POSITIONS
from inner import check_rollouts
from inner.models.gguf import load_gguf
from inner.models.lora import new_adapter
from inner.settings.task import LoraSettings
from tests.support.gguf_files import requantise

SMOLLM2 = Path(__file__).parents[2] / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.skipif(not find_spec("llama_cpp") or not SMOLLM2.exists(), reason="make test-engines runs it"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
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


def test_the_exact_files_log_probs_are_the_models_with_the_adapter_and_follow_its_changes(
    made: Made, tmp_path: Path
) -> None:
    """So names, the order of the rows of q and k, and the scale are right."""
    model, tokenizer = made
    engine = an_engine(made, tmp_path, Kind.F32)
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
