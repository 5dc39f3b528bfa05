"""A few bits per element and one fp32 scale per block: blockwise absmax quantisation, symmetric.

    scale = max|v| / L        code = round(v / scale) ∈ [−L, L]        decode = fl(scale·code),  |error| ≤ scale/2

    int8, L = 127   ┌ scale ┬ code₀ … code₁₀₂₃ ┐            1028 bytes per 1024 elements
    int4, L = 7     ┌ scale ┬ pair₀ … pair₂₅₅ ┐              260 bytes per  512 elements
                             pairᵢ = codeᵢ + 16·codeᵢ₊₂₅₆, a signed byte; halves, so nothing has a stride

8-bit optimizers (arXiv 2110.02861), section 2; 4-bit outer gradients cost nothing in Streaming DiLoCo (2501.18512).

Not promised: anything about values below half of the smallest normal fp32 (they become 0), nor scale/2 to the last
bit: the code is rounded from fl(v·fl(1/scale)).
"""

import numpy as np
import torch
from torch import Tensor

from rendezvous.codecs.pieces import FLT_MAX, Rows, all_finite, refuse
from rendezvous.errors import Corrupt

_TINY = torch.finfo(torch.float32).tiny  # 1/scale must not overflow


class Int8(Rows):
    name, align, row_bytes = "int8", 1024, 4 + 1024
    levels = 127

    def pack(self, v: Tensor, rows: Tensor) -> None:
        rows.view(torch.int8)[:, 4:].copy_(_codes(v, rows, self.levels))

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        out.copy_(rows.view(torch.int8)[:, 4:])
        _rescale(out, rows, self.levels, self.name)


class Int4(Rows):
    name, align, row_bytes = "int4", 512, 4 + 256
    levels = 7

    def pack(self, v: Tensor, rows: Tensor) -> None:
        low, high = _codes(v, rows, self.levels).chunk(2, dim=1)
        rows.view(torch.int8)[:, 4:].copy_(low.add_(high, alpha=16))  # small integers: exact

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        low, high = out.chunk(2, dim=1)
        pair = rows.view(torch.int8)[:, 4:] + 8
        low.copy_(pair & 15).sub_(8)
        high.copy_(pair >> 4)
        _rescale(out, rows, self.levels, self.name)


def _codes(v: Tensor, rows: Tensor, levels: int) -> Tensor:
    """Write the scales; -> whole numbers in [−levels, levels], as fp32."""
    t = torch.abs(v)
    scale = torch.amax(t, 1, keepdim=True).div_(levels)
    if not float(scale.max()) < float("inf"):  # NaN is found too
        raise refuse(v)
    scale.clamp_(_TINY, _largest(levels))
    rows.view(torch.float32)[:, :1].copy_(scale)
    return torch.mul(v, scale.reciprocal_(), out=t).round_()


def _rescale(out: Tensor, rows: Tensor, levels: int, name: str) -> None:
    """out *= scale"""
    scale = rows.view(torch.float32)[:, :1].contiguous()
    least, most = float(scale.min()), float(scale.max())
    if not (least >= _TINY and most <= _largest(levels)):
        raise Corrupt(f"this {name} body has scales from {least} to {most}")
    out.mul_(scale)
    if most * (levels + 1) > FLT_MAX and not all_finite(out):  # a code of −levels − 1, which nobody writes
        raise Corrupt(f"this {name} body has values that are not finite")


def _largest(levels: int) -> float:
    """The largest scale with fl(levels·scale) < ∞."""
    return float(np.nextafter(np.float32(FLT_MAX / levels), np.float32(0)))
