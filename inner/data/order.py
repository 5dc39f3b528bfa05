"""Choose the data of an inner step: a pure function of (seed, share, index).  A replacement continues where its
predecessor stopped. In one epoch no two replicas read the same row, except if the rows do not divide evenly.

    epoch e      permutation(seed, e) of all rows: a b c d e f g h
                 share 0 of 3: a d g | share 1 of 3: b e h | share 2 of 3: c f a      dealt in turn; then from the front
    prompts      epoch 0's share | epoch 1's share | …                                one endless sequence
                 ├─ g=0 ─┼─ g=1 ─┼─ g=2 ─┤                                            P prompts per generation
    windows      step i: `batch` random windows of the token file, drawn from (seed, i)

    inner step   ├── accumulated micro-batches ──┤             a generation may have all of them or only some
    generation        ├── served = micro-batches per generation · iterations ──┤

Not promised: the same order after a change of the batch size or of the number of prompts; that all replicas are in the
same epoch: a fast replica may be in its second epoch while a slow replica is still in its first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Share:
    """A replica's rows: in every epoch, positions `index`, `index + of`, … of the replicas' common permutation."""

    seed: int
    index: int = 0
    of: int = 1

    def size(self, n_rows: int) -> int:
        """Return the number of rows per epoch, equal for all shares: a share may end with a row of another share."""
        return -(-n_rows // self.of)

    def salted(self, salt: int) -> "Share":
        """Return this replica's share of other permutations: those of another seed."""
        return Share(salt + self.seed, self.index, self.of)


def prompt_order(n_prompts: int, share: Share) -> Callable[[int], int]:
    """Return a function: position in the endless sequence -> prompt index. Keep one epoch's permutation."""
    size = share.size(n_prompts)
    epoch_now = -1
    order = np.empty(0, dtype=np.int64)

    def at(position: int) -> int:
        nonlocal epoch_now, order
        epoch, offset = divmod(position, size)
        if epoch != epoch_now:
            epoch_now = epoch
            order = np.random.default_rng([share.seed, epoch]).permutation(n_prompts)
        return int(order[(share.index + share.of * offset) % n_prompts])

    return at


def window_starts(n_tokens: int, width: int, batch: int, seed: int, index: int) -> np.ndarray:
    """Return the first token of `batch` windows of `width` tokens, for inner step (or micro-batch) `index`."""
    return np.random.default_rng([seed, index]).integers(0, n_tokens - width + 1, size=batch)


def step_in_generation(micro: int, accumulated: int, per_generation: int, served: int) -> list[int]:
    """Return the micro-batches of the same inner step and generation as `micro`, as indices 0 … per_generation - 1.
    There is one micro-batch per forward pass; a second iteration uses the same micro-batches again."""
    step = micro // accumulated * accumulated
    generation = micro // served * served
    first = max(step, generation)
    return [m % per_generation for m in range(first, min(step + accumulated, generation + served))]
