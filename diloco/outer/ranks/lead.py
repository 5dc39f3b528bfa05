"""The choice of a process's manager: its own, or a manager that follows rank 0.

    manager = lead(lambda: StoreManager("s3://bucket/run", slot="r00"))
                 │ one process: that manager
                 │ several, by torchrun or accelerate launch: rank 0 has that manager, and all have a Led

Not promised: two models in one launch.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from diloco.outer.ranks.group import ABSENT_S, Group, launched_ranks
from diloco.run.config import OuterError

if TYPE_CHECKING:
    from diloco.outer.managers.manager import StoreManager
    from diloco.outer.ranks.led import Led

T = TypeVar("T")


def lead(make: "Callable[[], StoreManager]", absent_s: float = ABSENT_S) -> "StoreManager | Led":
    """Return a manager for this process.   make: called in a process without ranks, or on rank 0.

    absent_s: seconds that a rank waits until the others call this function. Raises OuterError."""
    if launched_ranks() == 1:
        if words := lone_words():
            warnings.warn(words, stacklevel=3)
        return make()
    from diloco.outer.ranks.led import Led

    return Led(Group(absent_s=absent_s), make)


def lone_words(environ: Mapping[str, str] = os.environ) -> str:
    """Return the warning that accelerate launch has started one process in place of several; else "".

    If you ask it for several processes, it always names a port, but without several GPUs it starts only one process."""
    asked = {"ACCELERATE_MIXED_PRECISION", "MASTER_PORT"} <= environ.keys()
    if not asked or not environ.keys().isdisjoint(("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")):
        return ""
    return (
        "accelerate launch has more than one process to start, and has started only this one, because it finds no "
        "second GPU. Use torchrun --standalone --nproc-per-node K, or accelerate launch --multi_gpu (also for "
        "processes on the CPU)"
    )


def tell(manager: "StoreManager | Led", message: T) -> T:
    """Return rank 0's message on every rank; in a process without ranks, return `message`."""
    group: Group | None = getattr(manager, "group", None)
    return message if group is None else group.tell(message)


def refuse_unled(manager: object) -> None:
    """Raise OuterError for a manager that would claim the slot once on each of several ranks."""
    count = dist.get_world_size() if dist.is_initialized() else launched_ranks()
    if count > 1:
        raise OuterError(
            f"{count} processes train this model, and each has a {type(manager).__name__} of its own, "
            "so all would claim one slot. Let rank 0 lead: lead(lambda: StoreManager(…)), from diloco.outer.ranks.lead"
        )
