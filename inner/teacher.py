"""Whose weights the self-teacher has.

    live     the student's, now                                                   no memory
    frozen   θ₀, as the model came in                                             one copy of the trainable weights
    ema      w ← (1 - r) w + r · student, once per inner step of this life        one copy, in fp32 one more under bf16
    round    θ_t, as committed: the same on every replica that stands at t        one copy

The teacher is the student's own module that wears other weights for one forward: frozen layers are shared, an adapter's
copy is as small as the adapter. Or it is another model with the same vocabulary.

Not promised: one "ema" for all replicas; a life starts its own from the weights that it joined with.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inner.base import Theta
from inner.channels import Turns, backbone_states, causal_lm, evaluating, logits_at, padded
from inner.errors import InnerError


class Teacher:
    """kind: one of inner.settings.TEACHERS.   other: a model to use instead of the student's own."""

    def __init__(self, kind: str, student: nn.Module, ema_rate: float, other: nn.Module | None = None) -> None:
        self.kind, self.ema_rate, self.model = kind, ema_rate, student
        self._worn: dict[str, Tensor] = {}
        self._at: int | None = None  # the outer (round) or inner (ema) step that the copy is of
        if other is not None:
            _refuse_vocabulary(student, other)
            self.kind, self.model = "live", other.eval().requires_grad_(False)
        elif kind != "live":
            self._worn = {name: p.detach().clone() for name, p in _trainable(student).items()}
        # In bf16 a hundredth of a small difference would be rounded away. Of fp32 weights these are the same tensors.
        self._average = {name: value.float() for name, value in self._worn.items()} if kind == "ema" else {}

    @torch.no_grad()
    def advance(self, committed: int, inner: int, theta: Theta | None) -> None:
        """Before it is asked: where the run and this life stand."""
        if self.kind == "round" and theta is not None and committed != self._at:
            for name, value in theta():
                self._worn[name].copy_(value)
            self._at = committed
        elif self.kind == "ema" and inner != self._at:
            rate = 1.0 if self._at is None else self.ema_rate
            for name, p in _trainable(self.model).items():
                self._worn[name].copy_(self._average[name].lerp_(p.detach().float(), rate))
            self._at = inner

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]], turns: Turns, device: torch.device) -> Tensor:
        """(N, V) at the turns' positions: one forward without gradient."""
        with worn(self.model, self._worn), evaluating(self.model):
            return logits_at(self.model, backbone_states(self.model, *padded(rows, device)), turns)


@contextmanager
def worn(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights. Nothing is copied, and no graph that is open sees a change."""
    parameters = _trainable(model) if weights else {}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def vocabulary(model: Any) -> int:
    return causal_lm(model).get_output_embeddings().weight.shape[0]


def _refuse_vocabulary(student: nn.Module, teacher: nn.Module) -> None:
    mine, theirs = vocabulary(student), vocabulary(teacher)
    if mine != theirs:
        raise InnerError(
            f"the student has {mine} tokens and the teacher {theirs}: their distributions cannot be compared. Use a "
            "teacher with the student's tokenizer, or its answers as preference pairs (inner.pairs)."
        )
