"""The data of an inner step: a pure function of (data seed, index), so that a replaced replica goes on where the first
stopped.

    prompts      epoch 0: permutation(seed, 0) | epoch 1: permutation(seed, 1) | …      one endless line
                 ├─ g=0 ─┼─ g=1 ─┼─ g=2 ─┤                                             P prompts per generation
    windows      step i: batch random windows of the token file, drawn from (seed, i)

    inner step   ├── accumulated micro-batches ──┤             of which a generation may hold all or only some
    generation        ├── served = micro-batches per generation · iterations ──┤

Not promised: that the order survives a change of the batch size, or of the number of prompts.
"""

from collections.abc import Callable

import numpy as np


def prompt_order(n_prompts: int, seed: int) -> Callable[[int], int]:
    """position in the endless line -> prompt index. Keeps the permutation of one epoch at a time."""
    epoch_now = -1
    order = np.empty(0, dtype=np.int64)

    def at(position: int) -> int:
        nonlocal epoch_now, order
        epoch, offset = divmod(position, n_prompts)
        if epoch != epoch_now:
            epoch_now = epoch
            order = np.random.default_rng([seed, epoch]).permutation(n_prompts)
        return int(order[offset])

    return at


def window_starts(n_tokens: int, width: int, batch: int, seed: int, index: int) -> np.ndarray:
    """First token of each of `batch` windows of `width` tokens, for inner step (or micro-batch) `index`."""
    return np.random.default_rng([seed, index]).integers(0, n_tokens - width + 1, size=batch)


def step_in_generation(micro: int, accumulated: int, per_generation: int, served: int) -> list[int]:
    """The micro-batches of the inner step that `micro` belongs to, as far as they are of its generation: indices
    0 … per_generation - 1, one per forward pass (a second iteration passes the same ones again)."""
    step = micro // accumulated * accumulated
    generation = micro // served * served
    first = max(step, generation)
    end = min(step + accumulated, generation + served)
    return [m % per_generation for m in range(first, end)]
