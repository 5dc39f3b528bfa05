"""DAPO's dynamic sampling: replace groups with equal rewards, because they teach nothing.

    generate  [g0 ✓][g1 all right][g2 ✓][g3 all wrong]                   ✓: rewards differ
    again     two more prompts, [g4 ✓][g5 all wrong]; one more, …        at most `tries` further generations
    train     [g0][g2][g4][g1]                                           a group without a replacement has advantage 0

The test is exact: equal rewards in a group give bit-equal advantages. arXiv 2503.14476, eq. (11).

The metrics are those of the first generation.  A mean that included refills would not be the data's mean: refills
differ in size, and there are more refills if more groups have equal rewards.

Not promised: image inputs; several processes; with scale_rewards = "batch", the standard deviation of the final batch,
because each generation is scaled by its own standard deviation.
"""

from collections.abc import Callable
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from inner.data.order import Share, prompt_order

Batch = dict[str, Any]  # TRL's: tensors and lists (one entry per rollout), and scalars
REFILLS = 2**64  # added to the data seed, so that refills use another order of prompts than any data seed gives


def refilled(trainer: Any, batch: Batch) -> Batch:
    """Return the batch of a trainer's generation, with its refills, and record the number of refills.

    Prompts are a function of (share, generation): each generation reserves as many positions as it can need."""
    group, tries, rows = trainer.args.num_generations, trainer.dynamic_sampling, trainer.train_dataset
    groups = len(batch["advantages"]) // group
    generation = trainer._step // (trainer.args.steps_per_generation * trainer.num_iterations)
    positions = count(generation * groups * tries)
    at = prompt_order(len(rows), (trainer.share or Share(0)).salted(REFILLS))

    def sample_more(n: int) -> Batch:
        return trainer._generate_rollouts([rows[at(i)] for i in islice(positions, n) for _ in range(group)])

    counts = trainer._metric_counts()
    batch, informative, more = refill_groups(batch, sample_more, group, tries)
    trainer._forget_metrics(counts)
    trainer._record_metric("dynamic/informative", informative / groups)
    trainer._record_metric("dynamic/generations", more)
    return batch


def informative_groups(batch: Batch, group: int) -> list[int]:
    """Return the groups whose rollouts differ in advantage. Advantages are (B,), or (B, T) per token."""
    advantages_G_K = batch["advantages"].unflatten(0, (-1, group))
    return (advantages_G_K != advantages_G_K[:, :1]).flatten(1).any(1).nonzero().flatten().tolist()


def refill_groups(batch: Batch, sample_more: Callable[[int], Batch], group: int, tries: int) -> tuple[Batch, int, int]:
    """Replace groups with equal rewards; return batch, number of informative groups, number of further generations.

    sample_more(n): generates n groups of new prompts."""
    desired = len(batch["advantages"]) // group
    parts = [batch]
    chosen = [(0, g) for g in informative_groups(batch, group)]
    silent = [(0, g) for g in range(desired) if (0, g) not in chosen]
    while len(chosen) < desired and len(parts) <= tries:
        parts.append(sample_more(desired - len(chosen)))
        chosen += [(len(parts) - 1, g) for g in informative_groups(parts[-1], group)]
    if len(parts) == 1:
        return batch, len(chosen), 0
    good = len(chosen)
    chosen += silent[: desired - good]
    return join_groups(parts, chosen, group), good, len(parts) - 1


def join_groups(parts: list[Batch], chosen: list[tuple[int, int]], group: int) -> Batch:
    """Join the chosen (part, group)s to one batch, in that order."""
    rows = [(part, g * group + k) for part, g in chosen for k in range(group)]
    joined = {key: _pick_rows(key, [part[key] for part in parts], rows) for key in parts[0]}
    mask = joined["completion_mask"]
    joined["num_items_in_batch"] = (mask * joined["tool_mask"] if "tool_mask" in joined else mask).sum()
    return joined


def _pick_rows(key: str, values: list[Any], rows: list[tuple[int, int]]) -> Any:
    if isinstance(values[0], list):
        return [values[part][row] for part, row in rows]
    if values[0].dim() == 0:
        return values[0]
    if values[0].dim() == 1:
        return torch.stack([values[part][row] for part, row in rows])
    width = max(value.size(1) for value in values)
    padded = [_pad_to_width(value, width, left=key.startswith("prompt")) for value in values]
    return torch.stack([padded[part][row] for part, row in rows])


def _pad_to_width(value_B_T: Tensor, width: int, left: bool) -> Tensor:
    """Pad with any id: padding is masked."""
    padding = width - value_B_T.size(1)
    return torch.nn.functional.pad(value_B_T, (padding, 0) if left else (0, padding))
