"""Codecs: they encode pseudogradients in fewer bytes.

                     s = x + decay·e
    x, e (fp32) ─────────────────────▶ encode(s) ─▶ body ─▶ total += fl(w·decode(body))     same bits for every reader
           ▲                               │
           └── e ← s − decode(encode(s)) ──┘

    name        bytes per element     what is lost                                    from
    fp32        4                     nothing
    bf16        2                     the lower 16 bits                               rows.py
    int8        1   + 4 per 1024      at most half a step of absmax/127 per block     rows.py
    int4        1/2 + 4 per 512       at most half a step of absmax/7 per block       rows.py
    topk        3 per 64 + 4 per 8192  all but the 3 largest of 64; those keep 2 bits  topk.py   SparseLoCo, 2508.15706
    bf16-gate   4 + ~1 per change     changes that do not alter the bf16 model        gate.py   PULSE, 2602.03839

The lost part stays in the residual e and is sent later (error feedback), so over time the sum of the decoded values
approaches the sum of the inputs.  Codec, length and digest of a body are in the record that names it, not in the body.
This file, `codec` and `choose` do not import torch; the first `get_codec(name)` imports it and loads the kernels, which
encode, add or average a whole piece in one pass over memory: in C for the CPU, in Triton for CUDA.

Not promised: equal bodies from different machines (only equal decoding); correct results under
`torch.set_flush_denormal(True)`; a useful residual after `encode` has raised an error.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rendezvous.codecs.codec import Codec

NAMES = ("fp32", "bf16", "int8", "int4", "topk", "bf16-gate")
DENSE = ("fp32", "bf16", "int8", "int4")  # a sum of bodies is as small as one body: a mean can be reduced in shards


@cache
def get_codec(name: str) -> "Codec":
    """Return the codec of this name.   Raise ValueError if no codec has this name."""
    from rendezvous.codecs import gate, rows, topk
    from rendezvous.codecs.pieces import RowCodec

    codecs: dict[str, Callable[[], Codec]] = {
        "fp32": partial(RowCodec, rows.Fp32()),
        "bf16": partial(RowCodec, rows.Bf16()),
        "int8": partial(RowCodec, rows.Int8()),
        "int4": partial(RowCodec, rows.Int4()),
        "topk": topk.TopK,
        "bf16-gate": gate.Gate,
    }
    if name not in codecs:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(NAMES)}, and auto")
    return codecs[name]()


def load_mean_kernel(name: str) -> Callable[..., bool] | None:
    """Return `cpu.weighted_mean` for this codec's bodies; None if there is none, or if it was not compiled."""
    try:
        from rendezvous.codecs.kernels import cpu
    except ImportError:
        return None
    return partial(cpu.weighted_mean, name) if name in cpu.MEANS else None


def why_no_kernels() -> str:
    """Return why the CPU's kernels are missing; "" if they are loaded."""
    try:
        import_module("rendezvous.codecs.kernels.cpu")
    except ImportError as error:
        return str(error)
    return ""
