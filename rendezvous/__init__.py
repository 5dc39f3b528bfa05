"""Agreement through a bucket, among replicas that have no other connection.

This package handles bytes and flat vectors; it knows nothing of models or training.

    from rendezvous import ObjectStoreAllReduce

    mean = ObjectStoreAllReduce("s3://bucket/run", rank=0, world_size=4)
    mean.allreduce(tensor)

The names in `__all__` are loaded at their first use; none of them imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

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
    "FileStore": "stores.files",
    "MemoryStore": "stores.memory",
    "ObjectStoreAllReduce": "engine.allreduce",
    "Rendezvous": "engine.rendezvous",
    "Rules": "agreement.rules",
    "SystemClock": "clock",
    "follow_weights": "weights.follower",
    "Timing": "agreement.rules",
    "open_store": "stores.open",
    "put_once": "store",
}

__all__ = [
    "FileStore",
    "MemoryStore",
    "ObjectStoreAllReduce",
    "Rendezvous",
    "Rules",
    "SystemClock",
    "Timing",
    "follow_weights",
    "open_store",
    "put_once",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"rendezvous has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"rendezvous.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
