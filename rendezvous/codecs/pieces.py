"""What the kernels share: vectors cut into pieces that stay in the cache, and the loops over them.

    encode       for each piece:   s = x + decay·e    rows = pack(s)     e ← s − unpack(rows)
    accumulate   for each piece:   t = unpack(rows)   t ← fl(w·t)        total ← fl(total + t)

Multiplying and adding are separate torch calls, so no CPU fuses them and all replicas get the same bits.
On CUDA a piece is larger, and its rows go through a buffer on the device.

Not promised: speed beside a busy Python thread, because each torch call hands over the GIL.  Encode on the training
thread or in a helper process.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from rendezvous.codecs import Array, Body
from rendezvous.errors import BadDelta, Corrupt

FLT_MAX = float(np.finfo(np.float32).max)
_CPU_PIECE, _CUDA_PIECE = 1 << 19, 1 << 24  # elements; multiples of every codec's align


class Pieces(ABC):
    """A codec that can give a decoded body piece by piece."""

    @abstractmethod
    def decoded(self, body: Body, n: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        """start, stop and elements of each piece; the tensor may be used up."""

    def decode(self, body: Body, out: Array) -> None:
        target = flat(out, "the decoded vector")
        for a, b, piece in self.decoded(body, target.numel(), target.device):
            target[a:b].copy_(piece)

    def accumulate(
        self, body: Body, weight: float, total: Array, first: bool, start: int = 0, stop: int | None = None
    ) -> None:
        """The first term is stored, not added to 0 (0 + −0 would lose a sign)."""
        target, w = flat(total, "the sum")[start:stop], float(np.float32(weight))
        for a, b, piece in self.decoded(body, target.numel(), target.device):
            piece.mul_(w)
            if first:
                target[a:b].copy_(piece)
            else:
                target[a:b].add_(piece)


class Rows(Pieces):
    """A codec whose every `align` elements become one row of `row_bytes`; the last row is padded with zeros."""

    name: str
    align: int
    row_bytes: int
    exact = True
    decay = 1.0

    @abstractmethod
    def pack(self, v: Tensor, rows: Tensor) -> None:
        """(r, align) fp32 -> (r, row_bytes) uint8.  Raises BadDelta for what is not finite."""

    @abstractmethod
    def unpack(self, rows: Tensor, out: Tensor) -> None:
        """(r, row_bytes) uint8 -> (r, align) fp32.  Raises Corrupt for what `pack` never writes."""

    def bound(self, n: int) -> int:
        return -(-n // self.align) * self.row_bytes

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        if start % self.align:
            raise ValueError(f"{self.name} can be cut at multiples of {self.align} elements, not at {start}")
        return self.bound(start), self.bound(stop)

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        v = flat(x, "the pseudogradient")
        e = None if residual is None else flat(residual, "the residual", like=v)
        used = self.bound(v.numel())
        all_rows = room(out, used).view(-1, self.row_bytes)
        t, staged = self._buffers(v.numel(), v.device)
        for a, b in pieces(v.numel(), v.device):
            rows = all_rows[a // self.align : -(-b // self.align)]
            s = v[a:b] if e is None else add_residual(v[a:b], e[a:b], self.decay)
            self._encode_piece(s, rows, staged, t if e is not None else None)
        return used

    def decoded(self, body: Body, n: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        all_rows = bytes_of(body)
        if all_rows.numel() != self.bound(n):
            raise Corrupt(f"{self.name} of {n} elements has {self.bound(n)} bytes, this body has {all_rows.numel()}")
        all_rows, t = all_rows.view(-1, self.row_bytes), self._buffers(n, device)[0]
        for a, b in pieces(n, device):
            rows = all_rows[a // self.align : -(-b // self.align)]
            self.unpack(rows.to(device), t[: len(rows)])
            piece = t[: len(rows)].view(-1)
            if piece[b - a :].any():
                raise Corrupt(f"this {self.name} body has values after its last element, {n}")
            yield a, b, piece[: b - a]

    def _buffers(self, n: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """One piece of decoded rows; one of encoded rows where `out` is on another device."""
        r = -(-min(n, piece_size(device)) // self.align)
        staged = torch.empty(r, self.row_bytes, dtype=torch.uint8, device=device) if device.type != "cpu" else None
        return torch.empty(r, self.align, device=device), staged

    def _encode_piece(self, s: Tensor, rows: Tensor, staged: Tensor | None, t: Tensor | None) -> None:
        """rows <- pack(s); with t, s -= unpack(rows)."""
        near = rows if staged is None else staged[: len(rows)]
        self.pack(padded(s, self.align), near)
        if t is not None:
            self.unpack(near, t[: len(rows)])
            s.sub_(t[: len(rows)].view(-1)[: s.numel()])
        if staged is not None:
            rows.copy_(near)


def pieces(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    size = piece_size(device)
    return ((a, min(a + size, n)) for a in range(0, n, size))


def piece_size(device: torch.device) -> int:
    return _CPU_PIECE if device.type == "cpu" else _CUDA_PIECE


def padded(s: Tensor, align: int) -> Tensor:
    """s as (r, align), with zeros after its end."""
    missing = -s.numel() % align
    return (torch.nn.functional.pad(s, (0, missing)) if missing else s).view(-1, align)


def add_residual(x: Tensor, e: Tensor, decay: float) -> Tensor:
    """e <- x + decay·e"""
    return (e if decay == 1 else e.mul_(decay)).add_(x)


def all_finite(t: Tensor) -> bool:
    """One cheap pass where there is nothing to find: a sum is finite only if all its terms are."""
    return isfinite(float(t.sum())) or bool(t.isfinite().all())


def refuse(v: Tensor) -> BadDelta:
    """What to raise when v is not finite."""
    return BadDelta(
        f"{int((~v.isfinite()).sum())} of {v.numel()} elements around here are not finite, in the pseudogradient or "
        "after its residual was added, so it was not encoded. Lower the inner learning rate or clip gradients; "
        "start again with a residual of zeros"
    )


def tensor_of(array: np.ndarray) -> Tensor:
    """The same memory as a tensor."""
    with warnings.catch_warnings():  # it warns of memory that must not be written to; we only read that
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def flat(array: Array, what: str, like: Tensor | None = None) -> Tensor:
    """A flat, contiguous fp32 tensor over the same memory; as long as `like`, and on its device."""
    contiguous = array.flags.c_contiguous if isinstance(array, np.ndarray) else array.is_contiguous()
    if str(array.dtype).removeprefix("torch.") != "float32" or array.ndim != 1 or not contiguous:
        raise BadDelta(f"{what} is a flat, contiguous fp32 vector; got {array.dtype} of shape {tuple(array.shape)}")
    x = tensor_of(array) if isinstance(array, np.ndarray) else array.detach()
    if like is not None and (x.numel() != like.numel() or x.device != like.device):
        raise BadDelta(f"{what} has {like.numel()} elements on {like.device}; got {x.numel()} on {x.device}")
    return x


def bytes_of(body: Body) -> Tensor:
    """The same memory as flat uint8 on the CPU."""
    return tensor_of(np.frombuffer(body.numpy() if isinstance(body, Tensor) else body, np.uint8))


def room(out: Array, need: int) -> Tensor:
    """The first `need` bytes of a buffer."""
    buffer = bytes_of(out)
    if buffer.numel() < need:
        raise ValueError(f"encoding needs {need} bytes of room, got {buffer.numel()}; ask bound()")
    return buffer[:need]
