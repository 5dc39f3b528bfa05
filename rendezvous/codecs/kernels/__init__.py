"""Kernels that encode or add a whole piece in one pass over memory, in C for the CPU and in Triton for CUDA.

    load_kernels("int8", "cpu") ──▶ cpu.py ── cc, once per user ──▶ cpu.c        None without a C compiler
    load_kernels("int8", "cuda") ─▶ cuda.py ─ Triton                             None without Triton

The codecs and reduce.py use them.  The import compiles nothing; the first call of `load_kernels` does.  Without kernels
the codecs call torch, operation by operation, and get the same bits.

Not promised: kernels for top-k and bf16-gate, which use torch.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernels(Protocol):
    """The functions `encode` and `add`, for codecs with rows of a fixed size."""

    def encode(self, name: str, x: "Tensor", e: "Tensor | None", rows: "Tensor") -> float | None:
        """Set rows ← pack(x + e), e ← (x + e) − unpack(rows).   Return ‖x‖², None if a value is not finite."""
        ...

    def add(self, name: str, rows: "Tensor", w: float, target: "Tensor", first: bool) -> bool:
        """Add fl(w·unpack(rows)) to target, or store it there if `first`.

        Return False if no encoder wrote these rows; `target` then has undefined values.
        """
        ...


@cache
def load_kernels(name: str, device_type: str) -> Kernels | None:
    """Return the codec's kernels for a type of device ("cpu", "cuda"); None if there are none."""
    try:
        if device_type == "cpu" and name in ("bf16", "int8", "int4"):
            from rendezvous.codecs.kernels import cpu

            return cpu
        if device_type == "cuda" and name in ("int8", "int4"):
            from rendezvous.codecs.kernels import cuda

            return cuda
    except ImportError:  # no C compiler; no Triton, which comes with torch for CUDA on Linux
        pass
    return None


def why_no_kernels() -> str:
    """Return why the CPU's kernels are missing; "" if they are loaded."""
    try:
        import_module("rendezvous.codecs.kernels.cpu")
    except ImportError as error:
        return str(error)
    return ""


def load_mean_kernel(name: str) -> Callable[..., bool] | None:
    """Return `cpu.weighted_mean` for this codec's bodies; None if it has none, or if it was not compiled."""
    try:
        from rendezvous.codecs.kernels import cpu
    except ImportError:
        return None
    return partial(cpu.weighted_mean, name) if name in cpu.MEANS else None
