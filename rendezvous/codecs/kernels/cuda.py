# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton kernels for the blockwise codecs on CUDA: each element is read once and written once.

                 one program per row
    x, e ─▶ s = x + e ─▶ scale, codes ─▶ rows        rows ─▶ v = fl(scale·code) ─▶ total += fl(w·v)
       e ◀── s − fl(scale·code)

The arithmetic is that of rows.py, operation by operation: no fused multiply-add, and division rounded as in IEEE 754.
So bodies, residuals and decoded values have the same bits as on a CPU.  rows.py shows the formats.

Not promised: kernels without Triton; torch's operations then do the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rendezvous.codecs.rows import largest_scale

_LEVELS = {"int8": 127, "int4": 7}
_PER_ROW = {"int8": 1024, "int4": 512}


def encode(name: str, x: Tensor, e: Tensor | None, rows: Tensor) -> float | None:
    """Set rows ← pack(x + e), e ← (x + e) − unpack(rows).   Return ‖x‖², None if a value is not finite."""
    bad = torch.zeros(1, dtype=torch.int32, device=x.device)
    squares = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    _encode[(len(rows),)](
        x, x if e is None else e, rows.view(torch.int8), rows.view(torch.float32), bad, squares, x.numel(),
        _LEVELS[name], _largest_scale(name), e is not None, name == "int4", _PER_ROW[name],
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return None if bad.item() else float(squares.double().sum())


def add(name: str, rows: Tensor, w: float, target: Tensor, first: bool) -> bool:
    """Add fl(w·unpack(rows)) to target, or store it there if `first`.

    Return False if no encoder wrote these rows; `target` then has undefined values.
    """
    bad = torch.zeros(1, dtype=torch.int32, device=target.device)
    _add[(len(rows),)](
        rows.view(torch.int8), rows.view(torch.float32), target, bad, w, target.numel(),
        _largest_scale(name), first, name == "int4", _PER_ROW[name],
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return not bad.item()


def _largest_scale(name: str) -> float:
    return largest_scale(_LEVELS[name])


@triton.jit
def _is_finite(v):
    return (v.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _peak_bits(v):
    """Return the bits of max|v|; in their integer order, NaN is above infinity."""
    return tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)


@triton.jit
def _round_to_even(v):
    """Round to nearest even, for |v| < 2²²."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def _load_sum(x, e, at, n, feedback: tl.constexpr):
    """Return x + e (x without feedback), and the sum of x's squares."""
    v = tl.load(x + at, mask=at < n, other=0.0)
    s = v
    if feedback:
        s = tl.load(e + at, mask=at < n, other=0.0) + v
    return s, tl.sum(v * v, axis=0)


@triton.jit
def _encode(
    x, e, codes, scales, bad, squares, n, levels: tl.constexpr, most: tl.constexpr,
    feedback: tl.constexpr, halves: tl.constexpr, per_row: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = per_row // 2 if halves else per_row
    row = tl.program_id(0).to(tl.int64)
    place = row * (4 + width) + 4 + tl.arange(0, width)
    at = row * per_row + tl.arange(0, width)
    s, square = _load_sum(x, e, at, n, feedback)
    bits = _peak_bits(s)
    if halves:
        high, rest = _load_sum(x, e, at + width, n, feedback)
        bits = tl.maximum(bits, _peak_bits(high))
        square += rest
    tl.store(squares + row, square)
    whole = bits < 0x7F800000
    tl.store(bad, 1, mask=bits >= 0x7F800000)
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), levels * 1.0)
    scale = tl.minimum(tl.maximum(scale, 1.1754943508222875e-38), most)
    tl.store(scales + row * ((4 + width) // 4), scale)
    inverse = tl.div_rn(1.0, scale)
    code = _round_to_even(s * inverse)
    if feedback:
        tl.store(e + at, tl.where(whole, s - code * scale, s), mask=at < n)
    if halves:
        above = _round_to_even(high * inverse)
        if feedback:
            tl.store(e + at + width, tl.where(whole, high - above * scale, high), mask=at + width < n)
        code += above * 16
    tl.store(codes + place, code.to(tl.int32).to(tl.int8))


@triton.jit
def _put(target, at, v, w, n, first: tl.constexpr):
    """Add w·v to target, or store it if `first`.   Return how many values are not finite, or nonzero after the end."""
    wrong = tl.sum(tl.where((at < n) & _is_finite(v) | (v == 0), 0, 1), axis=0)
    v = v * w
    if not first:
        v = tl.load(target + at, mask=at < n, other=0.0) + v
    tl.store(target + at, v, mask=at < n)
    return wrong


@triton.jit
def _add(
    codes, scales, target, bad, w, n, most: tl.constexpr,
    first: tl.constexpr, halves: tl.constexpr, per_row: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = per_row // 2 if halves else per_row
    row = tl.program_id(0).to(tl.int64)
    code = tl.load(codes + row * (4 + width) + 4 + tl.arange(0, width)).to(tl.int32)
    scale = tl.load(scales + row * ((4 + width) // 4))
    at = row * per_row + tl.arange(0, width)
    if halves:
        low = ((code + 8) & 15) - 8
        wrong = _put(target, at + width, ((code - low) >> 4).to(tl.float32) * scale, w, n, first)
        wrong += _put(target, at, low.to(tl.float32) * scale, w, n, first)
    else:
        wrong = _put(target, at, code.to(tl.float32) * scale, w, n, first)
    tl.store(bad, 1, mask=(wrong > 0) | ~((scale >= 1.1754943508222875e-38) & (scale <= most)))
