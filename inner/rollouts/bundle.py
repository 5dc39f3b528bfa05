"""Stores one generation's rollouts as bytes, complete enough to train on them again with equal bits.

    safetensors   prompt_ids · ids · mask · logprobs   concatenated, with the lengths by rollout
                  rewards                              (B, F) as they counted, NaN: unknown
                  torch, numpy, python, cuda           random states after the generation
    metadata      prompts, each once · completions · names and weights of the rewards · tool calls and failures

A token takes its text and 4 bytes, 1 more with tools, 4 more with log-probs; the random states take 15 KB.
Tokens and texts are stored as they were sampled, so they contain any secret that a tool printed.

Bytes may come from any writer: `unpack` raises ValueError, and no other error, unless they are such a bundle, with
random states that this machine can restore.  recorded.py checks whether a bundle fits a trainer.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from inner.usercode.attempts import LARGEST

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
            "python": torch.tensor(words, dtype=torch.int64),
        }
        if torch.cuda.is_available():
            tensors["cuda"] = torch.cuda.get_rng_state()
        return cls(tensors, {"numpy": at, "python": [version, gauss]})

    def restore(self) -> None:
        torch.random.set_rng_state(self.tensors["torch"])
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if "cuda" in self.tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.tensors["cuda"])

    def check(self) -> None:
        """Raise ValueError unless `restore` works here.   Tried on new generators, not on the process's own."""
        try:
            words, (position, _, _) = self.tensors["numpy"], self.numbers["numpy"]
            if not isinstance(position, int) or not 0 <= position <= len(words):  # numpy would read beyond its array
                raise ValueError(f"numpy's position is {position}, not 0 to {len(words)}")
            if words.dtype != torch.int64 or not 0 <= int(words.min()) <= int(words.max()) < 2**32:
                raise ValueError(f"numpy's words are {words.dtype}, not int64 with values of 32 bits")
            _, gauss = self.numbers["python"]
            if not (gauss is None or isinstance(gauss, float)):
                raise ValueError(f"python's next normal number is {gauss!r}, not a float or None")
            torch.Generator().set_state(self.tensors["torch"])
            np.random.RandomState().set_state(self._numpy)
            random.Random().setstate(self._python)
            if "cuda" in self.tensors and torch.cuda.is_available():
                torch.Generator("cuda").set_state(self.tensors["cuda"])
        except Exception as error:
            raise ValueError(
                f"its random states cannot be restored here, by torch {torch.__version__} and numpy {np.__version__}: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def _numpy(self) -> Any:
        return ("MT19937", self.tensors["numpy"].numpy().astype(np.uint32), *self.numbers["numpy"])

    @property
    def _python(self) -> Any:
        version, gauss = self.numbers["python"]
        return version, tuple(self.tensors["python"].tolist()), gauss


@dataclass(frozen=True)
class Bundle:
    """The rollouts of one generation, as lists by rollout.   mask: 1: the model's token, 0: a tool's; None: no tools.

    prompts, completions: as rewards get them.   rewards: (B, F).   names, weights: those of the F rewards.
    environments: a name per rollout; None: at most one environment.   calls: numbers of tool calls, and of failed ones.
    """

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
        texts = [json.dumps(prompt, default=str) for prompt in self.prompts]  # a tool's result may hold anything
        once = list(dict.fromkeys(texts))
        place = {text: i for i, text in enumerate(once)}
        tensors = {
            "prompt_lengths": _lengths(self.prompt_ids),
            "prompt_ids": _flat(self.prompt_ids, torch.int32),
            "lengths": _lengths(self.ids),
            "ids": _flat(self.ids, torch.int32),
            "rewards": self.rewards.detach().float().cpu().contiguous(),
            **self.random.tensors,
        }
        if self.mask is not None:
            tensors["mask"] = _flat(self.mask, torch.uint8)
        if self.logprobs is not None:
            tensors["logprobs"] = _flat(self.logprobs, torch.float32)
        said = {
            "prompts": [json.loads(text) for text in once],
            "prompt_of": [place[text] for text in texts],
            "completions": list(self.completions),
            "names": list(self.names),
            "weights": [float(weight) for weight in self.weights],
            "environments": None if self.environments is None else list(self.environments),
            "calls": list(self.calls),
            "random": dict(self.random.numbers),
        }
        texts_of_all = json.dumps(said, default=str)
        try:
            return safetensors.torch.save(tensors, {"bundle": texts_of_all})
        except SafetensorError as error:
            raise ValueError(f"their {len(texts_of_all):,} bytes of texts do not fit into a bundle: {error}") from error

    @classmethod
    def unpack(cls, body: bytes) -> "Bundle":
        """Return the bundle in these bytes.   Raise ValueError if they are not a bundle."""
        try:
            return _read(body)
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, SafetensorError, TypeError) as error:
            raise ValueError(f"not a bundle of rollouts: {type(error).__name__}: {error}") from error
        except ValueError as error:
            raise ValueError(f"not a bundle of rollouts: {error}") from error


def _read(body: bytes) -> Bundle:
    tensors = safetensors.torch.load(body)
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    said = json.loads(header["__metadata__"]["bundle"])
    prompts = [said["prompts"][i] for i in said["prompt_of"]]
    rewards = tensors["rewards"]
    lengths, names = tensors["lengths"], said["names"]
    count = len(prompts)
    if not count == len(said["completions"]) == len(lengths) == len(tensors["prompt_lengths"]) == len(rewards):
        raise ValueError("its parts have different numbers of rollouts")
    if rewards.dtype != torch.float32 or tuple(rewards.shape) != (count, len(names)):
        raise ValueError(f"its rewards are {rewards.dtype} {tuple(rewards.shape)}, not float32 {(count, len(names))}")
    parts = {name: _cut(name, tensors[name], lengths) for name in ("ids", "mask", "logprobs") if name in tensors}
    states = {name: tensors[name] for name in ("torch", "numpy", "python", "cuda") if name in tensors}
    calls, failures = said["calls"]
    bundle = Bundle(
        prompts=prompts,
        completions=said["completions"],
        prompt_ids=_cut("prompt_ids", tensors["prompt_ids"], tensors["prompt_lengths"]),
        ids=parts["ids"],
        mask=parts.get("mask"),
        logprobs=parts.get("logprobs"),
        rewards=rewards,
        names=names,
        weights=said["weights"],
        environments=said["environments"],
        calls=(int(calls), int(failures)),
        random=RandomStates(states, said["random"]),
    )
    if fault := _fault(bundle):
        raise ValueError(fault)
    bundle.random.check()
    return bundle


def _fault(bundle: Bundle) -> str:
    """Return why no trainer can train on these numbers and names; "" if it may.   A reward of NaN means unknown."""
    for row in bundle.mask or []:
        if (row[0] != 1 and any(row)) or not {0, 1}.issuperset(row):  # [0]: an agent has not called the model
            return f"its mask has a rollout that begins with a tool's token, or other numbers than 0 and 1: {row[:9]}"
    beyond = bundle.rewards[bundle.rewards.abs() > LARGEST].tolist()
    if beyond:
        return f"it has a reward of {beyond[0]}; the largest is {LARGEST:g}"
    if not _are(bundle.names, str) or not _are(bundle.weights, int, float) or len(bundle.weights) != len(bundle.names):
        return "its rewards do not have one name and one weight each"
    if not all(map(isfinite, bundle.weights)) or not all(0 <= calls < 2**53 for calls in bundle.calls):
        return f"its weights {bundle.weights} or its counts of tool calls {bundle.calls} are out of range"
    if not isinstance(bundle.completions, list) or not all(map(_answers, bundle.completions, bundle.prompts)):
        return "its completions do not fit their prompts: a text needs texts, and messages need valid messages"
    named = bundle.environments
    if named is not None and not (_are(named, str, type(None)) and len(named) == len(bundle.ids)):
        return "its environments are not one name, or None, per rollout"
    return ""


def _answers(completion: Any, prompt: Any) -> bool:
    """Whether TRL gives a completion in this form to such a prompt: a text to a text, and messages to messages."""
    if not isinstance(prompt, list):
        return isinstance(completion, str)
    return bool(completion) and _are(completion, dict) and not any(map(message_fault, completion))


def message_fault(said: Mapping[str, Any]) -> str:
    """Return which field of a message TRL cannot write, and its right form; "" if it can write the message."""
    calls: Any = said.get("tool_calls") or []
    called: list[Any] = [call.get("function", call) for call in calls] if _are(calls, dict) else [None]
    if not isinstance(said.get("role", ""), str):
        return "role must be a text"
    if not isinstance(said.get("content"), str | list | None):
        return "content must be a text, a list of text parts, or null"
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in called):
        return 'tool_calls must be a list of {"function": {"name": "…", "arguments": "…"}}'
    return ""


def _are(found: Any, *kinds: type) -> bool:
    """Whether this is a list of values of these kinds."""
    return isinstance(found, list) and all(isinstance(one, kinds) for one in found)


def _lengths(rows: Sequence[Sequence[Any]]) -> Tensor:
    return torch.tensor([len(row) for row in rows], dtype=torch.int32)


def _flat(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    nan = float("nan")
    return torch.tensor([nan if x is None else x for row in rows for x in row], dtype=dtype)


def _cut(name: str, flat: Tensor, lengths: Tensor) -> list[list[Any]]:
    """Return the values of a tensor by rollout.   Log-probs must be floats, all other values and lengths integers."""
    if flat.is_complex() or flat.is_floating_point() != (name == "logprobs") or lengths.is_floating_point():
        raise ValueError(f"its {name} are {flat.dtype}, and their lengths {lengths.dtype}; only logprobs are floats")
    sizes = [int(n) for n in lengths]
    if flat.ndim != 1 or min(sizes, default=1) < 1 or sum(sizes) != len(flat):
        raise ValueError(f"its {name}: {len(flat)} values do not fit the lengths of {len(sizes)} rollouts")
    values = flat.tolist()
    return [values[a:b] for a, b in pairwise([0, *accumulate(sizes)])]
