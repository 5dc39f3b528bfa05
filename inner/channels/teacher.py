"""Keeps the weights of the self-teacher, and swaps them into the student's module for the teacher's forward.

    live     the student's current weights                                        no memory
    frozen   θ₀, the start weights                                                one copy of the trainable weights
    ema      w ← (1 - r) w + r · student, once per inner step of this session    one copy; under bf16 one more, in fp32
    round    θ_t, the committed weights: the same on every replica at step t      one copy

The teacher is the student's own module, with other weights during one forward. Teacher and student share frozen layers,
and the copy for an adapter is as small as the adapter. Or the teacher is another model with the same vocabulary.

Not promised: the same "ema" on all replicas; each session starts its own average from the weights it joined with.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels.terms import Turns, backbone_states, eval_mode, logits_at, pad_rows
from inner.errors import InnerError
from inner.models.causal_lm import causal_lm
from inner.models.precision import uncached_autocast
from inner.settings.inner import Theta


class DistillationTeacher:
    """The self-teacher.   kind: one of inner.settings.channels.TEACHERS.   other: a model instead of the student."""

    def __init__(self, kind: str, student: nn.Module, ema_rate: float, other: nn.Module | None = None) -> None:
        self.kind = kind
        self.ema_rate = ema_rate
        self.model = student
        self._weights: dict[str, Tensor] = {}
        self._at: int | None = None  # the step at which the copy was made: outer step ("round") or inner step ("ema")
        if other is not None:
            _refuse_vocabulary(student, other)
            self.kind = "live"
            self.model = other.eval().requires_grad_(False)
        elif kind != "live":
            self._weights = {name: p.detach().clone() for name, p in trained_parameters(student).items()}
        # An average in bf16 would round small changes away. For fp32 weights, float() returns the same tensors.
        self._average = {name: value.float() for name, value in self._weights.items()} if kind == "ema" else {}

    @torch.no_grad()
    def advance(self, committed: int, inner: int, theta: Theta | None) -> None:
        """Update the teacher.   committed: the run's outer step.   inner: this session's step."""
        if not self._is_due(committed, inner, theta):
            return
        if self.kind == "round" and theta is not None:
            for name, value in theta():
                self._weights[name].copy_(value)
            self._at = committed
        else:
            rate = 1.0 if self._at is None else self.ema_rate
            for name, p in trained_parameters(self.model).items():
                self._weights[name].copy_(self._average[name].lerp_(p.detach().float(), rate))
            self._at = inner

    def _is_due(self, committed: int, inner: int, theta: Theta | None) -> bool:
        """Whether `advance` changes the weights."""
        if self.kind == "round":
            return theta is not None and committed != self._at
        return self.kind == "ema" and inner != self._at

    @torch.no_grad()
    def logits(self, rows: Sequence[Sequence[int]], turns: Turns, device: torch.device) -> Tensor:
        """Return the logits at the turns' positions, (N, V): one forward without gradient."""
        with self.in_place(device):
            return logits_at(self.model, backbone_states(self.model, *pad_rows(rows, device)), turns)

    @contextmanager
    def in_place(self, device: torch.device) -> Iterator[None]:
        """Put the teacher's weights into `model`, and turn dropout off, during a `with`."""
        with swapped_weights(self.model, self._weights), eval_mode(self.model), uncached_autocast(device):
            yield


@contextmanager
def swapped_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the model other weights during a `with`. It copies nothing and changes no existing autograd graph."""
    parameters = trained_parameters(model) if weights else {}
    own = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def vocabulary_size(model: Any) -> int:
    return causal_lm(model).get_output_embeddings().weight.shape[0]


def _refuse_vocabulary(student: nn.Module, teacher: nn.Module) -> None:
    mine = vocabulary_size(student)
    theirs = vocabulary_size(teacher)
    if mine != theirs:
        raise InnerError(
            f"the student's vocabulary has {mine} tokens and the teacher's {theirs}, so their distributions cannot be "
            "compared. Use a teacher with the student's tokenizer, or its answers as pairs (inner.replay.pairs)."
        )
