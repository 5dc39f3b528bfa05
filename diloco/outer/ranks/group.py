"""The ranks of one replica: K processes that train one model together.

    rank 0     claims the slot; holds θ, m and Δ; decides
    rank 1 …   train, and follow rank 0's decisions

    training's own group (NCCL, Gloo)    gradients and shards
    this group (Gloo, on the CPU)        agree: rank 0's numbers    spread: its tensors    gather: messages to it

This group is beside the training's, so no message waits behind a stuck GPU.  `launched_ranks` counts the processes that
a launcher (torchrun, accelerate, diloco/process/ranks.py) has started.

Not promised: several hosts; a rank that waits for a stopped one ends only after PATIENCE.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.process.ranks import MEET, RankLost
from diloco.run.config import OuterError

PATIENCE = timedelta(hours=2)  # rank 0 may wait for other replicas, and the ranks wait for rank 0
LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # every launcher sets them beside WORLD_SIZE


class Group:
    """This process among the ranks of its replica.   index: its number.   count: number of ranks.

    Raises OuterError if the ranks did not start together."""

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        join_ranks()
        self.index = dist.get_rank()
        self.count = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=patience)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def agree(self, *words: int) -> tuple[int, ...]:
        """Return rank 0's numbers, on every rank."""
        told = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.spread(told)
        return tuple(told.tolist())

    def spread(self, values: Tensor) -> None:
        """Write rank 0's values into those of the others, bit for bit.   values: tensors on the CPU."""
        with self._with_peers():
            dist.broadcast(values, 0, group=self._group)

    def tell(self, message: Any) -> Any:
        """Return rank 0's message, any object that pickle can send, on every rank."""
        box = [message]
        with self._with_peers():
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in their order; [] on all ranks but 0."""
        found: list[Any] | None = [None] * self.count if self.is_main else None
        with self._with_peers():
            dist.gather_object(message, found, 0, group=self._group)
        return found or []

    @contextmanager
    def _with_peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.index} of {self.count} lost another rank of its replica: {str(error).split('. ')[0]}. "
                "The replica ends as a whole; its slot is started again"
            ) from error


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started for one model; 1 without a launcher."""
    text = environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise OuterError(f"WORLD_SIZE = {text!r} is not a number of processes. Unset it, or let torchrun set it")
    return int(text)


def join_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Begin torch.distributed among the launched processes, unless it has begun.   Raises OuterError."""
    if dist.is_initialized():
        return
    count, meet = launched_ranks(environ), environ.get(MEET)
    if missing := [name for name in LAUNCHER if not (meet or environ.get(name))]:
        raise OuterError(
            f"WORLD_SIZE = {count}, but {', '.join(missing)} is not set, so these processes cannot find each other. "
            "Start them with torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    refuse_missing_gpu(int(environ.get("LOCAL_RANK", environ["RANK"])))
    where = f"file://{meet}" if meet else "env://"
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    rank = int(environ["RANK"])
    dist.init_process_group(backend, where, rank=rank, world_size=count, timeout=PATIENCE)  # rollouts may be slow


def refuse_missing_gpu(rank: int) -> None:
    """Raise OuterError for a rank without a GPU of its own on a machine that has GPUs."""
    if (there := torch.cuda.device_count()) and rank >= there:
        raise OuterError(
            f"rank {rank} has no GPU: this machine shows {there}, and each rank of a replica uses one of its own. "
            f"Use {there} ranks (or CUDA_VISIBLE_DEVICES= for ranks on the CPU)"
        )
