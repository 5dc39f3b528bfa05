"""Pseudogradients and means as bytes: the raw little-endian fp32 vector, described by the record that names it.

    offer.json ── blob, size, digest ──▶ [ f32 f32 f32 … ]

The record is the header: who has the blob has read the record first, and a blob alone means nothing.
"""

import sys

import numpy as np

from rendezvous.clock import Clock
from rendezvous.errors import BadDelta
from rendezvous.records import digest
from rendezvous.store import Store

assert sys.byteorder == "little", "blobs are little-endian fp32"


def payload(vector: np.ndarray) -> memoryview:
    """The bytes of a contiguous vector, without a copy."""
    if vector.size == 0:
        return memoryview(bytearray())  # memoryview cannot cast an empty array
    return np.ascontiguousarray(vector).data.cast("B")


def checked_norm(delta: np.ndarray, size: int) -> float:
    """‖Δ‖₂; refuses what must never reach the others.   size: what it should be, 0 if that is not known."""
    if delta.dtype != np.float32 or delta.shape != (size or delta.size,):
        raise BadDelta(
            f"the pseudogradient of this fragment is a flat fp32 vector of {size or 'any'} elements, got {delta.dtype} "
            f"of shape {delta.shape}; it was not offered"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(delta, delta))
    if not np.isfinite(square):
        square = float(np.sum(np.square(delta, dtype=np.float64)))
    if not np.isfinite(square):
        bad = int(np.count_nonzero(~np.isfinite(delta)))
        raise BadDelta(
            f"{bad} of {delta.size} elements of the pseudogradient are not finite, so it was not offered. "
            "Lower the inner learning rate or clip gradients; the run goes on from the last outer step"
        )
    return square**0.5


def fetch(store: Store, clock: Clock, key: str, size: int, want: str, out: np.ndarray, tries: int = 4) -> str | None:
    """Fill `out` (any dtype, `size` bytes) from `key` and check the digest, re-reading a few times.

    -> None when the bytes are right, else what was wrong with them.
    """
    if out.nbytes != size:
        return f"{key} should have {out.nbytes} bytes for this layout, its record says {size}"
    view, trouble = payload(out), ""
    for attempt in range(tries):
        if attempt:
            clock.sleep(0.02 * 2**attempt)
        if not store.get_into(key, view):
            trouble = f"{key} is missing or shorter than {size} bytes"
        elif (got := digest(view)) != want:
            trouble = f"{key} has digest {got}, announced was {want}"
        else:
            return None
    return trouble
