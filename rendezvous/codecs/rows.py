"""Formats in rows: they turn elements into bytes and back with torch's operations alone.

    align elements ──pack_rows──▶ one row of row_bytes ──unpack_rows──▶ align elements

pieces.py applies a format to a long vector.  kernels/ does the same arithmetic in one pass, and is compared with it.

Not promised: more work on residuals than `pack_and_subtract`; speed.
"""

import threading
from abc import ABC, abstractmethod
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from rendezvous.errors import BadDelta

FLT_MAX = float(np.finfo(np.float32).max)
SCRATCH = 1 << 19  # the most elements of a thread's reused scratch memory on the CPU


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
        return torch.empty(n, device=device)
    kept: dict[str, Tensor] = _own.__dict__
    if name not in kept:
        with torch.inference_mode(False):
            kept[name] = torch.empty(SCRATCH)
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
