"""Patches: the changed bf16 values of a flat vector, as bytes.

    θ (fp32) ── nearest, ties to even ──▶ 16 bits each ── ≠ before ──▶ positions, new values
    chunk of 2²² values  =  head ‖ gaps ‖ high bytes ‖ low bytes

    gaps   u8: number of unchanged values before the next changed one; 255: 255 unchanged values, and no changed one
           follows them.  Empty if every value is written
    high   sign and 7 bits of the exponent      low   1 bit of the exponent, and the mantissa
    gaps and high are Huffman-coded (raw deflate), because neighbouring exponents are similar; low is like noise

Values are absolute, so a patch may be applied twice, and the same format can hold a whole model.

Not promised: the fewest bytes.  XOR with old values needs about half as many, but must be applied exactly once.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from rendezvous.errors import Corrupt
from rendezvous.records.digests import digest
from rendezvous.store import Buffer

CHUNK = 1 << 22  # values
MAGIC = b"bf16"
# magic, index of the first value, number of values, number of changed values, sizes of gaps, high and low in bytes
_HEAD = struct.Struct("<4sQIIIII")
_FAR = 255
_OVER = np.uint32(0x7F7F8000)  # fp32 bits of the smallest magnitude that is infinite in bf16; NaN's bits are above
Bits = np.ndarray  # uint16: the bits of bf16 values


def bf16_bits(values: np.ndarray) -> Bits:
    """Round fp32 (n,) to the nearest bf16, ties to even, as torch and every GPU do.   Return its bits, uint16 (n,).

    `values` must not contain NaN: a GPU's NaN, 0x7FFFFFFF, would become −0.  Call `fits_bf16` first.
    """
    bits = values.view(np.uint32)
    return ((bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)


def digest_of_bits(bits: Bits) -> str:
    """Return the xxh3-128 digest of the values in little-endian order."""
    return digest(bits.astype("<u2", copy=False).data)


def fits_bf16(values: np.ndarray) -> bool:
    """Whether all values, fp32 (n,), are finite in bf16."""
    return not np.any((values.view(np.uint32) & np.uint32(0x7FFFFFFF)) >= _OVER)


@dataclass(frozen=True)
class Changes:
    """Changed values of one chunk.

    start: index of the chunk's first value.   count: values in the chunk.
    positions: those of the changed values inside the chunk, ascending; None: all positions.
    """

    start: int
    count: int
    positions: np.ndarray | None
    values: Bits

    def apply(self, bits: Bits) -> None:
        """Write the values into the whole vector."""
        part = bits[self.start : self.start + self.count]
        part[slice(None) if self.positions is None else self.positions] = self.values

    def touch(self, bounds: np.ndarray) -> np.ndarray:
        """Return for each range whether it has a changed value.   bounds: borders of ranges in the whole vector."""
        inside = np.clip(bounds - self.start, 0, self.count)
        before = inside if self.positions is None else np.searchsorted(self.positions, inside)
        return before[1:] > before[:-1]


def changes_between(old: Bits, new: Bits, start: int) -> Changes:
    """Return the changes from `old` (n,) to `new` (n,), one chunk.   start: index of its first value."""
    positions = np.flatnonzero(old != new)
    return Changes(start, len(new), positions, new[positions])


def whole(bits: Bits, start: int) -> Changes:
    return Changes(start, len(bits), None, bits)


# ---------------------------------------------------------------------- bytes


def encode(changes: Changes) -> bytes:
    gaps = b"" if changes.positions is None else _deflate(_gaps(changes.positions))
    planes = np.ascontiguousarray(changes.values, "<u2").view(np.uint8).reshape(-1, 2)
    high, low = _deflate(planes[:, 1].tobytes()), planes[:, 0].tobytes()
    numbers = changes.start, changes.count, len(changes.values), len(gaps), len(high), len(low)
    return b"".join((_HEAD.pack(MAGIC, *numbers), gaps, high, low))


def decode(body: Buffer) -> Iterator[Changes]:
    """Yield the chunks of a body, in order.   Raise Corrupt, and no other error, for bytes that are not a patch."""
    view = memoryview(body).cast("B")
    while view:
        if len(view) < _HEAD.size:
            raise Corrupt(f"a patch ends in the middle of a chunk's head ({len(view)} bytes are left)")
        magic, start, count, changed, *sizes = _HEAD.unpack_from(view)
        if magic != MAGIC or count > CHUNK or changed > count or _HEAD.size + sum(sizes) > len(view):
            raise Corrupt("a patch has a chunk whose head makes no sense: damaged bytes, or no patch of this version")
        ends = list(accumulate(sizes, initial=_HEAD.size))
        gaps, high, low = (view[a:b] for a, b in pairwise(ends))
        yield _chunk(start, count, changed, gaps=gaps, high=high, low=low)
        view = view[ends[-1] :]


def _chunk(start: int, count: int, changed: int, *, gaps: memoryview, high: memoryview, low: memoryview) -> Changes:
    if len(low) != changed or (not gaps and changed not in (0, count)):
        raise Corrupt("the head of a chunk in a patch gives a wrong number of values")
    planes = np.empty((changed, 2), np.uint8)
    planes[:, 1] = np.frombuffer(_inflate(high, changed, exactly=True), np.uint8)
    planes[:, 0] = np.frombuffer(low, np.uint8)
    everything = not gaps and changed == count
    positions = None if everything else _positions(_inflate(gaps, count) if gaps else b"", count, changed)
    return Changes(start, count, positions, planes.view("<u2").reshape(-1).astype(np.uint16, copy=False))


def _gaps(positions: np.ndarray) -> bytes:
    between = np.diff(positions, prepend=-1) - 1
    far, near = np.divmod(between, _FAR)
    out = np.full(len(positions) + int(far.sum()), _FAR, np.uint8)
    out[np.cumsum(far + 1) - 1] = near
    return out.tobytes()


def _positions(gaps: bytes, count: int, changed: int) -> np.ndarray:
    steps = np.frombuffer(gaps, np.uint8).astype(np.int64)
    ends = np.cumsum(np.where(steps == _FAR, _FAR, steps + 1)) - 1
    positions = ends[steps != _FAR]
    if len(positions) != changed or (changed and positions[-1] >= count):
        raise Corrupt("a patch has a chunk whose gaps do not lead to its values")
    return positions


def _deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(data) + packer.flush()


def _inflate(data: memoryview, most: int, *, exactly: bool = False) -> bytes:
    """Unpack at most `most` bytes, so that a small body cannot fill the memory.   exactly: require `most` bytes."""
    unpacker = zlib.decompressobj(-15)
    try:
        found = unpacker.decompress(data, max(1, most))
    except zlib.error as error:
        raise Corrupt(f"a patch has a chunk that cannot be unpacked ({error})") from error
    if not unpacker.eof and unpacker.decompress(unpacker.unconsumed_tail, 1):
        raise Corrupt("a patch has a chunk that unpacks to more than its head says")
    if exactly and len(found) != most:
        raise Corrupt("the head of a chunk in a patch gives a wrong number of values")
    return found
