"""Agreement through a bucket, among replicas that have no other connection.

This package handles bytes and flat vectors; it knows nothing of models or training.

    from rendezvous import ObjectStoreAllReduce

    mean = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
    mean.allreduce(tensor)

The names in `__all__` are loaded at their first use; no name imports torch.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rendezvous.agreement.rules import Rules, Timing
    from rendezvous.clock import SystemClock
    from rendezvous.engine.allreduce import ObjectStoreAllReduce
    from rendezvous.engine.rendezvous import Rendezvous
    from rendezvous.store import put_once
    from rendezvous.stores.files import FileStore
    from rendezvous.stores.memory import MemoryStore
    from rendezvous.stores.open import open_store
    from rendezvous.weights.follower import follow_weights

_HOMES = {
    "FileStore": "rendezvous.stores.files",
    "MemoryStore": "rendezvous.stores.memory",
    "ObjectStoreAllReduce": "rendezvous.engine.allreduce",
    "Rendezvous": "rendezvous.engine.rendezvous",
    "Rules": "rendezvous.agreement.rules",
    "SystemClock": "rendezvous.clock",
    "follow_weights": "rendezvous.weights.follower",
    "Timing": "rendezvous.agreement.rules",
    "open_store": "rendezvous.stores.open",
    "put_once": "rendezvous.store",
}

__all__ = [
    "FileStore", "MemoryStore", "ObjectStoreAllReduce", "Rendezvous", "Rules", "SystemClock", "Timing",
    "follow_weights", "open_store", "put_once",
]  # fmt: skip


def name_loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its names when they are first used.   homes: name -> module."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")
        return getattr(import_module(homes[name]), name)

    return load


__getattr__ = name_loader(__name__, _HOMES)
__dir__ = partial(sorted, __all__)
