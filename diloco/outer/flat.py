"""A live model as flat fp32 fragments.

    model (any dtype)      w₀ │ w₁ │ w₂ ┊ w₃ │ w₄            trainable parameters, tied ones once, in the model's order
                              ▼            ▼
    fragments          [ ─────────── ] [ ─────── ]           one fp32 vector each, on the CPU

    local value of an element = base + (live − round(base))     base = the fp32 vector that was last scattered

base is θ, or the result of α's merge; round is to the model's dtype.  So the rounding of a bf16 model never enters a
pseudogradient. The local values that α kept do enter it, as in torchft and in arXiv 2501.18512.  For an fp32
model, the local value is the live value, read straight from the model.

Not promised: a model on several devices.  Vectors are in host memory.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diloco.run.config import OuterError

PART = 1 << 24  # elements that are copied at once from a device: 64 MiB


class FlatFragment(nn.Module):
    """One fp32 vector on the CPU for some trainable parameters of a live model; torchft optimizes it."""

    def __init__(self, live: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.live = list(live)  # a plain list, so that torch does not register them here
        self.flat = nn.Parameter(torch.cat([p.detach().reshape(-1).float().cpu() for p in live]))
        self.rounds = any(p.dtype != torch.float32 for p in self.live)
        self.merged: Tensor | None = None  # base, if it is needed and is not θ
        self._staging: Tensor | None = None

    @torch.no_grad()
    def gather(self, theta: Tensor) -> None:
        """Write flat ← local values."""
        for span, local in self._local_slices(theta):
            self.flat.data[span].copy_(local)

    @torch.no_grad()
    def delta(self, theta: Tensor, out: Tensor) -> Tensor:
        """Write out ← Δ = θ − local values, with the same bits as torchft's Δ after `gather`."""
        for span, local in self._local_slices(theta):
            torch.sub(theta[span], local, out=out[span])
        return out

    def _local_slices(self, theta: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the vector, in order, and their local values. Read each one before the next."""
        base = theta if self.merged is None else self.merged
        at = 0
        for p in self.live:
            span = slice(at, at := at + p.numel())
            for part, live in self._host_parts(p):
                here = slice(span.start + part.start, span.start + part.stop)
                if p.dtype == torch.float32:
                    yield here, live
                else:
                    yield here, base[here] + (live - base[here].to(p.dtype).float())

    def _host_parts(self, p: nn.Parameter) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a parameter and their values, fp32 on the host."""
        if p.device.type == "cpu":
            yield slice(0, p.numel()), p.detach().reshape(-1).float()
            return
        if self._staging is None:  # pinned memory; a copy to fresh pageable memory took 20 times as long
            size = min(PART, max(live.numel() for live in self.live))
            self._staging = torch.empty(size, pin_memory=p.device.type == "cuda")
        yield from staged_parts(p, self._staging)

    @torch.no_grad()
    def scatter(self, merged: bool) -> None:
        """Write model ← flat.   merged: flat is not θ, but θ merged with local values (α > 0)."""
        self.merged = self.flat.data.clone() if merged and self.rounds else None
        at = 0
        for p in self.live:
            p.copy_(self.flat.data[at : at + p.numel()].view(p.shape))
            at += p.numel()


def staged_parts(p: Tensor, staging: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of a parameter and their values in `staging`; the next slice overwrites them."""
    flat = p.detach().reshape(-1)
    for begin in range(0, p.numel(), staging.numel()):
        part = flat[begin : begin + staging.numel()].float()
        yield slice(begin, begin + part.numel()), staging[: part.numel()].copy_(part)


def trainable_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return every trainable parameter once (tied weights under their first name), in the model's order."""
    found = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise OuterError(
            "the model has no trainable parameter; nothing could be averaged. Unfreeze some, or add an adapter"
        )
    return found


def layout_of(model: nn.Module) -> list[list[Any]]:
    """Return [name, shape, dtype] of every trainable parameter, in the order of a flat vector's elements."""
    return [[n, list(p.shape), str(p.dtype).removeprefix("torch.")] for n, p in trainable_parameters(model)]
