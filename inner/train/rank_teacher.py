"""Keeps the self-teacher on one of K ranks: in shards if its student is in shards (FSDP2).

    student   [ shard ]  ⇄  [ shard ]   teacher       swap the weights; all ranks gather the model; run the forward;
                                                      free the gathered model; swap back; gather the student again

So a rank has 1/K of the teacher's weights, and never two whole models.  The student's autograd graph stays valid: FSDP2
gathers into the same memory again.  If the student is whole on each rank (DDP), the teacher is whole on each rank, too.

If the student is in shards, every method is a collective: all ranks must call it, in the same order.

Not promised: a teacher that is another model.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from inner.channels.teacher import DistillationTeacher, trained_parameters
from inner.channels.terms import eval_mode
from inner.models.precision import uncached_autocast
from inner.models.shards import hold_whole, let_go
from inner.settings.inner import Theta


class RankTeacher(DistillationTeacher):
    """A DistillationTeacher on one of several ranks. Call `place` after the student's parameters are placed."""

    def place(self) -> None:
        """Cut the weights in the same way as the student's weights."""
        self._weights = dict(self._cut(self._weights.items()))
        if self._average:
            self._average = {name: value.float() for name, value in self._weights.items()}

    def advance(self, committed: int, inner: int, theta: Theta | None) -> None:
        if self._is_due(committed, inner, theta):
            let_go(self.model)  # so that its parameters are the shards, not the gathered tensors
            super().advance(committed, inner, theta and (lambda: self._cut(theta())))
            hold_whole(self.model)

    @contextmanager
    def in_place(self, device: torch.device) -> Iterator[None]:
        if not any(isinstance(value, DTensor) for value in self._weights.values()):
            with super().in_place(device):
                yield
            return
        self._change_places()
        try:
            with eval_mode(self.model), uncached_autocast(device):
                yield
        finally:
            self._change_places()

    def _cut(self, whole: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        students = trained_parameters(self.model)
        for name, value in whole:
            p = students[name]
            if isinstance(p, DTensor):
                value = distribute_tensor(value.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
            yield name, value

    @torch.no_grad()
    def _change_places(self) -> None:
        let_go(self.model)
        students: Any = trained_parameters(self.model)
        teachers: Any = self._weights
        for name in students:
            ours, theirs = students[name].to_local(), teachers[name].to_local()
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)
        hold_whole(self.model)
