"""Read a bundle's bytes (bundle.py) again.

    bytes ──▶ unpack ──▶ Bundle ──▶ restore(bundle.random)      the process draws as after the recorded generation

The bytes may come from any writer: `unpack` raises ValueError, and no other error, unless the bytes are such a bundle,
with random states that this machine can restore.  Not promised: that a trainer can train on it (found.py).
"""

import json
import random
from collections.abc import Mapping
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from inner.rollouts.recording.bundle import Bundle, RandomStates
from inner.usercode.attempts import LARGEST


def unpack(body: bytes) -> Bundle:
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
        opened=said.get("opened"),
        calls=(int(calls), int(failures)),
        random=RandomStates(states, said["random"]),
    )
    if fault := _fault(bundle):
        raise ValueError(fault)
    _check(bundle.random)
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
        return "its completions do not fit their prompts: texts belong to a text, and valid messages to messages"
    named = bundle.environments
    if named is not None and not (_are(named, str, type(None)) and len(named) == len(bundle.ids)):
        return "its environments are not one name, or None, per rollout"
    opened = bundle.opened
    fits = opened is None or (_are(opened, list) and len(opened) == len(bundle.ids) and all(map(_are_turns, opened)))
    return "" if fits else "its opened prompts are not one list of valid messages per rollout"


def _are_turns(messages: Any) -> bool:
    return _are(messages, dict) and not any(map(message_fault, messages))


def _answers(completion: Any, prompt: Any) -> bool:
    """Whether TRL gives a completion in this form to such a prompt: a text to a text, and messages to messages."""
    if not isinstance(prompt, list):
        return isinstance(completion, str)
    return bool(completion) and _are_turns(completion)


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


def _cut(name: str, flat: Tensor, lengths: Tensor) -> list[list[Any]]:
    """Return the values of a tensor by rollout.   Log-probs must be floats, all other values and lengths integers."""
    if flat.is_complex() or flat.is_floating_point() != (name == "logprobs") or lengths.is_floating_point():
        raise ValueError(f"its {name} are {flat.dtype}, and their lengths {lengths.dtype}; only logprobs are floats")
    sizes = [int(n) for n in lengths]
    if flat.ndim != 1 or min(sizes, default=1) < 1 or sum(sizes) != len(flat):
        raise ValueError(f"its {name}: {len(flat)} values do not fit the lengths of {len(sizes)} rollouts")
    values = flat.tolist()
    return [values[a:b] for a, b in pairwise([0, *accumulate(sizes)])]


def restore(states: RandomStates) -> None:
    """Let this process draw the random numbers that follow these states."""
    torch.random.set_rng_state(states.tensors["torch"])
    np.random.set_state(_numpy(states))
    random.setstate(_python(states))
    if "cuda" in states.tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(states.tensors["cuda"])


def _check(states: RandomStates) -> None:
    """Raise ValueError unless `restore` works here.   Tried on new generators, not on the process's own."""
    try:
        words, (position, _, _) = states.tensors["numpy"], states.numbers["numpy"]
        if not isinstance(position, int) or not 0 <= position <= len(words):  # numpy would read beyond its array
            raise ValueError(f"numpy's position is {position}, not 0 to {len(words)}")
        if words.dtype != torch.int64 or not 0 <= int(words.min()) <= int(words.max()) < 2**32:
            raise ValueError(f"numpy's words are {words.dtype}, not int64 with values of 32 bits")
        _, gauss = states.numbers["python"]
        if not (gauss is None or isinstance(gauss, float)):
            raise ValueError(f"python's next normal number is {gauss!r}, not a float or None")
        torch.Generator().set_state(states.tensors["torch"])
        np.random.RandomState().set_state(_numpy(states))
        random.Random().setstate(_python(states))
        if "cuda" in states.tensors and torch.cuda.is_available():
            torch.Generator("cuda").set_state(states.tensors["cuda"])
    except Exception as error:
        raise ValueError(
            f"its random states cannot be restored here, by torch {torch.__version__} and numpy {np.__version__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _numpy(states: RandomStates) -> Any:
    return ("MT19937", states.tensors["numpy"].numpy().astype(np.uint32), *states.numbers["numpy"])


def _python(states: RandomStates) -> Any:
    version, gauss = states.numbers["python"]
    return version, tuple(states.tensors["python"].tolist()), gauss
