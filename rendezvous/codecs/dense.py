"""Codecs that encode every element separately.

    fp32   body = x                  the raw little-endian vector
    bf16   body = bf16(x)            rounded to nearest even; |x| above bf16's largest, 3.39e38, becomes that number

Not promised: a bf16 error below 2⁻⁹·|x| for denormals, where neighbouring values differ by 2⁻¹³³.
"""

import torch
from torch import Tensor

from rendezvous.codecs.rows import RowFormat, all_finite, not_finite_error
from rendezvous.errors import Corrupt

_BF16_MAX = torch.finfo(torch.bfloat16).max


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
