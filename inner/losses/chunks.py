"""Compute one loss per position, for a few positions at a time.

    student (…, V), teacher (…, V), N positions that count

        piece 0  ▓▓▓▓▓▓▓▓▓▓▓▓ V     forward   loss(piece) -> (n,); frees its temporaries
        piece 1  ▓▓▓▓▓▓▓▓▓▓▓▓ V     backward  computes the piece again, writes its gradient in place
        …                           a piece has n · V ≤ CHUNK entries, but at least one position

The temporaries of a softmax (log-probs, mixtures, terms) need several times the memory of the logits. Here they exist
for one piece at a time. Only the input logits and their gradient exist in full.

Not promised: second derivatives, if the loss needed more than one piece.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

PositionLoss = Callable[[Tensor, Tensor], Tensor]  # (n, V), (n, V) -> (n,)
CHUNK = 2**21  # entries: 8 MB in float32 for each of about twenty temporaries


def by_position(loss: PositionLoss, student: Tensor, teacher: Tensor, kept: Tensor) -> Tensor:
    """Apply `loss` to logits (..., V) at the positions where `kept` (...) is true -> (N,).

    Raises ValueError for NaN, which would spread to every weight of the model."""
    at = kept.nonzero(as_tuple=True)
    if at[0].numel() * student.size(-1) <= CHUNK:
        whole = at[0].numel() == kept.numel()  # all positions count: no indexing is needed
        values = loss(*(x.flatten(0, -2) if whole else x[at] for x in (student, teacher)))
    else:
        values = _Pieces.apply(loss, at, student, teacher)
    if bool(values.isnan().any()):
        raise ValueError(
            f"the loss is NaN at {int(values.isnan().sum())} of {values.numel()} positions: the logits hold NaN or "
            "+inf there, or nothing but -inf. Look at the model's output before the loss."
        )
    return values


def _split_pieces(at: tuple[Tensor, ...], vocabulary: int) -> Iterator[tuple[Tensor, ...]]:
    n = max(1, CHUNK // vocabulary)
    return zip(*(index.split(n) for index in at), strict=True)


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: PositionLoss, at: tuple[Tensor, ...], student: Tensor, teacher: Tensor) -> Tensor:
        ctx.loss = loss
        ctx.at = at
        ctx.save_for_backward(student, teacher)
        return torch.cat([loss(student[piece], teacher[piece]) for piece in _split_pieces(at, student.size(-1))])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        both = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[2:]
        found = [torch.zeros_like(logits) if want else None for logits, want in zip(both, needs_grad, strict=True)]
        pieces = list(_split_pieces(ctx.at, both[0].size(-1)))
        for piece, weight in zip(pieces, grad_outputs[0].split([len(piece[0]) for piece in pieces]), strict=True):
            leaves = [x[piece].detach().requires_grad_(want) for x, want in zip(both, needs_grad, strict=True)]
            with torch.enable_grad():
                value = ctx.loss(*leaves)
            some = [leaf for leaf in leaves if leaf.requires_grad]
            grads = iter(torch.autograd.grad(value, some, weight, allow_unused=True))
            for total in found:
                if total is not None and (grad := next(grads)) is not None:
                    total[piece] = grad
        return None, None, *found
