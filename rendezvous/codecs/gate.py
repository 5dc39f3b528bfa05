"""Codec that sends an fp32 value only if it changes the bf16 model.  Source: PULSE (arXiv 2602.03839).

    s = x + e        gate = bf16(θ) ≠ bf16(θ − s)        body ∋ s where gate        e ← s where not gate

    per 262,144 elements:   ┌ count u32 ┬ index bytes u32 ┬ count × fp32 ┬ where, padded to 4 bytes ┐

    where   gaps       number of elements skipped before each sent one, in one byte; 255: skip 255, and a byte follows
            bitmap     one bit per element, if the gaps would take as many bytes or more (about 1 change in 8 elements)

In RL about 1 % of a bf16 model changes per step, and a body has about 5 bytes per change.  After a large step a body is
at most 1/32 larger than fp32.

Not promised: byte ranges, because sizes differ; that the mean changes the bf16 model at exactly these elements, because
it is a mean of several bodies.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rendezvous.codecs.codec import Array, Body, Ranges
from rendezvous.codecs.pieces import add_residual, bytes_of, first_bytes, flat_tensor, tensor_of
from rendezvous.codecs.rows import all_finite, not_finite_error
from rendezvous.errors import Corrupt

_BLOCK = 1 << 18
_MORE = 255


class Gate:
    name = "bf16-gate"
    align = _BLOCK
    exact = False
    ages = False

    def max_body_size(self, n: int) -> int:
        return sum(
            8 + 4 * m + _pad_to_four(_bitmap_bytes(m)) for m in (min(_BLOCK, n - a) for a in range(0, n, _BLOCK))
        )

    def byte_range(self, start: int, stop: int) -> tuple[int, int]:
        raise ValueError("bf16-gate bodies differ in size and can only be read whole")

    def encode(self, x: Array, out: Array, residual: Array | None = None, theta: Array | None = None) -> int:
        if theta is None:
            raise ValueError("bf16-gate compares with the model: give theta, the vector that x is subtracted from")
        v = flat_tensor(x, "the pseudogradient")
        model = flat_tensor(theta, "theta", like=v)
        e = None if residual is None else flat_tensor(residual, "the residual", like=v)
        buffer = first_bytes(out, self.max_body_size(v.numel())).numpy()
        used = 0
        for a in range(0, v.numel(), _BLOCK):
            s = v[a : a + _BLOCK] if e is None else add_residual(v[a : a + _BLOCK], e[a : a + _BLOCK], 1.0)
            if not all_finite(s):
                raise not_finite_error(s)
            block = model[a : a + _BLOCK]
            gate = block.bfloat16() != (block - s).bfloat16()
            index = np.flatnonzero(gate.cpu().numpy())
            values = s.index_select(0, tensor_of(index).to(s.device)).cpu().numpy()
            used += _write_block(buffer[used:], index, values, s.numel())
            if e is not None:
                s.masked_fill_(gate, 0)
        return used

    def encode_each(
        self, x: Array, out: Array, ranges: Ranges, residual: Array | None = None, age: Array | None = None
    ) -> Iterator[float]:
        raise ValueError("bf16-gate compares with the model: use encode, with theta")

    def decode(self, body: Body, out: Array) -> None:
        self.accumulate(body, 1.0, out, True)  # fl(1·x) = x

    def accumulate(self, body: Body, weight: float, total: Array, first: bool) -> None:
        target = flat_tensor(total, "the sum")
        w = float(np.float32(weight))
        for a, b, piece in self._decoded_blocks(body, target.numel(), target.device):
            if w != 1:
                piece.mul_(w)
            if first:
                target[a:b].copy_(piece)
            else:
                target[a:b].add_(piece)

    def _decoded_blocks(self, body: Body, n: int, device: torch.device) -> Iterator[tuple[int, int, Tensor]]:
        """Yield start, stop and decoded elements of each block.  The caller may overwrite the tensor."""
        rest = bytes_of(body).numpy()
        t = torch.empty(min(n, _BLOCK), dtype=torch.float32, device="cpu")
        for a in range(0, n, _BLOCK):
            b = min(a + _BLOCK, n)
            index, values, used = _read_block(rest, b - a)
            t.zero_().numpy()[index] = values
            yield a, b, t[: b - a].to(device)
            rest = rest[used:]
        if rest.size:
            raise Corrupt(f"this bf16-gate body has {rest.size} bytes after its last element")


def _write_block(out: np.ndarray, index: np.ndarray, values: np.ndarray, n: int) -> int:
    """Write one block of n elements.   Return the number of bytes used."""
    where = _encode_gaps(index)
    if where.size >= _bitmap_bytes(n):
        where = _to_bitmap(index, n)
    out[:8].view("<u4")[:] = values.size, where.size
    at = 8 + values.nbytes
    out[8:at] = values.view(np.uint8)
    end = at + _pad_to_four(where.size)
    out[at:end] = 0
    out[at : at + where.size] = where
    return end


def _read_block(body: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Read one block of n elements.   Return its indices, its values and the number of bytes used."""
    if body.size < 8:
        raise Corrupt("this bf16-gate body ends inside a header")
    count, where_bytes = (int(k) for k in body[:8].view("<u4"))
    at = 8 + 4 * count
    end = at + _pad_to_four(where_bytes)
    if count > n or where_bytes > _bitmap_bytes(n) or end > body.size:
        raise Corrupt(f"this bf16-gate body is shorter than its {count} changes and {where_bytes} index bytes")
    where = body[at : at + where_bytes]
    is_bitmap = where_bytes == _bitmap_bytes(n)
    index = np.flatnonzero(np.unpackbits(where, bitorder="little")) if is_bitmap else _from_gaps(where)
    values = body[8:at].view("<f4")
    if index.size != count or (count and index[-1] >= n) or not np.isfinite(values).all():
        raise Corrupt(
            f"this bf16-gate body has {index.size} indices for {count} changes in {n} elements, or bad values"
        )
    return index, values, end


def _encode_gaps(index: np.ndarray) -> np.ndarray:
    """Encode indices as gaps: [3, 4, 700] -> 3 0 255 255 185."""
    skipped = np.diff(index, prepend=-1) - 1
    ends = np.cumsum(skipped // _MORE + 1) - 1
    coded = np.full(ends[-1] + 1 if ends.size else 0, _MORE, np.uint8)
    coded[ends] = skipped % _MORE
    return coded


def _from_gaps(coded: np.ndarray) -> np.ndarray:
    ends = np.flatnonzero(coded != _MORE)
    if coded.size and coded[-1] == _MORE:
        raise Corrupt("this bf16-gate body ends inside a gap")
    return np.cumsum(coded, dtype=np.int64)[ends] + np.arange(ends.size)


def _to_bitmap(index: np.ndarray, n: int) -> np.ndarray:
    bits = np.zeros(n, np.uint8)
    bits[index] = 1
    return np.packbits(bits, bitorder="little")


def _bitmap_bytes(n: int) -> int:
    return -(-n // 8)


def _pad_to_four(n: int) -> int:
    return -(-n // 4) * 4
