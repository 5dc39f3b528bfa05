"""SmolLM2 in the real vLLM follows a run's bf16 weights, as docs/weights.md says.  `make test-vllm`."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inner.models.gguf import load_gguf
from inner.settings.vllm import has_vllm
from rendezvous import FileStore, SystemClock, follow_weights, layout
from rendezvous.background import Inline, no_emit
from rendezvous.weights.writer import WeightsWriter
from tests.support.vllm_replica import ENVIRON, FUSED, on_cpu

SMOLLM2 = Path(__file__).parents[2] / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.skipif(not has_vllm() or not SMOLLM2.exists(), reason="make test-vllm runs it"),
    pytest.mark.timeout(1200),
]


class Theta:
    """A model's parameters as the one fragment of a run."""

    def __init__(self, model: Any) -> None:
        self.layout = [[name, list(p.shape), "float32"] for name, p in model.named_parameters()]
        self.flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()

    def size(self, fragment: int) -> int:
        return self.flat.size

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {"theta.0": self.flat}


def far(engine: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """The engine's parameters that are not exactly what is expected."""
    wrong = []
    for name, p in engine.named_parameters():
        fused = next((part for part in FUSED if f".{part}." in name), None)
        names = [name.replace(fused, part) for part in FUSED[fused]] if fused else [name]
        weight = torch.cat([expected[n] for n in names])
        if not torch.equal(p.detach()[: weight.shape[0]], weight):  # the vocabulary is padded
            wrong.append(name)
    return wrong


def test_an_engine_holds_the_runs_weights_bit_for_bit(tmp_path: Path) -> None:
    os.environ.update({**ENVIRON, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    on_cpu()
    from vllm import LLM, SamplingParams

    model, tokenizer = load_gguf(str(SMOLLM2), "float32")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    store, theta = FileStore(tmp_path / "run"), Theta(model)
    writer = WeightsWriter(store, SystemClock(), reading=Inline(), uploads=Inline(), emit=no_emit)
    writer.layout = theta.layout
    llm = LLM(str(tmp_path / "model"), dtype="bfloat16", enforce_eager=True, max_model_len=64, seed=0)
    said = []
    rng = np.random.default_rng(0)
    following = follow_weights(store)
    for step, share in ((1, 0.0), (2, 0.02), (3, 1.0)):
        moved = rng.random(theta.flat.size) < share
        moved[: theta.flat.size // 2] &= step != 2  # in step 2 the first half of the model stays
        theta.flat[moved] *= rng.uniform(0.2, 1.8, int(moved.sum())).astype(np.float32)
        store.put(layout.commit_key(step - 1), b"the follower counts commits")
        writer.note_step(theta, step, 1, base="", closed=True)
        weights = next(following)
        assert weights.step == step and (step != 2 or 0 < len(weights.changed) < len(theta.layout))
        tensors = list(weights.named_tensors(changed_only=True))
        llm.apply_model(lambda engine, tensors=tensors: engine.load_weights(tensors) and None)
        llm.reset_prefix_cache()
        weights.load_into(model)
        expected = {name: p.detach().bfloat16() for name, p in model.named_parameters()}
        assert llm.apply_model(lambda engine, expected=expected: far(engine, expected)) == [[]]
        said.append(
            llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))[0].outputs[0].text
        )
    assert said[0].strip() and said[2] != said[0]
