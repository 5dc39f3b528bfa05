"""Puts an engine in place of the one method in which TRL generates.

    TRL's _generate, tool loop ──▶ _generate_single_turn(prompts) ──▶ engine.sample(prompt, n, settings)
                               ◀── ids, log-probs ◀───────────────────┘   equal prompts in one call

Not promised: the random numbers of TRL's generation.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from inner.errors import InnerError
from inner.rollouts.generation import GenerationTrainer

Sampled = tuple[list[list[int]], list[list[float]]]  # ids and log-probs of n completions


@dataclass(frozen=True)
class DrawSettings:
    """How to sample.   most: token limit.   ends: ids that end a completion, as its last token.   seed: per call."""

    temperature: float
    most: int
    ends: frozenset[int]
    seed: int


class SamplingEngine(Protocol):
    """An engine.   name: written into the bundles' records.   together: calls of `sample` that it takes at once."""

    name: str
    together: int

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Sample with these weights from now on.   parameters: those of the model, by name."""
        ...

    def sample(self, prompt: Sequence[int], n: int, settings: DrawSettings) -> Sampled:
        """Return n completions of a prompt.   Raise InnerError if the engine gives no completion."""
        ...


def sample_with(trainer: Any, engine: SamplingEngine) -> None:
    """Make the trainer sample with `engine` from now on."""
    kind: Any = type(trainer)
    trainer.__class__ = type(f"Engine{kind.__name__}", (_Asking, kind), {})
    trainer.engine = engine


class _Asking(GenerationTrainer):
    engine: SamplingEngine

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *_: Any, **__: Any) -> Sampled:
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompt_ids)]
        seeds = torch.randint(1 << 31, (len(groups),)).tolist()
        with ThreadPoolExecutor(self.engine.together) as pool:
            asked = [
                pool.submit(self.engine.sample, prompt, n, self._settings(seed))
                for (prompt, n), seed in zip(groups, seeds, strict=True)
            ]
            answers = [one.result() for one in asked]
        ids, logprobs = (list(chain(*part)) for part in zip(*answers, strict=True))
        most = self.accelerator.unwrap_model(self.model).get_input_embeddings().num_embeddings
        if unknown := [token for row in ids for token in row if not 0 <= token < most]:
            raise InnerError(
                f"the engine sampled the token {unknown[0]}, and the run's model has {most} tokens. Start it with that "
                "model"
            )
        return ids, logprobs

    def _settings(self, seed: int) -> DrawSettings:
        ends: Any = self.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        return DrawSettings(self.temperature, cast(int, self.max_completion_length), frozenset(ends), seed)


def adapter_tensors(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the adapter's tensors, fp32 on the CPU, by their names in PEFT's files."""
    found = ((name, tensor) for name, tensor in parameters if ".lora_" in name)
    return {name.replace(".default.", "."): t.detach().float().cpu().contiguous() for name, t in found}
