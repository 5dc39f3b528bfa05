"""Hold all weights of a sharded model (FSDP2) for a while. The functions do nothing for a model without shards.

    [ shard ] ──hold_whole──▶ [ all weights ] ──let_go──▶ [ shard ]        whole_weights: both, around a `with`

While a rank holds all weights, forward and backward passes neither gather nor free weights. Gradients are reduced.

Not promised: memory for the whole model.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[None]:
    """Hold all weights on this rank during a `with`. Then the ranks may take different numbers of forward passes."""
    hold_whole(model)
    try:
        yield
    finally:
        let_go(model)


def hold_whole(model: nn.Module) -> None:
    """Gather all weights on this rank, until `let_go`."""
    for module in shards_of(model):
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)


def let_go(model: nn.Module) -> None:
    """Keep only this rank's shards."""
    for module in shards_of(model):
        module.set_reshard_after_forward(True, recurse=False)
        module.set_reshard_after_backward(True, recurse=False)
        module.reshard()


def shards_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
