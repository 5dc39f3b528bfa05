"""In the place of vLLM: an `LLM` with transformers inside, behind the few names of vLLM that TRL calls.

    engines = fake_vllm(monkeypatch)      fills with the engines that are made from now on

It has weights of its own, loaded from the folder; samples with them, one prompt at a time; and tells log-probs.
`drift` is added to those, as an engine whose policy is another one would tell them.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from trl.generation import vllm_generation

from inner.settings import vllm


class FakeLLM:
    def __init__(self, *, model: str, dtype: str, seed: int, max_model_len: int | None, **asked: Any) -> None:
        self.asked = {"dtype": dtype, "seed": seed, "max_model_len": max_model_len, **asked}
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.drift = 0.0
        self.resets = 0
        self.temperatures: list[float] = []
        self.loaded: list[dict[str, torch.Tensor]] = []  # what was sent before each generation
        self._sent: dict[str, torch.Tensor] = {}
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=runner),
            model_config=SimpleNamespace(max_model_len=max_model_len or 4096),
        )
        torch.manual_seed(seed)  # as vLLM does, for the whole process

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            self.model.get_parameter(name).data.copy_(value)
            self._sent[name] = value.clone()

    def reset_prefix_cache(self) -> None:
        self.resets += 1
        self.loaded.append(self._sent)
        self._sent = {}

    def sleep(self, level: int) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)  # level 2 throws them away

    def wake_up(self, tags: list[str]) -> None: ...

    def generate(self, prompts: list[dict[str, Any]], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        self.temperatures.append(sampling_params.temperature)
        return [self._answer(prompt["prompt_token_ids"], sampling_params) for prompt in prompts]

    @torch.no_grad()
    def _answer(self, ids: list[int], asked: Any) -> Any:
        samples = {"do_sample": True, "temperature": asked.temperature, "top_k": 0} if asked.temperature else {}
        found = self.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), return_dict_in_generate=True,
            output_logits=True, max_new_tokens=asked.max_tokens, **(samples or {"do_sample": False}),
        )  # fmt: skip
        written = found.sequences[0, len(ids) :].tolist()
        logps = torch.stack(found.logits)[:, 0].float().div(asked.temperature or 1.0).log_softmax(-1)
        told = [SimpleNamespace(rank=1, logprob=logps[i, t].item() + self.drift) for i, t in enumerate(written)]
        logprobs = [{token: one} for token, one in zip(written, told, strict=True)]
        return SimpleNamespace(prompt_token_ids=ids, outputs=[SimpleNamespace(token_ids=written, logprobs=logprobs)])


def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """-> the engines that are made from now on."""
    made: list[FakeLLM] = []

    def make(**asked: Any) -> FakeLLM:
        made.append(FakeLLM(**asked))
        return made[-1]

    monkeypatch.setattr(vllm_generation, "LLM", make, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm, "refuse_without_vllm", lambda: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # so that what TRL sets goes again
    return made
