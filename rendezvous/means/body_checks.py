"""Checks of the bodies that a commit lists.  Every reader leaves out a body that no encoder could have written.

    Σ of all listed ── finite ───────────────────────────────▶ ÷ Σ weights                   the usual case
         │ not finite, or bytes that cannot be decoded
         ▼
    in each shard of the fixed grid:   Σ of the valid bodies ÷ Σ of their weights
                                       0 for an element that still overflows, and in a shard without a valid body

A body is valid if its bytes decode and every value is finite.  A body is left out before this check if, by its record,
its length or its number of shards differs from the fragment's.

The result depends only on the commit and on bytes with the announced digests.  So all replicas leave out the same
bodies, however many shards they fetch at a time.  A sum is finite only if all its terms are, so usually no body is
checked separately.

Not promised: a check of values that are finite but wrong.
"""

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.errors import Corrupt

_CHUNK = 1 << 16  # elements: so many stay in the cache between their division and their check


def is_valid_body(name: str, body: np.ndarray, elements: int) -> bool:
    """Whether an encoder could have written these bytes.   name: of the codec."""
    if name == "fp32":
        return bool(np.isfinite(body.view(np.float32)).all())
    out = np.empty(elements, np.float32)
    try:
        get_codec(name).decode(body, out)
    except Corrupt:
        return False
    return bool(np.isfinite(out).all())


def divide_by_weight(total: np.ndarray, weight: np.float32) -> bool:
    """Set total ← total/weight.   Return whether the sums of its squares are finite.

    So True means that all elements are finite; False may also mean that they are very large.
    """
    whole = True
    with np.errstate(all="ignore"):
        for at in range(0, total.size, _CHUNK):
            piece = total[at : at + _CHUNK]
            np.divide(piece, weight, out=piece)
            whole = whole and bool(np.isfinite(np.dot(piece, piece)))
    return whole


def zero_non_finite(total: np.ndarray) -> None:
    """Set every element that is not finite to 0."""
    np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
