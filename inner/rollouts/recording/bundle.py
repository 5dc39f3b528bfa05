"""Stores one generation's rollouts as bytes, complete enough to train on them again with equal bits.

    safetensors   prompt_ids · ids · mask · logprobs   concatenated, with the lengths by rollout
                  rewards                              (B, F) as they counted, NaN: unknown
                  torch, numpy, python, cuda           random states after the generation
    metadata      prompts, each once · completions · names and weights of the rewards · tool calls and failures

A token takes its text and 4 bytes, 1 more with tools, 4 more with log-probs; the random states take 15 KB.
Tokens and texts are stored as they were sampled, so they contain any secret that a tool printed.

unpack.py reads them again.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor

Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class RandomStates:
    """The random states of torch, numpy, python and the GPU, as tensors, and a few numbers for numpy and python."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    @classmethod
    def read(cls) -> "RandomStates":
        version, words, gauss = random.getstate()
        _, keys, *at = np.random.get_state(legacy=True)  # pyright: ignore[reportAssignmentType]
        tensors = {
            "torch": torch.random.get_rng_state(),
            "numpy": torch.from_numpy(np.asarray(keys, np.int64)),
            "python": torch.from_numpy(np.fromiter(words, np.int64)),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        return cls(tensors, {"numpy": at, "python": [version, gauss]})


@dataclass(frozen=True)
class Bundle:
    """The rollouts of one generation, as lists by rollout.   mask: 1: the model's token, 0: a tool's; None: no tools.

    prompts, completions: in the form that rewards get.   rewards: (B, F).   names, weights: of the F rewards.
    environments: a name per rollout; None: at most one environment.   calls: numbers of tool calls and of failed calls.
    opened: the messages in front of each completion, if an agent wrote them; None: the prompts."""

    prompts: Sequence[Any]
    completions: Sequence[Any]
    prompt_ids: Ids
    ids: Ids
    mask: Ids | None
    logprobs: Sequence[Sequence[float]] | None
    rewards: Tensor
    names: Sequence[str]
    weights: Sequence[float]
    environments: Sequence[str | None] | None = None
    opened: Sequence[Any] | None = None
    calls: tuple[int, int] = (0, 0)
    random: RandomStates = field(default_factory=RandomStates.read)

    @property
    def first_turns(self) -> tuple[list[list[int]], Any]:
        """Return what TRL's `_generate_single_turn` returned: ids and log-probs up to the first tool's answer."""
        masks = self.mask or [[1] * len(ids) for ids in self.ids]
        ends = [mask.index(0) if 0 in mask else len(mask) for mask in map(list, masks)]
        cut = lambda rows: [list(row[:end]) for row, end in zip(rows, ends, strict=True)]  # noqa: E731
        return cut(self.ids), None if self.logprobs is None else cut(self.logprobs)

    @property
    def turns(self) -> tuple[Any, ...]:
        """Return what TRL's `_tool_call_loop` returned."""
        ids = [list(row) for row in self.ids]
        return self.mask, self.completions, ids, self.logprobs, *self.calls, [[] for _ in ids]

    def pack(self) -> bytes:
        """Return the bundle's bytes.   Raise ValueError for more texts than a safetensors header holds (100 MB)."""
        written = json.JSONEncoder(default=str).encode  # a tool's result may hold anything
        texts = [written(prompt) for prompt in self.prompts]
        place = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        tensors = {
            "prompt_lengths": _lengths(self.prompt_ids),
            "prompt_ids": _flat(self.prompt_ids, np.int32),
            "lengths": _lengths(self.ids),
            "ids": _flat(self.ids, np.int32),
            "rewards": self.rewards.detach().float().cpu().contiguous().numpy(),
            **{name: tensor.numpy() for name, tensor in self.random.tensors.items()},
        }
        if self.mask is not None:
            tensors["mask"] = _flat(self.mask, np.uint8)
        if self.logprobs is not None:
            tensors["logprobs"] = _flat(self.logprobs, np.float32)  # numpy reads None as NaN
        said = {
            "prompts": list(dict(zip(texts, self.prompts, strict=True)).values()),
            "prompt_of": [place[text] for text in texts],
            "completions": list(self.completions),
            "names": list(self.names),
            "weights": [float(weight) for weight in self.weights],
            "environments": None if self.environments is None else list(self.environments),
            "calls": list(self.calls),
            "random": dict(self.random.numbers),
        } | ({} if self.opened is None else {"opened": list(self.opened)})
        texts_of_all = written(said)
        try:
            return safetensors.numpy.save(tensors, {"bundle": texts_of_all})
        except SafetensorError as error:
            raise ValueError(f"their {len(texts_of_all):,} bytes of texts do not fit into a bundle: {error}") from error


class TooFar(str):
    """The reason for a bundle whose weights are too far from the present weights (drift.py)."""


def _lengths(rows: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int32)


def _flat(rows: Iterable[Iterable[Any]], dtype: type[np.number]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype)  # half the time of an array of a list
