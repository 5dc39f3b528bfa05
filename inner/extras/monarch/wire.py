"""Defines the requests of a trainer to other processes, and the functions that answer them.

    Generation   prompts as token ids, sampling settings, the random state  ─▶  completions, the random state after it
    Teaching     rows of token ids, the positions that count                ─▶  logits (N, V)

The request contains the random state, and the answer returns it. So every process gives the same answer to a request,
and the trainer gets the tokens that it would have drawn itself.

Not promised: images; TRL's continuous batching.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from inner.channels.terms import Turns
from inner.models.causal_lm import sample_as_asked

RandomState = list[Tensor]  # states of the CPU and of each GPU


@dataclass(frozen=True)
class Generation:
    """A request.   prompt_ids: one list per rollout.   sampling: TRL's generation config.
    eos_ids: ids that end a completion.   pad_to: pad the prompts' width to a multiple of this; None: any width.
    casts: compute matrix products in bfloat16 (autocast)."""

    prompt_ids: list[list[int]]
    sampling: dict[str, Any]
    random_state: RandomState
    eos_ids: list[int]
    pad_to: int | None
    casts: bool


@dataclass(frozen=True)
class Completions:
    """The answer.   ids: one list per rollout, up to and including the first end token."""

    ids: list[list[int]]
    random_state: RandomState


@torch.no_grad()
def generate(model: Any, asked: Generation) -> Completions:
    """Generate token by token, as TRL 1.16 does without an engine (`_generate_single_turn`)."""
    device = next(model.parameters()).device
    pad_id = asked.sampling["pad_token_id"]
    ids_B_T, mask_B_T = pad_left(asked.prompt_ids, pad_id, asked.pad_to)
    write_random_state(asked.random_state)
    model.eval()  # without dropout
    sample_as_asked(model)
    with products(device, asked.casts):
        out = model.generate(
            input_ids=ids_B_T.to(device),
            attention_mask=mask_B_T.to(device),
            generation_config=GenerationConfig(**asked.sampling),
        )
    completions = out[:, ids_B_T.size(1) :].tolist()
    return Completions([until_end(row, asked.eos_ids) for row in completions], read_random_state())


def pad_left(rows: Sequence[Sequence[int]], pad_id: int, multiple: int | None) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (B, T) each, padded on the left."""
    width = max(len(row) for row in rows)
    if multiple:
        width = -(-width // multiple) * multiple
    ids = torch.tensor([[pad_id] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def until_end(ids: list[int], ends: Sequence[int]) -> list[int]:
    """Return the ids up to and including the first id in `ends`; all ids if no id is in `ends`."""
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids) - 1)
    return ids[: at + 1]


@dataclass(frozen=True)
class Teaching:
    """A request.   rows: token ids, with the hint.   turns: (row, first position, how many).   casts: autocast."""

    rows: list[list[int]]
    turns: Turns
    casts: bool


def products(device: torch.device, casts: bool) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=torch.bfloat16) if casts else nullcontext()


def read_random_state() -> RandomState:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else ())]


def write_random_state(state: RandomState) -> None:
    """Set the random state. A process with fewer GPUs takes only as many states as it has GPUs."""
    torch.set_rng_state(state[0])
    if torch.cuda.is_available():
        for device, one in zip(range(torch.cuda.device_count()), state[1:], strict=False):
            torch.cuda.set_rng_state(one, device)
