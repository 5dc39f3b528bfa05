"""Draw a whole curve in one line of text, as means of buckets.

    200 values, 24 columns ──▶ means of 8 or 9 neighbours each ──▶ ▁▂▅▇████████

    scale    from the lowest mean up to the highest one, and at least NOISE · median |a − 2b + c| of three neighbours:
             noise fills at most half of the height, and a straight line fills all of it

Not promised: the height of a single value, because it is averaged with its neighbours.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

LEVELS = "▁▂▃▄▅▆▇█"
NOISE = 5.0  # for noise with deviation σ, the median is 1.65 σ, so the scale has 8 σ
FEW = 8  # with fewer values, noise is not estimated


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Draw values in at most `width` characters.   values: one per step, None for an unread step."""
    means = squeezed(values, width)
    if not means:
        return ""
    low = min(means)
    span = max(max(means) - low, _noise(means))
    return "".join(LEVELS[int(7.99 * (v - low) / span) if span > 0 else 0] for v in means)


def squeezed(values: Sequence[float | None], width: int) -> list[float]:
    """Reduce to at most `width` values: means of known neighbours."""
    if len(values) <= width:
        return [v for v in values if v is not None]
    bounds = [len(values) * i // width for i in range(width + 1)]
    buckets = ([v for v in values[start:end] if v is not None] for start, end in pairwise(bounds))
    return [fmean(bucket) for bucket in buckets if bucket]


def _noise(means: Sequence[float]) -> float:
    if len(means) < FEW:
        return 0.0
    return NOISE * median(abs(a - 2 * b + c) for a, b, c in zip(means, means[1:], means[2:], strict=False))
