"""A codec's whole piece in one pass over memory: C on the CPU, Triton on CUDA.  Used by the codecs and by reduce.py.

    load_kernels("int8", "cpu") ──▶ cpu.py ── cc, once per user ──▶ cpu.c        None where there is no compiler
    load_kernels("int8", "cuda") ─▶ cuda.py ─ Triton                             None where there is no Triton

Importing this compiles nothing; the first call of `load_kernels` does.  Without kernels the codecs call torch,
operation by operation, and give the same bits.

Not promised: kernels for top-k and the gate; torch does those.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Kernels(Protocol):
    """The functions encode and add, for the codecs with rows of a fixed size."""

    def encode(self, name: str, x: "Tensor", e: "Tensor | None", rows: "Tensor") -> float | None:
        """Set rows ← pack(x + e), e ← (x + e) − unpack(rows); -> ‖x‖², None where a value is not finite."""
        ...

    def add(self, name: str, rows: "Tensor", w: float, target: "Tensor", first: bool) -> bool:
        """Add fl(w·unpack(rows)) to target; `first` stores instead.

        -> False where no encoder wrote these rows; then `target` is waste.
        """
        ...


@cache
def load_kernels(name: str, device_type: str) -> Kernels | None:
    """Kernels of that codec for that type of device ("cpu", "cuda"); None: the codec calls torch instead."""
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
    """The reason why the CPU's kernels are missing; "" if they are there."""
    try:
        import_module("rendezvous.codecs.kernels.cpu")
    except ImportError as error:
        return str(error)
    return ""


def load_mean_kernel(name: str) -> Callable[..., bool] | None:
    """`cpu.weighted_mean` of that codec's bodies; None where it was not compiled, or there is none."""
    try:
        from rendezvous.codecs.kernels import cpu
    except ImportError:
        return None
    return partial(cpu.weighted_mean, name) if name in cpu.MEANS else None
