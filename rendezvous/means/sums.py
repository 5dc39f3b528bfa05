"""The weighted sum of fp32 bodies and its division, in numpy: without the C kernels, or with a body that is poisoned.

    total = ( fl(w₁·x₁) + fl(w₂·x₂) + … ) / fl(Σ wᵢ)        each operation rounded to fp32, as the kernels do

Not promised: the speed of the kernels.
"""

import numpy as np

_CHUNK = 1 << 16  # elements: two fp32 chunks fit into the cache, so a quotient is still there when it is checked


def accumulate(total: np.ndarray, x: np.ndarray, weight: float, *, first: bool) -> None:
    """Add fl(weight·x) to total, in cache-sized pieces.

    The first term is stored, not added to 0 (0 + −0 would lose a sign); fl(1·x) is x.
    """
    w = np.float32(weight)
    scratch = np.empty(min(total.size, _CHUNK), np.float32)
    for at in range(0, total.size, _CHUNK):
        piece = x[at : at + _CHUNK]
        target = total[at : at + _CHUNK]
        if first:
            np.multiply(piece, w, out=target)
        elif w == 1:
            np.add(target, piece, out=target)
        else:
            np.add(target, np.multiply(piece, w, out=scratch[: piece.size]), out=target)


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
