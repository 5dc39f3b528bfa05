"""Symmetric blockwise absmax quantisation: a few bits per element, and one fp32 scale per block.

    scale = max|v| / L        code = round(v / scale) ∈ [−L, L]        decode = fl(scale·code),  |error| ≤ scale/2

    int8, L = 127   ┌ scale ┬ code₀ … code₁₀₂₃ ┐            1028 bytes per 1024 elements
    int4, L = 7     ┌ scale ┬ pair₀ … pair₂₅₅ ┐              260 bytes per  512 elements
                             pairᵢ = codeᵢ + 16·codeᵢ₊₂₅₆, a signed byte; a pair joins the two halves of a block, so
                             that memory is read without a stride

Source: 8-bit optimizers (arXiv 2110.02861), section 2.  In Streaming DiLoCo (2501.18512), 4-bit outer gradients cost no
quality.

Not promised: values below half of the smallest normal fp32, which become 0; an error of at most scale/2 to the last
bit, because the code is rounded from fl(v·fl(1/scale)).
"""

from abc import abstractmethod
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rendezvous.codecs.rows import FLT_MAX, RowFormat, all_finite, not_finite_error, scratch_tensor
from rendezvous.errors import Corrupt

_TINY = torch.finfo(torch.float32).tiny  # 1/scale must not overflow


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
            raise Corrupt(f"this {self.name} body has scales from {least} to {most}")
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
