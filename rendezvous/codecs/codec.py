"""The interfaces of codecs and kernels, and the types of vectors and bodies.   This module does not import torch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = Union[np.ndarray, "Tensor"]  # flat and contiguous
Ranges: TypeAlias = Sequence[tuple[int, int]]  # of elements, [start, stop)
Body: TypeAlias = Union[bytes, bytearray, memoryview, np.ndarray, "Tensor"]


class Codec(Protocol):
    """A codec without state.  A body holds elements [start, stop) of a vector; `start` is a multiple of `align`.

    align: number of elements that are encoded together; shards are cut at its multiples.
    exact: whether every body of n elements has max_body_size(n) bytes; only then byte_range works.
    ages: whether the codec needs, beside the residual, the number of rounds that each element has waited.
    """

    name: str
    align: int
    exact: bool
    ages: bool

    def max_body_size(self, n: int) -> int:
        """Return the largest number of bytes of a body with n elements."""
        ...

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Return the byte range of the elements [start, stop) in the body.

        stop: a multiple of `align`, or the end of the vector.
        """
        ...

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        """Write x (fp32, any device) into `out` (uint8, CPU).   Return the number of bytes used.

        residual: e, on x's device; updated in place.   theta: the vector from which x will be subtracted, for
        bf16-gate.   Raise BadDelta if a value is not finite.
        """
        ...

    def encode_each(
        self, x: Array, out: Array, ranges: Ranges, residual: Array | None = None, age: Array | None = None
    ) -> Iterator[float]:
        """Encode range after range, for exact codecs.   Yield ‖x‖² of each range as soon as its bytes are written.

        ‖x‖² is summed in fp32, with an error of 1e-5; it is infinite if it exceeds fp32's range.

        age: uint8, rounds since each element was last sent, for codecs with `ages`; updated in place.
        """
        ...

    def decode(self, body: Body, out: Array) -> None:
        """Decode the body into `out` (fp32).   Raise Corrupt for bytes that no encoder wrote."""
        ...

    def accumulate(self, body: Body, weight: float, total: Array, first: bool) -> None:
        """Add fl(weight·decode(body)) to total, or store it there if `first`: 0 + (−0) would lose the sign.

        Raise Corrupt for bytes that no encoder wrote; `total` then has undefined values.
        """
        ...


class Kernels(Protocol):
    """The functions `encode` and `add`, for codecs with rows of a fixed size."""

    def encode(self, name: str, x: "Tensor", e: "Tensor | None", rows: "Tensor") -> float | None:
        """Set rows ← pack(x + e), e ← (x + e) − unpack(rows).   Return ‖x‖², None if a value is not finite."""
        ...

    def add(self, name: str, rows: "Tensor", w: float, target: "Tensor", first: bool) -> bool:
        """Add fl(w·unpack(rows)) to target, or store it there if `first`.

        Return False if no encoder wrote these rows; `target` then has undefined values.
        """
        ...
