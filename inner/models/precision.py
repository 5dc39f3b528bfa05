"""The dtypes that trained weights may have, and the dtype of their matrix products.

    float32    as it should be
    bfloat16   8 bits of significand: an AdamW step that is smaller than about |w| / 256 is rounded away      warns
    float16    AdamW's epsilon, 1e-8, is 0 there: 0 / 0 in the first steps, and then every weight is NaN      refused

The optimizer steps the weights in their own dtype: float32 weights are their own masters, and the outer loop reads
them. Frozen weights (a base model under LoRA) may have any dtype.

    inner.autocast   weights      on a GPU that has bfloat16   on another device
    "auto"           float32      bfloat16 products            float32 products
    "bfloat16"       float32      bfloat16 products            bfloat16 products
    "off", or weights in bfloat16: no autocast

Not promised: that an optimizer which keeps fp32 copies of its own is recognised; bfloat16 warns there, too.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from inner.errors import FLOAT16, InnerError


class PrecisionWarning(UserWarning):
    """Training loses a part of its updates."""


def casts_products(autocast: str, weights: str, gpu_has_bfloat16: bool) -> bool:
    """Whether this run takes matrix products in bfloat16.   autocast, weights: inner.autocast and inner.dtype."""
    wanted = gpu_has_bfloat16 if autocast == "auto" else autocast == "bfloat16"
    return wanted and weights == "float32"


def gpu_has_bfloat16() -> bool:
    """Whether there is a GPU whose own arithmetic has bfloat16.   (Ampere and newer; older ones emulate it, slowly.)"""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def uncached_autocast(device: torch.device) -> torch.autocast:
    """The current autocast without its cache, for weights that are swapped in: the cache finds weights by parameter."""
    kind = device.type
    cast_to = torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=cast_to, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)


def refuse_float16(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise InnerError if a trained parameter is float16.   parameters: (name, parameter)."""
    for name, p in parameters:
        if p.requires_grad and p.dtype == torch.float16:
            raise InnerError(FLOAT16.format(f"a model in float16 ({name} and others)"))


def lost_updates(parameters: Iterable[tuple[str, Tensor]], lr: float | None = None) -> str | None:
    """A message that says how much training in bfloat16 loses; None if no trained parameter is bfloat16."""
    trained = [p for _, p in parameters if p.requires_grad]
    small = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    if not small:
        return None
    above = ""
    if lr is not None:
        above = f" (at lr = {lr:g}, where AdamW's steps are about that long, on every |w| above {256 * lr:.2g})"
    return (
        f"{small:,} of {sum(p.numel() for p in trained):,} trained weights are bfloat16, and the optimizer steps them "
        f"as they are, so an update smaller than about |w| / 256 is rounded away{above}; with inner.dtype = "
        '"float32" none is lost.'
    )


def check_precision(model: nn.Module) -> None:
    """Refuses float16, and warns of bfloat16 with a PrecisionWarning."""
    refuse_float16(model.named_parameters())
    if text := lost_updates(model.named_parameters()):
        warnings.warn(text, PrecisionWarning, stacklevel=3)
