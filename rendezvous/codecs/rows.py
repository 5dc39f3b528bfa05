"""A codec's format in rows: elements into bytes and back, by torch's operations alone.

    align elements ──pack_rows──▶ one row of row_bytes ──unpack_rows──▶ align elements

pieces.py drives a format over a long vector; kernels/ does the same arithmetic in one pass, and is checked against it.

Not promised: anything about residuals beyond `pack_and_subtract`; speed.
"""

import threading
from abc import ABC, abstractmethod
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from rendezvous.errors import BadDelta

FLT_MAX = float(np.finfo(np.float32).max)
SCRATCH = 1 << 19  # elements of a thread's scratch memory on the CPU


class RowFormat(ABC):
    """Every `align` elements become one row of `row_bytes`; the last row is padded with zeros."""

    name: str
    align: int
    row_bytes: int

    @abstractmethod
    def pack_rows(self, v: Tensor, rows: Tensor) -> None:
        """Pack (r, align) fp32 -> (r, row_bytes) uint8.  Raises BadDelta for values that are not finite."""

    @abstractmethod
    def unpack_rows(self, rows: Tensor, out: Tensor) -> None:
        """Unpack (r, row_bytes) uint8 -> (r, align) fp32.  Raises Corrupt for rows that `pack_rows` never writes."""

    def pack_and_subtract(self, s: Tensor, rows: Tensor, t: Tensor) -> None:
        """Set rows ← pack(s), s ← s − unpack(rows).   t: scratch of s's shape."""
        self.pack_rows(s, rows)
        self.unpack_rows(rows, t)
        s.sub_(t)

    def max_body_size(self, n: int) -> int:
        return -(-n // self.align) * self.row_bytes


_own = threading.local()


def scratch_tensor(n: int, device: torch.device, name: str = "") -> Tensor:
    """Memory for n elements, valid until this thread asks for that name again.

    On the CPU it is the same memory every time, up to `SCRATCH` elements, because fresh pages cost more than the work;
    CUDA keeps memory by itself.
    """
    if device.type != "cpu" or n > SCRATCH:
        return torch.empty(n, device=device)
    kept: dict[str, Tensor] = _own.__dict__
    if name not in kept:
        with torch.inference_mode(False):
            kept[name] = torch.empty(SCRATCH)
    return kept[name][:n]


def pad_to_rows(s: Tensor, align: int) -> Tensor:
    """Return s as (r, align), with zeros after its end."""
    missing = -s.numel() % align
    return (torch.nn.functional.pad(s, (0, missing)) if missing else s).view(-1, align)


def all_finite(t: Tensor) -> bool:
    """Whether all elements are finite; one cheap pass where they are, as a finite sum has finite terms only."""
    return isfinite(float(t.sum())) or bool(t.isfinite().all())


def not_finite_error(v: Tensor) -> BadDelta:
    """The error for a v that is not finite."""
    return BadDelta(
        f"{int((~v.isfinite()).sum())} of {v.numel()} elements around here are not finite, in the pseudogradient or "
        "after its residual was added, so it was not encoded. Lower the inner learning rate or clip gradients; "
        "start again with a residual of zeros"
    )
