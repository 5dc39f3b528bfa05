"""Makes optional optimizers: Muon, and AdamW with 8-bit moments.

    muon        matrices: torch.optim.Muon, its steps scaled to AdamW's size; all else: AdamW
    adamw8bit   AdamW of bitsandbytes

Not promised: bitsandbytes on a CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from inner.errors import InnerError
from inner.optional import optional

NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe", "score")  # in names of matrices that Muon must not train
Named = Sequence[tuple[str, Tensor]]


def muon_and_adamw(trained: Named, adam: dict[str, Any]) -> Optimizer:
    """Return Muon for the hidden matrices and AdamW for the rest.   adam: AdamW's arguments"""
    matrices = [p for name, p in trained if p.ndim == 2 and not any(word in name for word in NOT_HIDDEN)]
    held = {id(p) for p in matrices}
    return MuonAndAdamW(matrices, [p for _, p in trained if id(p) not in held], adam)


class MuonAndAdamW(Optimizer):
    """Muon and AdamW as one optimizer for hooks and schedules. Shares its groups and state with both optimizers."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], adam: dict[str, Any]) -> None:
        super().__init__([*matrices, *others], {"lr": adam["lr"]})
        parts: list[Optimizer] = []
        if matrices:
            from torch.optim import Muon

            muon = {"lr": adam["lr"], "weight_decay": adam["weight_decay"], "adjust_lr_fn": "match_rms_adamw"}
            parts.append(Muon(matrices, **muon))
        if others:
            parts.append(AdamW(others, **adam))
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss


def adamw_8bit(trained: Named, adam: dict[str, Any]) -> Optimizer:
    """Return bitsandbytes' AdamW.   Raise InnerError if it cannot run here."""
    theirs = optional(
        "bitsandbytes.optim",
        'inner.optimizer = "adamw8bit" needs bitsandbytes, which is not installed here ({}). Next: `pip install '
        'bitsandbytes` on this machine, `--pip bitsandbytes` for replicas elsewhere, or inner.optimizer = "adamw".',
    )
    if not torch.cuda.is_available():
        raise InnerError(
            'inner.optimizer = "adamw8bit" needs a CUDA device, and there is none here. Set inner.optimizer = "adamw".'
        )
    return theirs.AdamW8bit([p for _, p in trained], **adam)
