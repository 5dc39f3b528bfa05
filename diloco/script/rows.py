"""Give each replica its own rows of a trainer's dataset, from the run's position on.

    trainer's sampler ─▶ positions 0 … m−1 of a share, pass after pass ─▶ order(pass · m + position) ─▶ row
    (its repeats, its batches)                                              dealt to the replicas, differently each pass

    one pass of the trainer      as many indices as before, so its step counts stay right
    a session that joins late    begins after the indices that its slot has used
    several ranks                all draw the same stream, and accelerate deals its batches to them

Rows without a length, or with a sampler of another kind, are not dealt: each replica reads all rows, and a session
skips rows that its slot has used.

Not promised: rows that no other replica reads, if the number of replicas changes, or if the dataset has no length.
"""

from collections.abc import Callable, Iterator
from copy import copy
from itertools import count, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, SequentialSampler

from diloco.run.config import OuterError
from diloco.run.script import SLOT
from inner.data.order import Share, prompt_order


class ShareSampler(Sampler[int]):
    """A sampler that replaces `inner`, the trainer's sampler of all rows.   start: how many indices this slot used."""

    def __init__(self, inner: Any, share: Share, start: int) -> None:
        self._inner = inner
        self._length = len(inner)
        rows = len(inner.data_source)
        size = share.size(rows)
        mixes = not isinstance(inner, SequentialSampler) and getattr(inner, "shuffle", True)
        self._row = prompt_order(rows, share) if mixes else kept_order(rows, share)
        self._size = size
        _narrow(inner, size)
        self._stream = islice(self._all(share.seed), start, None)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return islice(self._stream, self._length)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the stream continues over all passes."""

    def _all(self, seed: int) -> Iterator[int]:
        for number in count():
            if hasattr(self._inner, "set_epoch"):
                self._inner.set_epoch(number)
            if getattr(self._inner, "generator", None) is not None or not hasattr(self._inner, "set_epoch"):
                self._inner.generator = torch.Generator().manual_seed(seed + number)
            for position in self._inner:
                yield self._row(number * self._size + position)


def kept_order(rows: int, share: Share) -> Callable[[int], int]:
    """Return a function: position -> row, in the dataset's order. Each group of share.of rows is dealt at random.

    Dealt in turn, rows that alternate (KTO's desirable and undesirable) would give each replica one kind of them."""

    def at(position: int) -> int:
        turn = int(np.random.default_rng([share.seed, position]).integers(share.of))
        return (position * share.of + (share.index + turn) % share.of) % rows

    return at


def _narrow(sampler: Any, size: int) -> None:
    """Make a sampler of Transformers, accelerate or TRL draw from `size` rows."""
    if hasattr(sampler, "lengths"):
        raise OuterError(
            f"{type(sampler).__name__} groups rows by their lengths, which fails for a replica's share of them. Set "
            'train_sampling_strategy = "random"'
        )
    sampler.data_source = range(size)
    if hasattr(sampler, "mini_repeat_count"):  # TRL's RepeatSampler has a count of its own
        sampler.num_samples = size


def batches_of(loader: Any) -> tuple[Any, int]:
    """Return a data loader's batches before accelerate deals them to ranks, and the number of ranks."""
    batches: Any = getattr(loader, "batch_sampler", None)
    if hasattr(batches, "batch_sampler"):
        return batches.batch_sampler, batches.num_processes
    return batches, 1


def refuse_small_share(loader: Any, of: int) -> None:
    """Raise OuterError, before the run is created, for a share that has no row or fills no batch."""
    inner: Any = getattr(batches_of(loader)[0], "sampler", None)
    if of == 1 or not hasattr(inner, "data_source"):
        return
    rows = len(inner.data_source)
    if rows < of:
        raise OuterError(
            f"the dataset has {rows} rows for {of} replicas, so some would have none. Use fewer replicas, or more rows"
        )
    _narrow(part := copy(inner), size := Share(0, 0, of).size(rows))
    if not len(part):
        raise OuterError(
            f"a replica's share of {size} rows does not fill one batch of the trainer. Use fewer replicas, smaller "
            "batches, or more rows"
        )


def used_batches(loader: Any, steps: int, accumulation: int) -> int:
    """Return the batches that `steps` optimizer steps have used.   accumulation: batches per step.

    The last step of a pass uses the rest of the pass, which may be fewer batches."""
    if not _has_length(loader):
        return steps * accumulation
    passes, rest = divmod(steps, max(1, -(-len(loader) // accumulation)))
    return passes * len(loader) + rest * accumulation


def give_share(loader: Any, share: Share, used: int, *, is_alone: bool) -> bool:
    """Make a data loader read this share after the `used` batches of each rank. Return False without a length.

    A single replica, `is_alone`, reads at first the same rows as without a run.
    """
    batches, ranks = batches_of(loader)
    inner = getattr(batches, "sampler", None)
    if inner is None or not hasattr(inner, "data_source"):
        return False
    if used or not is_alone:
        passes, rest = divmod(used, max(1, -(-len(batches) // ranks)))  # the last batch of a pass may have fewer rows
        batches.sampler = ShareSampler(inner, share, passes * len(inner) + rest * batches.batch_size * ranks)
    return True


def skip_used(loader: Any, used: int) -> bool:
    """Make accelerate's loader skip the batches that this slot has used, in the first pass. Return whether it does."""
    if not used or not hasattr(loader, "skip_batches"):
        return False
    loader.skip_batches = used % len(loader) if _has_length(loader) else used
    return True


def unshared_words(loader: Any, *, is_alone: bool, begins_again: bool) -> str:
    """Return the warning about rows that are not dealt to the replicas; "" if it makes no difference."""
    sampler = getattr(batches_of(loader)[0], "sampler", None)
    why = f"{type(sampler).__name__} draws rows by itself" if _has_length(loader) else "the dataset has no length"
    equal = f"all replicas read the same rows in the same order. Shuffle them with a seed from {SLOT}"
    again = "a session that replaces another session begins at the first row again. Use a dataset with a length"
    told = [*([] if is_alone else [equal]), *([again] if begins_again else [])]
    return f"{why}, so {'; and '.join(told)}" if told else ""


def _has_length(loader: Any) -> bool:
    return hasattr(getattr(loader, "dataset", None), "__len__")
