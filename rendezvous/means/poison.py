"""How a mean treats bodies that no encoder writes, and sums that are not finite.

    a body is poisoned ──▶ the mean is made again, of the others (reduce.py)     a sum overflows ──▶ its elements are 0

Not promised: a wrong body with finite values; no reader can tell such a body from a right one.
"""

import numpy as np

from rendezvous.codecs import get_codec
from rendezvous.errors import Corrupt


def is_valid_body(name: str, body: np.ndarray, elements: int) -> bool:
    """Whether an encoder could have written these bytes.   name: the codec's name."""
    if name == "fp32":
        return bool(np.isfinite(body.view(np.float32)).all())
    out = np.empty(elements, np.float32)
    try:
        get_codec(name).decode(body, out)
    except Corrupt:
        return False
    return bool(np.isfinite(out).all())


def zero_non_finite(total: np.ndarray) -> None:
    """Set every element that is not finite to 0."""
    np.nan_to_num(total, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
