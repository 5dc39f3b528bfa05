"""Pseudogradients and means as bytes, described by the record that names them.

    offer.json ── blob, size, digest ──▶ [ f32 f32 f32 … ]        fp32: the raw little-endian vector, never copied
                                         [ what a codec wrote ]   others: rendezvous/codecs, with error feedback

The record is the header: who has the blob has read the record first, and a blob alone means nothing.
"""

import sys

import numpy as np

from rendezvous.clock import Clock
from rendezvous.codecs import codec
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


class Encoder:
    """One replica's pseudogradients as bodies.   What a body loses stays in the fragment's residual and is sent later.

    A residual lives as long as its replica; after `kill -9` it starts from zero.
    """

    def __init__(self, name: str, *, feedback: bool = True) -> None:
        self.name, self._feedback = name, feedback
        self._residuals: dict[int, np.ndarray] = {}

    def encode(self, fragment: int, delta: np.ndarray) -> np.ndarray:
        """-> the body, as bytes (uint8).  For fp32 it is the vector itself, not a copy."""
        if self.name == "fp32":
            return np.frombuffer(payload(delta), np.uint8)
        kernel = codec(self.name)
        if self._feedback and fragment not in self._residuals:
            self._residuals[fragment] = np.zeros_like(delta)
        body = np.empty(kernel.bound(delta.size), np.uint8)
        return body[: kernel.encode(delta, body, self._residuals.get(fragment))]

    def take_back(self, fragment: int, body: np.ndarray) -> None:
        """That body will never count: what it carried goes into the next one."""
        if self.name != "fp32":
            lost = np.empty_like(self._residuals[fragment])
            codec(self.name).decode(body, lost)
            self._residuals[fragment] += lost


Range = tuple[int, int]  # elements [start, stop)


def grid(elements: int, align: int, least: int) -> list[Range]:
    """The fixed cut of a vector: at most 64 shards of at least `least` elements, at multiples of `align`.

    It depends on the vector alone, never on how many replicas there are.
    """
    size = max(least, -(-elements // 64))
    size = -(-size // align) * align
    return [(at, min(at + size, elements)) for at in range(0, max(elements, 1), size)]


def shard_digests(body: np.ndarray, name: str, ranges: list[Range]) -> tuple[str, ...]:
    """Digest of each shard's bytes; () when there is only one."""
    if len(ranges) < 2:
        return ()
    return tuple(digest(payload(body[slice(*byte_range(name, *r))])) for r in ranges)


def byte_range(name: str, start: int, stop: int) -> Range:
    """Where these elements are in a body."""
    return (4 * start, 4 * stop) if name == "fp32" else codec(name).byte_range(start, stop)


def alignment(name: str) -> int:
    """Elements that a codec writes together."""
    return 1 if name == "fp32" else codec(name).align


def body_size(name: str, elements: int) -> int:
    """Bytes of a body of that many elements."""
    return 4 * elements if name == "fp32" else codec(name).bound(elements)


def fetch(
    store: Store, clock: Clock, key: str, size: int, want: str, out: np.ndarray, start: int = 0, tries: int = 4
) -> str | None:
    """Fill `out` (any dtype, `size` bytes) from byte `start` of `key` and check the digest, re-reading a few times.

    -> None when the bytes are right, else what was wrong with them.
    """
    if out.nbytes != size:
        return f"{key} should have {out.nbytes} bytes here, its record says {size}"
    view, trouble = payload(out), ""
    for attempt in range(tries):
        if attempt:
            clock.sleep(0.02 * 2**attempt)
        if not store.get_into(key, view, start):
            trouble = f"{key} is missing or shorter than {start + size} bytes"
        elif (got := digest(view)) != want:
            trouble = f"{key} has digest {got}, announced was {want}"
        else:
            return None
    return trouble
