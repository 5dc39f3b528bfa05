"""Checks of the bodies that a commit lists.  A body that no encoder writes counts for nothing, with every reader.

    Σ of all listed ── finite ───────────────────────────────▶ ÷ Σ weights                   the rule of every day
         │ not finite, or bytes that cannot be decoded
         ▼
    in each shard of the fixed grid:   Σ of the sound ones ÷ Σ of their weights;   what still overflows, or has none: 0

A body is sound if its bytes decode and every value is finite.  A body whose record has another length
than the fragment's bodies, or another number of shards, is left out before this check.

It depends on the commit and on bytes with their announced digests, so all replicas leave out the same, however many
shards they fetch at a time.  A sum is finite only if all its terms are: on a good day no body is looked at twice.

Not promised: anything about values that are finite but wrong.
"""

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.errors import Corrupt

_CHUNK = 1 << 16  # elements: a piece of it stays in the cache between its division and its check


def is_valid_body(name: str, body: np.ndarray, elements: int) -> bool:
    """Whether an encoder could have written these bytes."""
    if name == "fp32":
        return bool(np.isfinite(body.view(np.float32)).all())
    out = np.empty(elements, np.float32)
    try:
        get_codec(name).decode(body, out)
    except Corrupt:
        return False
    return bool(np.isfinite(out).all())


def divide_by_weight(total: np.ndarray, weight: np.float32) -> bool:
    """Set total ← total/weight; -> whether the sums of its squares are finite, never True where an element is not."""
    whole = True
    with np.errstate(all="ignore"):
        for at in range(0, total.size, _CHUNK):
            piece = total[at : at + _CHUNK]
            np.divide(piece, weight, out=piece)
            whole = whole and bool(np.isfinite(np.dot(piece, piece)))
    return whole


def zero_non_finite(total: np.ndarray) -> None:
    """Set every element that is not finite to 0, so that it moves nothing."""
    np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
