"""The cuts of a model's flat vector into fragments.

    sizes of parameters    w₀ │ w₁ │ w₂ ┊ w₃ │ w₄        in flat order; a parameter is never torn
    F = 2                  [ ─────────── ] [ ─────── ]   about equal numbers of elements

No torch here.   Not promised: equal fragments; one parameter may be large.
"""

from collections.abc import Sequence

from diloco.run.config import OuterError


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[slice]:
    """`fragments` runs of consecutive parameters with about equal numbers of elements."""
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
