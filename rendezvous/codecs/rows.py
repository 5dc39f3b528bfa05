"""Formats in rows: they turn elements into bytes and back with torch's operations alone.

    align elements ──pack_rows──▶ one row of row_bytes ──unpack_rows──▶ align elements

    fp32   x                         the raw little-endian vector
    bf16   bf16(x)                   rounded to nearest even; |x| above bf16's largest, 3.39e38, becomes that number

Symmetric blockwise absmax quantisation: a few bits per element, and one fp32 scale per block.

    scale = max|v| / L        code = round(v / scale) ∈ [−L, L]        decode = fl(scale·code),  |error| ≤ scale/2

    int8, L = 127   ┌ scale ┬ code₀ … code₁₀₂₃ ┐            1028 bytes per 1024 elements
    int4, L = 7     ┌ scale ┬ pair₀ … pair₂₅₅ ┐              260 bytes per  512 elements
                             pairᵢ = codeᵢ + 16·codeᵢ₊₂₅₆, a signed byte; a pair joins the two halves of a block, so
                             that memory is read without a stride

Source: 8-bit optimizers (arXiv 2110.02861), section 2.  In Streaming DiLoCo (2501.18512), 4-bit outer gradients cost no
quality.  pieces.py applies a format to a long vector.  kernels/ does the same arithmetic in one pass, and is compared
with it.

Not promised: residuals, except in `pack_and_subtract`; speed; a bf16 error below 2⁻⁹·|x| for denormals, where
neighbouring values differ by 2⁻¹³³; blocks' values below half of the smallest normal fp32, which become 0; an error of
at most scale/2 to the last bit, because the code is rounded from fl(v·fl(1/scale)).
"""

import threading
from abc import ABC, abstractmethod
from functools import cache
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from rendezvous.errors import BadDelta, Corrupt

FLT_MAX = float(np.finfo(np.float32).max)
SCRATCH = 1 << 19  # maximal number of elements in a thread's reused scratch memory on the CPU
_BF16_MAX = torch.finfo(torch.bfloat16).max
_TINY = torch.finfo(torch.float32).tiny  # 1/scale must not overflow


class RowFormat(ABC):
    """A format that packs every `align` elements into one row of `row_bytes`; zeros fill the last row."""

    name: str
    align: int
    row_bytes: int

    @abstractmethod
    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        """Pack v, (r, align) fp32, into rows, (r, row_bytes) uint8.   Raise BadDelta if a value is not finite."""

    @abstractmethod
    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Unpack rows, (r, row_bytes) uint8, into out, (r, align) fp32.

        Raise Corrupt for rows that `pack_rows` never writes.
        """

    def pack_and_subtract(self, s: Tensor, rows: Tensor, t: Tensor) -> None:
        """Set rows ← pack(s), s ← s − unpack(rows).   t: scratch memory of s's shape."""
        self.pack_rows(s, rows)
        self.unpack_rows(rows, t)
        s.sub_(t)

    def max_body_size(self, n: int) -> int:
        return -(-n // self.align) * self.row_bytes


_own = threading.local()


def scratch_tensor(n: int, device: torch.device, name: str = "") -> Tensor:
    """Return memory for n elements, valid until this thread calls this again with the same name.

    On the CPU it is the same memory every time, up to `SCRATCH` elements, because new memory pages cost more than the
    work.  On CUDA, torch's allocator reuses memory.
    """
    if device.type != "cpu" or n > SCRATCH:
        return torch.empty(n, dtype=torch.float32, device=device)
    kept: dict[str, Tensor] = _own.__dict__
    if name not in kept:
        with torch.inference_mode(False):
            kept[name] = torch.empty(SCRATCH, dtype=torch.float32, device="cpu")
    return kept[name][:n]


def pad_to_rows(s: Tensor, align: int) -> Tensor:
    """Return s in the shape (r, align), with zeros after its last element."""
    missing = -s.numel() % align
    return (torch.nn.functional.pad(s, (0, missing)) if missing else s).view(-1, align)


def all_finite(t: Tensor) -> bool:
    """Whether all elements are finite.  Usually one cheap pass is enough: a finite sum has only finite terms."""
    return isfinite(float(t.sum())) or bool(t.isfinite().all())


def not_finite_error(v: Tensor) -> BadDelta:
    """Return the error for a vector v with elements that are not finite."""
    return BadDelta(
        f"{int((~v.isfinite()).sum())} of {v.numel()} elements in this piece are not finite, in the pseudogradient or "
        "after its residual was added, so it was not encoded. Lower the inner learning rate or clip gradients; "
        "start again with a residual of zeros"
    )


# ---------------------------------------------------------------------- every element separately


class Fp32(RowFormat):
    name = "fp32"
    align = 1
    row_bytes = 4

    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        if not all_finite(v):
            raise not_finite_error(v)
        rows.view(torch.float32).copy_(v)

    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        _copy_finite(out, rows.view(torch.float32), self.name)


class Bf16(RowFormat):
    name = "bf16"
    align = 1
    row_bytes = 2

    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        half = rows.view(torch.bfloat16).copy_(v)
        if not all_finite(half):  # cheaper than a check of v, which has twice the bytes
            if not all_finite(v):
                raise not_finite_error(v)
            half.copy_(v.clamp(-_BF16_MAX, _BF16_MAX))

    def pack_and_subtract(self, s: Tensor, rows: Tensor, t: Tensor) -> None:
        self.pack_rows(s, rows)
        s.sub_(t.copy_(rows.view(torch.bfloat16)))

    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        _copy_finite(out, rows.view(torch.bfloat16), self.name)


def _copy_finite(out: Tensor, values: Tensor, name: str) -> None:
    if not all_finite(values):
        raise Corrupt(f"this {name} body has values that are not finite")
    out.copy_(values)


# ---------------------------------------------------------------------- blocks


class Blocks(RowFormat):
    """Format whose rows have a scale and codes.   levels: the largest code."""

    levels: int

    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        self.write_codes(self._quantise(v, rows, scratch_tensor(v.numel(), v.device).view(v.shape)), rows)

    def pack_and_subtract(self, s: Tensor, rows: Tensor, t: Tensor) -> None:
        self.write_codes(self._quantise(s, rows, t), rows)
        s.sub_(t.mul_(self._read_scales(rows)))

    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        self.read_codes(rows, out)
        scale = self._read_scales(rows)
        least = float(scale.min())
        most = float(scale.max())
        if not (least >= _TINY and most <= largest_scale(self.levels)):
            raise Corrupt(f"this {self.name} body has scales from {least} to {most}, which no encoder writes")
        out.mul_(scale)
        if most * (self.levels + 1) > FLT_MAX and not all_finite(out):  # a code of −levels − 1, which no encoder writes
            raise Corrupt(f"this {self.name} body has values that are not finite")

    @abstractmethod
    def write_codes(self, codes: Tensor, rows: Tensor) -> None:
        """Write the codes, whole numbers in fp32, into the rows.  `codes` must not change."""

    @abstractmethod
    def read_codes(self, rows: Tensor, out: Tensor) -> None:
        """Read the codes from the rows into `out`, the inverse of `write_codes`."""

    def _quantise(self, v: Tensor, rows: Tensor, t: Tensor) -> Tensor:
        """Write the scales into the rows.   Return the codes, whole numbers in [−levels, levels], in t's memory."""
        scale = torch.amax(torch.abs(v, out=t), 1, keepdim=True).div_(self.levels)
        if not float(scale.max()) < float("inf"):  # NaN is found too
            raise not_finite_error(v)
        scale.clamp_(_TINY, largest_scale(self.levels))
        rows.view(torch.float32)[:, :1].copy_(scale)
        return torch.mul(v, scale.reciprocal_(), out=t).round_()

    def _read_scales(self, rows: Tensor) -> Tensor:
        return rows.view(torch.float32)[:, :1].contiguous()


class Int8(Blocks):
    name = "int8"
    align = 1024
    row_bytes = 4 + 1024
    levels = 127

    def write_codes(self, codes: Tensor, rows: Tensor) -> None:
        rows.view(torch.int8)[:, 4:].copy_(codes)

    def read_codes(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows.view(torch.int8)[:, 4:])


class Int4(Blocks):
    name = "int4"
    align = 512
    row_bytes = 4 + 256
    levels = 7

    def write_codes(self, codes: Tensor, rows: Tensor) -> None:
        low, high = codes.chunk(2, dim=1)
        rows.view(torch.int8)[:, 4:].copy_(torch.add(low, high, alpha=16))  # small integers: exact

    def read_codes(self, rows: Tensor, out: Tensor) -> None:
        low, high = out.chunk(2, dim=1)
        pair = rows.view(torch.int8)[:, 4:] + 8
        low.copy_(pair & 15).sub_(8)
        high.copy_(pair >> 4)


@cache
def largest_scale(levels: int) -> float:
    """Return the largest scale with fl(levels·scale) < ∞."""
    return float(np.nextafter(np.float32(FLT_MAX / levels), np.float32(0)))
