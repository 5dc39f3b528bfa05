"""Pseudogradients as fewer bytes.

                     s = x + decay·e
    x, e (fp32) ─────────────────────▶ encode(s) ─▶ body ─▶ total += fl(w·decode(body))     same bits for every reader
           ▲                               │
           └── e ← s − decode(encode(s)) ──┘

    name        bytes per element     what is lost                                    from
    fp32        4                     nothing
    bf16        2                     the lower 16 bits                               dense.py
    int8        1   + 4 per 1024      at most half a step of absmax/127 per block     blocks.py
    int4        1/2 + 4 per 512       at most half a step of absmax/7 per block       blocks.py
    topk        3 per 64 + 4 per 8192  all but the 3 largest of 64; those keep 2 bits  topk.py   SparseLoCo, 2508.15706
    bf16-gate   4 + ~1 per change     what the bf16 model would not show              gate.py   PULSE, 2602.03839

The loss stays in the residual e and is sent later (error feedback), so over time the decoded values add up to the
inputs.  A reader of a body has read the record that names it: codec, length and digest are there and not in here.
This file and `choose` are free of torch; the kernels come with the first `get_codec(name)`.

Not promised: equal bodies from different machines (only equal decoding); anything under
`torch.set_flush_denormal(True)`; a residual worth keeping after a refused `encode`.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, TypeAlias, Union

import numpy as np

from rendezvous.codecs.choose import DENSE, NAMES, choose_codec, nominal_ratio

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DENSE", "NAMES", "Array", "Body", "Codec", "choose_codec", "get_codec", "nominal_ratio"]

Array: TypeAlias = Union[np.ndarray, "Tensor"]  # flat and contiguous
Body: TypeAlias = Union[bytes, bytearray, memoryview, np.ndarray, "Tensor"]


class Codec(Protocol):
    """Stateless.  A body holds some elements [start, stop) of a vector; `start` is a multiple of `align`.

    align: elements that are encoded together; shards are cut at multiples of it.
    exact: every body of n elements has max_body_size(n) bytes, and byte_range works.
    ages: beside a residual it wants to know how long each element has waited.
    """

    name: str
    align: int
    exact: bool
    ages: bool

    def max_body_size(self, n: int) -> int:
        """Bytes that suffice for n elements."""
        ...

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        """Where the elements [start, stop) are in the body; `stop` is aligned or the end of the vector."""
        ...

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        """Write x (fp32, any device) into `out` (uint8, CPU); -> bytes used.

        residual: e, updated in place, on x's device.   theta: what x will be subtracted from, for bf16-gate.
        Raises BadDelta for what is not finite.
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
        """The same, for exact codecs, these elements after those; each time their bytes are there, their ‖x‖² as fp32
        tells it (to 1e-5; infinite where x is too long for that).

        age: uint8, rounds since each element was last sent, updated in place, for codecs with `ages`.
        """
        ...

    def decode(self, body: Body, out: Array) -> None:
        """Fill `out` (fp32).  Raises Corrupt for bytes that no encoder wrote."""
        ...

    def accumulate(
        self, body: Body, weight: float, total: Array, first: bool, start: int = 0, stop: int | None = None
    ) -> None:
        """total[start:stop] += fl(weight·decode(body)); `first` stores instead.  After Corrupt, `total` is waste."""
        ...


@cache
def get_codec(name: str) -> Codec:
    """The codec of that name."""
    codecs = _all_codecs()
    if name not in codecs:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(codecs)}, and auto")
    return codecs[name]


@cache
def _all_codecs() -> dict[str, Codec]:
    from rendezvous.codecs import blocks, dense, gate, topk

    return {
        "fp32": dense.Fp32(),
        "bf16": dense.Bf16(),
        "int8": blocks.Int8(),
        "int4": blocks.Int4(),
        "topk": topk.TopK(),
        "bf16-gate": gate.Gate(),
    }
