"""The dtypes that trained weights may have.

    float32    as it should be
    bfloat16   8 bits of significand: an AdamW step that is smaller than about |w| / 256 is rounded away      warns
    float16    AdamW's epsilon, 1e-8, is 0 there: 0 / 0 in the first steps, and then every weight is NaN      refused

The optimizer steps the weights in their own dtype: float32 weights are their own masters, and the outer loop reads
them. Frozen weights (a base model
under LoRA) may have any dtype.

Not promised: that an optimizer which keeps fp32 copies of its own is recognised; bfloat16 warns there, too.
"""

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from inner.errors import FLOAT16, InnerError


class PrecisionWarning(UserWarning):
    """Training loses a part of its updates."""


def refuse_float16(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """InnerError if a (name, parameter) that is trained is float16."""
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
