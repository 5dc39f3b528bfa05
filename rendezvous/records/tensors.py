"""Arrays as the bytes of a safetensors file, written and read without a copy of the whole file.

    u64: length of the header │ header: JSON, spaces up to a multiple of 8 │ array │ array │ …     little-endian

Wider types come first, so that every array is aligned; otherwise the caller's order is kept.  A `TensorFile` is a body
for `Store.put`, which reads it piece by piece.

Not promised: other types than those of a run (`_NAMES`).
"""

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np

from rendezvous.errors import Corrupt
from rendezvous.records.wire import as_bytes
from rendezvous.store import Buffer, Store

PIECE = 1 << 20  # bytes: copied, digested and written while it is in the cache
_NAMES = {"<f8": "F64", "<f4": "F32", "<i8": "I64", "<i4": "I32", "|u1": "U8"}
_TYPES = {name: np.dtype(kind) for kind, name in _NAMES.items()}
_HEAD = 1 << 16  # bytes of the first read; a longer header needs a second request
_HEADER_LIMIT = 4 << 20  # limit of a header's bytes, enough for 30,000 arrays; it is parsed before the digest is known


class TensorFile:
    """Arrays in the form of a file.   size: bytes of the file.   header: the bytes before the first array."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(sorted(arrays.items(), key=lambda named: -named[1].itemsize))
        self.header = _header_bytes(self.arrays)
        self.size = len(self.header) + sum(a.nbytes for a in self.arrays.values())

    def __iter__(self) -> Iterator[Buffer]:
        """Yield the bytes in order.  The arrays must not change before all pieces are used."""
        yield self.header
        for array in self.arrays.values():
            view = as_bytes(array)
            yield from (view[at : at + PIECE] for at in range(0, len(view), PIECE))

    def __bytes__(self) -> bytes:
        return b"".join(self)


def _header_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    entries = dict[str, Any]()
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        entries[name] = {"dtype": _NAMES[array.dtype.str], "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_tensors(store: Store, key: str, size: int, into: Mapping[str, np.ndarray] | None = None) -> TensorFile | None:
    """Read the file of `size` bytes under `key` into new arrays; return None if it is missing or shorter.

    into: arrays that are overwritten and returned instead of new arrays, if name, type and shape are the same.
    Raise Corrupt if the file has no valid header.  The digest is not checked here.
    """
    head = _read_header(store, key, size)
    if head is None:
        return None
    arrays = _allocate_arrays(key, head, size)
    at = len(head)
    arrays = {name: _reused(array, (into or {}).get(name)) for name, array in arrays.items()}
    for array in arrays.values():
        if array.nbytes and not store.get_into(key, as_bytes(array), at):
            return None
        at += array.nbytes
    found = TensorFile(arrays)
    found.header = head
    found.size = size
    return found


def _reused(empty: np.ndarray, there: np.ndarray | None) -> np.ndarray:
    fits = there is not None and (there.dtype, there.shape) == (empty.dtype, empty.shape) and there.flags.c_contiguous
    return there if there is not None and fits else empty


def _read_header(store: Store, key: str, size: int) -> bytes | None:
    start = bytearray(min(size, _HEAD))
    if len(start) < 8 or not store.get_into(key, memoryview(start)):
        return None
    end = 8 + int.from_bytes(start[:8], "little")
    if end > min(size, _HEADER_LIMIT):
        raise Corrupt(f"{key} says that its header has {end - 8} bytes; the whole object has {size}")
    rest = bytearray(max(0, end - len(start)))
    if rest and not store.get_into(key, memoryview(rest), len(start)):
        return None
    return bytes((start + rest)[:end])


def _allocate_arrays(key: str, head: bytes, size: int) -> dict[str, np.ndarray]:
    """Allocate the arrays that the header names, in file order.   Raise Corrupt unless they fill the whole file."""
    try:
        entries = {name: entry for name, entry in json.loads(head[8:]).items() if name != "__metadata__"}
        ordered = sorted(entries.items(), key=lambda named: named[1]["data_offsets"])
        at = len(head)
        for _, entry in ordered:
            begin, end = entry["data_offsets"]
            kind = _TYPES[entry["dtype"]]
            shape = entry["shape"]
            counts = isinstance(entry["shape"], list) and all(type(n) is int and n >= 0 for n in shape)
            if not counts or prod(shape) * kind.itemsize != end - begin:
                raise ValueError(f"{shape} of {kind} in {end - begin} bytes")
            if len(head) + begin != at:
                raise ValueError(f"a gap at {begin}")
            at = len(head) + end
        if at != size:
            raise ValueError(f"arrays of {at} bytes in a file of {size}")
        return {name: np.empty(entry["shape"], _TYPES[entry["dtype"]]) for name, entry in ordered}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Corrupt(f"the header of {key} is not that of a safetensors file ({error})") from error
