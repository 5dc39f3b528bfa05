"""The interface of a codec, and the types of vectors and bodies.   Free of torch."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Array: TypeAlias = Union[np.ndarray, "Tensor"]  # flat and contiguous
Body: TypeAlias = Union[bytes, bytearray, memoryview, np.ndarray, "Tensor"]


class Codec(Protocol):
    """Stateless.  A body holds some elements [start, stop) of a vector; `start` is a multiple of `align`.

    align: elements that are encoded together; shards are cut at multiples of it.
    exact: every body of n elements has max_body_size(n) bytes, and byte_range works.
    ages: beside a residual it needs to know how long each element has waited.
    """

    name: str
    align: int
    exact: bool
    ages: bool

    def max_body_size(self, n: int) -> int:
        """Bytes that suffice for n elements."""
        ...

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Byte range of the elements [start, stop) in the body; `stop` is aligned or the end of the vector."""
        ...

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        """Write x (fp32, any device) into `out` (uint8, CPU); -> bytes used.

        residual: e, updated in place, on x's device.   theta: the vector that x will be subtracted from, for bf16-gate.
        Raises BadDelta for values that are not finite.
        """
        ...

    def encode_each(
        self,
        x: Array,
        out: Array,
        ranges: Sequence[tuple[int, int]],
        residual: Array | None = None,
        age: Array | None = None,
    ) -> Iterator[float]:
        """Encode range after range, for exact codecs; -> ‖x‖² of each range as soon as its bytes are written.

        ‖x‖² is summed in fp32 (to 1e-5; infinite where x is too long for that).

        age: uint8, rounds since each element was last sent, updated in place, for codecs with `ages`.
        """
        ...

    def decode(self, body: Body, out: Array) -> None:
        """Fill `out` (fp32).  Raises Corrupt for bytes that no encoder wrote."""
        ...

    def accumulate(
        self, body: Body, weight: float, total: Array, first: bool, start: int = 0, stop: int | None = None
    ) -> None:
        """Add fl(weight·decode(body)) to total[start:stop]; `first` stores instead.  After Corrupt `total` is waste."""
        ...
