"""A store in this process's memory, for tests, simulations, and replicas that are threads.

Not promised: access from another process.
"""

import threading
from collections.abc import Iterable

from rendezvous import layout
from rendezvous.errors import KeyExists
from rendezvous.store import Body, Buffer, plain_key, plain_prefix

_named: dict[str, "MemoryStore"] = {}


class MemoryStore:
    near = True  # this machine serves the store
    proven = True  # create-if-absent works here, without a test before a run is founded
    cheap = True  # a request costs no more than a copy

    def __init__(self, url: str = "memory://") -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        """Return the store of this name; it is the same store everywhere in this process."""
        return _named.setdefault(name, cls(f"memory://{name}"))

    def put(self, key: str, body: Body) -> None:
        self._objects[plain_key(key)] = bytes(body)

    def create(self, key: str, body: Buffer) -> None:
        with self._lock:
            if key in self._objects:
                raise KeyExists(f"{self.url}/{key} exists")
            self._objects[plain_key(key)] = bytes(body)

    def get(self, key: str) -> bytes | None:
        body = self._objects.get(plain_key(key))
        return body if body is None else body[: layout.most_bytes(key) + 1]

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        body = self._objects.get(plain_key(key))
        if body is None or len(body) < start + len(out):
            return False
        if len(out):  # an empty view may be read-only
            out[:] = body[start : start + len(out)]
        return True

    def list(self, prefix: str) -> list[str]:
        prefix = plain_prefix(prefix)
        return sorted(k for k in list(self._objects) if k.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._objects.pop(plain_key(key), None)
