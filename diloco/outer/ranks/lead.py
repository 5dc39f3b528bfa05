"""The choice of a process's manager: its own, or one that follows rank 0.

    manager = lead(lambda: StoreManager("s3://bucket/run", slot="r00"))
                 │ one process: that manager
                 │ several, by torchrun or accelerate launch: rank 0 has that manager, and all have a Led

Not promised: two models in one launch.
"""

from collections.abc import Callable
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

    absent_s: seconds that a rank waits for the others to call this. Raises OuterError."""
    if launched_ranks() == 1:
        return make()
    from diloco.outer.ranks.led import Led

    return Led(Group(absent_s=absent_s), make)


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
