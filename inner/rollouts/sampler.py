"""The order of prompts that TRL asks for, made strict.

    generation g = micro-batch // micro-batches per generation: its prompts are a function of (share, g)

Not promised: that every prompt is seen equally often.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from inner.data.order import Share, prompt_order


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
