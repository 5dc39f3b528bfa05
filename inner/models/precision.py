"""The dtypes that trained weights may have, and the dtype of their matrix products.

    float32    recommended
    bfloat16   8 bits of significand: an AdamW step that is smaller than about |w| / 256 is rounded away      warns
    float16    AdamW's epsilon, 1e-8, is 0 there: 0 / 0 in the first steps, and then every weight is NaN      refused

The optimizer updates weights in their own dtype, without an fp32 copy, and the outer loop reads these weights. Frozen
weights (a base model under LoRA) may have any dtype.

    inner.autocast   weights      on a GPU that has bfloat16   on another device
    "auto"           float32      bfloat16 products            float32 products
    "bfloat16"       float32      bfloat16 products            bfloat16 products
    "off", or weights in bfloat16: no autocast

Not promised: to recognise an optimizer that keeps its own fp32 copies; with such an optimizer bfloat16 warns, too.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from inner.errors import FLOAT16, InnerError


class PrecisionWarning(UserWarning):
    """Training loses a part of its updates."""


def casts_products(autocast: str, weights: str, gpu_has_bfloat16: bool) -> bool:
    """Whether this run computes matrix products in bfloat16.   autocast, weights: inner.autocast and inner.dtype."""
    return weights == "float32" and (gpu_has_bfloat16 if autocast == "auto" else autocast == "bfloat16")


def gpu_has_bfloat16() -> bool:
    """Whether there is a GPU with bfloat16 in hardware (Ampere and newer; older GPUs emulate bfloat16, slowly)."""
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def uncached_autocast(device: torch.device) -> torch.autocast:
    """Return the current autocast without its cache. The cache is per parameter, so it would miss swapped weights."""
    kind = device.type
    cast_to = torch.get_autocast_dtype(kind)
    return torch.autocast(kind, dtype=cast_to, enabled=torch.is_autocast_enabled(kind), cache_enabled=False)


def refuse_float16(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise InnerError if a trained parameter is float16.   parameters: (name, parameter)."""
    for name, p in parameters:
        if p.requires_grad and p.dtype == torch.float16:
            raise InnerError(FLOAT16.format(f"a model in float16 ({name} and others)"))


def lost_updates(parameters: Iterable[tuple[str, Tensor]], lr: float | None = None) -> str | None:
    """Return a message on how many weights lose updates in bfloat16; None if no trained parameter is bfloat16."""
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
    """Raise InnerError for float16, and warn about bfloat16 (PrecisionWarning)."""
    refuse_float16(model.named_parameters())
    if text := lost_updates(model.named_parameters()):
        warnings.warn(text, PrecisionWarning, stacklevel=3)
