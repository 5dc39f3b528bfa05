"""A flat fragment of a model that K ranks share: replicated on each of them, or in shards (FSDP2's DTensors).

    rank 0   flat [ w₀ │ w₁ │ w₂ ]           ── spread, one parameter after the other ──▶ each rank keeps its shard
             flat ◀── one whole parameter ── all-gather, where a parameter is in shards
    rank 1 … flat [ ]                        these ranks have no part of the vector, so each loop over it is empty

The vector is in the model's order, and does not depend on K: its bits, its digest and its Δ are those of one process.
A broadcast keeps all bits.  (An all-reduce of floats would not: −0.0 + 0.0 = 0.0.)

Besides the flat vector, a rank holds one whole parameter at a time.

Not promised: a mesh over several hosts.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from diloco.outer.flat import FlatFragment
from diloco.outer.ranks.group import Group
from diloco.run.config import OuterError


class SharedFragment(FlatFragment):
    """One fp32 vector on rank 0 for some trainable parameters of a model on several ranks; an empty one elsewhere.

    Every method is a collective: all ranks call it, in the same order."""

    def __init__(self, live: Sequence[nn.Parameter], group: Group) -> None:
        size = sum(p.numel() for p in live)
        super().__init__(live, torch.empty(size if group.is_main else 0, dtype=torch.float32, device="cpu"))
        self._group = group
        self._written: list[float] | None = None  # the sums of the first θ that all ranks got
        refuse_offload(live)
        at = 0
        for p in live:
            for part, values in self._host_parts(p):
                self.flat.data[at + part.start : at + part.stop] = values
            at += p.numel()

    def _host_parts(self, p: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a whole parameter, fp32 on rank 0's host; nothing elsewhere."""
        whole = p.full_tensor().detach() if isinstance(p, DTensor) else p
        if self._group.is_main:
            yield from super()._host_parts(whole)

    def shaped(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of rank 0's `flat`, in its shape, on every rank."""
        at = 0
        for p in self.live:
            own = flat[at : (at := at + p.numel())]
            whole = own if self._group.is_main else torch.empty(p.numel(), dtype=torch.float32, device="cpu")
            self._group.spread(whole)
            yield p, whole.view(p.shape)

    @torch.no_grad()
    def scatter(self, merged: bool) -> None:
        self.merged = self.flat.data.clone() if merged and self.rounds else None
        for p, whole in self.shaped(self.flat.data):
            if isinstance(p, DTensor):
                shard = distribute_tensor(whole.to(p.dtype), p.device_mesh, p.placements, src_data_rank=None)
                p.to_local().copy_(shard.to_local())
            else:
                p.copy_(whole)
        self._written = self._sums() if self._written is None else self._written

    def moves(self) -> list[float]:
        """Return, for each parameter that is not in shards, the change of its sum since the first θ."""
        return [now - before for now, before in zip(self._sums(), self._written or [], strict=False)]

    def _sums(self) -> list[float]:
        return [float(p.detach().sum(dtype=torch.float64)) for p in self.live if not isinstance(p, DTensor)]


def refuse_offload(live: Sequence[nn.Parameter]) -> None:
    """Raise OuterError for shards on the CPU if their ranks communicate by GPU: such shards could not be gathered."""
    if any(isinstance(p, DTensor) and p.device.type != p.device_mesh.device_type for p in live):
        raise OuterError(
            "FSDP2 keeps this model's shards on the CPU (cpu_offload), where its GPUs cannot gather them. Leave "
            "cpu_offload out, or use more GPUs"
        )
