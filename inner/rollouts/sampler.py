"""Two things that TRL asks for, made strict: the order of prompts, and the values of a reward.

    prompts   generation g = micro-batch // micro-batches per generation: its prompts are a function of (share, g)
    reward    one finite number per completion, or None for "cannot say"; else an error that names the function

Not promised: checks of a reward that is a model.
"""

import itertools
from collections.abc import Iterator
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, cast

from torch import nn
from torch.utils.data import Sampler

from inner.data.order import Share, prompt_order
from inner.usercode.userfiles import checked_rewards


class GenerationSampler(Sampler):
    """Prompt indices from the trainer's current micro-batch on.

    A generation's prompts are yielded once per micro-batch that it serves; TRL uses the first and reads the others from
    its buffer. Endless, since an inner loop has no last step."""

    def __init__(self, trainer: Any, n_prompts: int, share: Share) -> None:
        self.trainer = trainer
        self.at = prompt_order(n_prompts, share)

    def __iter__(self) -> Iterator[int]:
        args: Any = self.trainer.args
        repeats = args.num_generations
        per_generation = args.generation_batch_size // repeats
        served = args.steps_per_generation * self.trainer.num_iterations
        for micro in itertools.count(self.trainer._step):
            first = micro // served * per_generation
            for position in range(first, first + per_generation):
                yield from itertools.repeat(self.at(position), repeats)

    def __len__(self) -> int:
        return 2**40


def guard_answers(reward: Any) -> Any:
    """Return the same reward, with its answers checked. TRL would take a NaN for "cannot say"."""
    if isinstance(reward, nn.Module) or not callable(reward):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    function = cast(Any, reward)

    def check(values: Any, kwargs: Any) -> list[float | None]:
        if isinstance(values, list | tuple):  # of scalars of numpy or torch, perhaps
            values = [value.item() if hasattr(value, "item") else value for value in values]
        return checked_rewards(values, len(kwargs["completions"]), name)

    @wraps(reward, updated=())
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(function(*args, **kwargs), kwargs)

    @wraps(reward, updated=())
    async def checked_later(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(await function(*args, **kwargs), kwargs)

    return checked_later if iscoroutinefunction(reward) else checked
