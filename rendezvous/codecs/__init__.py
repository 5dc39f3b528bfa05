"""Codecs: they encode pseudogradients in fewer bytes.

                     s = x + decay·e
    x, e (fp32) ─────────────────────▶ encode(s) ─▶ body ─▶ total += fl(w·decode(body))     same bits for every reader
           ▲                               │
           └── e ← s − decode(encode(s)) ──┘

    name        bytes per element     what is lost                                    from
    fp32        4                     nothing
    bf16        2                     the lower 16 bits                               dense.py
    int8        1   + 4 per 1024      at most half a step of absmax/127 per block     blocks.py
    int4        1/2 + 4 per 512       at most half a step of absmax/7 per block       blocks.py
    topk        3 per 64 + 4 per 8192  all but the 3 largest of 64; those keep 2 bits  topk.py   SparseLoCo, 2508.15706
    bf16-gate   4 + ~1 per change     changes that do not alter the bf16 model        gate.py   PULSE, 2602.03839

The lost part stays in the residual e and is sent later (error feedback), so over time the sum of the decoded values
approaches the sum of the inputs.  Codec, length and digest of a body are in the record that names it, not in the body.
This file, `codec` and `choose` do not import torch; the first `get_codec(name)` imports it and loads the kernels.

Not promised: equal bodies from different machines (only equal decoding); correct results under
`torch.set_flush_denormal(True)`; a useful residual after `encode` has raised an error.
"""

from functools import cache

from rendezvous.codecs.choose import DENSE, NAMES, choose_codec, nominal_ratio
from rendezvous.codecs.codec import Array, Body, Codec
from rendezvous.codecs.kernels import why_no_kernels

__all__ = ["DENSE", "NAMES", "Array", "Body", "Codec", "choose_codec", "get_codec", "nominal_ratio", "why_no_kernels"]


@cache
def get_codec(name: str) -> Codec:
    """Return the codec of this name.   Raise ValueError if there is none."""
    codecs = _all_codecs()
    if name not in codecs:
        raise ValueError(f"there is no codec {name!r}; there are {', '.join(codecs)}, and auto")
    return codecs[name]


@cache
def _all_codecs() -> dict[str, Codec]:
    from rendezvous.codecs import blocks, dense, gate, topk
    from rendezvous.codecs.pieces import RowCodec

    return {
        "fp32": RowCodec(dense.Fp32()),
        "bf16": RowCodec(dense.Bf16()),
        "int8": RowCodec(blocks.Int8()),
        "int4": RowCodec(blocks.Int4()),
        "topk": topk.TopK(),
        "bf16-gate": gate.Gate(),
    }
