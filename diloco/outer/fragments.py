"""The cuts of a model's flat vector into fragments.

    sizes of parameters    w₀ │ w₁ │ w₂ ┊ w₃ │ w₄        in flat order; a parameter is never cut
    F = 2                  [ ─────────── ] [ ─────── ]   about equal numbers of elements

This file does not import torch.   Not promised: equal fragments, as one parameter may be large.
"""

from collections.abc import Sequence

from diloco.run.config import OuterError


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[slice]:
    """Cut consecutive parameters into `fragments` slices of about equal numbers of elements."""
    if fragments > len(sizes):
        raise OuterError(f"{fragments} fragments cannot be cut from {len(sizes)} trainable parameters; use fewer")
    parts: list[slice] = []
    at = 0
    left = sum(sizes)
    for remaining in range(fragments, 0, -1):
        goal = left / remaining
        to = at + 1
        size = sizes[at]
        while to <= len(sizes) - remaining and (remaining == 1 or size + sizes[to] / 2 <= goal):
            size = size + sizes[to]
            to = to + 1
        parts.append(slice(at, to))
        at = to
        left = left - size
    return parts
