"""Runs vLLM as a trainer's generation engine, in the trainer's own process (TRL's "colocate").

    a generation at a new inner step ──▶ every parameter, one at a time ──▶ the engine's copy ──▶ completions, log-probs
                                         └ LoRA:  W + α/r · B A  in a new tensor; W is only read

TRL adds the adapter to W in place and subtracts it again. The subtraction does not restore all bits: one element of W
in seventy changes each time. TRL also lets vLLM choose the dtype ("auto" makes bfloat16 of float32 folders), and seeds
every replica's engine with 0, so all replicas draw the same noise. Here the dtype is the trainer's (or the configured
one), and the seed is the trainer's.

An outer step does not send weights itself: the inner step has changed, so the next generation sends the new θ.

Not promised: several processes; quantised engines; adapters other than LoRA.
"""

import os
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from inner.host import Host

LARGE_SHARE = 0.05  # warn if a larger share of sequences teaches nothing
ENOUGH = 64  # sequences to see before the share is judged


class Engine(VLLMGeneration):
    """TRL's engine with a dtype and a seed; it merges adapters into copies, not into the base weights.

    dtype: None: the model's own.   vLLM seeds the whole process, so it gets the seed that TRL has just set."""

    def __init__(self, *, model: Any, dtype: str | None, **kwargs: Any) -> None:
        self.dtype = dtype or str(next(model.parameters()).dtype).removeprefix("torch.")
        self.seed = torch.initial_seed() % 2**32  # numpy's limit
        super().__init__(model=model, **kwargs)

    def _init_vllm(self) -> None:
        if self.accelerator.num_processes == 1:
            os.environ["MASTER_PORT"] = str(free_port())  # TRL tests port 29500, but opens it seconds later
        module: Any = vllm_generation
        make = module.LLM
        module.LLM = lambda **asked: make(**{**asked, "dtype": self.dtype, "seed": self.seed})
        try:
            super()._init_vllm()
        finally:
            module.LLM = make

    def _iter_named_params(self) -> Generator[tuple[str, Tensor], None, None]:
        yield from engine_parameters(self.model)


def free_port() -> int:
    """Return a free port, chosen by the system, because replicas on one machine start at the same time."""
    with socket.socket() as held:
        held.bind(("", 0))  # no name: not every machine knows localhost
        return held.getsockname()[1]


@torch.no_grad()
def engine_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the base model's files, value) of each parameter, adapter merged. The model does not change."""
    layers = {f"{name}.base_layer.weight": m for name, m in model.named_modules() if isinstance(m, LoraLayer)}
    adapted = {id(p) for layer in layers.values() for p in _adapter_parameters(layer)}
    for name, parameter in model.named_parameters():
        if id(parameter) in adapted:
            continue
        layer = layers.get(name)
        plain = name.removeprefix("base_model.model.").replace(".base_layer", "") if layers else name
        yield plain, parameter.data if layer is None else merged_weight(layer, parameter.data)


def _adapter_parameters(layer: Any) -> Iterator[nn.Parameter]:
    for name in layer.adapter_layer_names:
        yield from getattr(layer, name).parameters()


def merged_weight(layer: Any, weight: Tensor) -> Tensor:
    """Return W + Σ α/r · B A over the active adapters, in a new tensor; float32 if the adapter is in float32."""
    merged = weight
    for adapter in () if layer.disable_adapters else layer.active_adapters:
        merged = merged + layer.get_delta_weight(adapter).to(weight.device)
    return merged


class MaskedShare:
    """Warn once if many sequences teach nothing, because the engine's policy is too far from the trainer's."""

    def __init__(self, clip: float) -> None:
        self._clip = clip
        self._masked = 0.0
        self._seen = 0
        self._has_warned = False

    def note(self, share: float, sequences: int, host: Host) -> None:
        """Add one generation.   share: the masked part of its sequences.   sequences: how many it has."""
        self._masked += share * sequences
        self._seen += sequences
        if self._seen < ENOUGH:
            return
        mean = self._masked / self._seen
        self._masked = 0.0
        self._seen = 0
        if mean > LARGE_SHARE and not self._has_warned:
            self._has_warned = True
            host.emit("warning", masked_text(mean, self._clip), share=mean)


def masked_text(share: float, clip: float) -> str:
    return (
        f"{share:.0%} of the completions (token_mask: tokens) teach nothing: the trainer finds them more than {clip:g} "
        "times as likely as vLLM, which made them, so their importance weight is 0; set inner.vllm.dtype to "
        'inner.dtype, or inner.vllm.importance_mode = "token_truncate".'
    )


def masked_share(batch: Any) -> float:
    """Return the share of sequences, or of tokens if each has a weight, with importance weight 0 in TRL's batch."""
    ratio_B_T: Tensor = batch["importance_sampling_ratio"]
    if ratio_B_T.shape[1] == 1:
        return (ratio_B_T == 0).float().mean().item()
    written = (batch["completion_mask"] * batch.get("tool_mask", 1)).bool()
    return (ratio_B_T[written] == 0).float().mean().item() if written.any() else 0.0


@contextmanager
def engine_instead(dtype: str | None) -> Iterator[None]:
    """Let a GRPOTrainer that is made in this `with`, and uses vLLM, generate with this project's engine."""

    module: Any = grpo_trainer
    made = module.VLLMGeneration
    module.VLLMGeneration = partial(Engine, dtype=dtype)
    try:
        yield
    finally:
        module.VLLMGeneration = made
