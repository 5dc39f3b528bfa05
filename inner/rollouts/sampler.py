"""The order of prompts for TRL, fixed by the seed and the inner step.

    generation g = micro-batch // micro-batches per generation: its prompts are a function of (share, g)

Not promised: that all prompts are used equally often.
"""

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler

from inner.data.order import Share, prompt_order


class GenerationSampler(Sampler):
    """Yield prompt indices, beginning at the trainer's current micro-batch.

    A generation's prompts are yielded once per micro-batch that it serves; TRL uses the first and reads the others from
    its buffer. It is endless, because an inner loop has no last step."""

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
