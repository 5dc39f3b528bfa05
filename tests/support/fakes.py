"""Small stand-ins for the world, for tests that say exactly what goes wrong and when.

ManualClock()                                    time passes only by sleeping
FaultyStore(store, [Fault("create", "/commit", lost=True)])     the next create of a commit loses its answer
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rendezvous.errors import StoreUnclear
from rendezvous.records.records import WIRE, Record
from rendezvous.store import Body, Buffer, Store


class ManualClock:
    """Sleeping is the only way to pass time; `sleeps` keeps what was asked for."""

    def __init__(self, at: float = 0.0) -> None:
        self.at, self.sleeps = at, list[float]()

    def now(self) -> float:
        return self.at

    def wall(self) -> float:
        return 1.7e9 + self.at

    def sleep(self, seconds: float) -> None:
        self.at += seconds
        self.sleeps.append(seconds)


@dataclass
class Fault:
    """The next `times` calls of `verb` on keys containing `part` go wrong.

    error: what is raised.   lost: the request has its effect first.   before: run first (a rival, say).
    """

    verb: str
    part: str = ""
    error: Exception | None = field(default_factory=lambda: StoreUnclear("no answer"))
    lost: bool = False
    times: int = 1
    before: Callable[[], None] = lambda: None


class FaultyStore:
    """A store with a script of faults, and a list of the calls that were made (`calls`)."""

    def __init__(self, store: Store, faults: Iterable[Fault] = ()) -> None:
        self.url, self.inner, self.faults = store.url, store, list(faults)
        self.calls: list[tuple[str, str]] = []

    def put(self, key: str, body: Body) -> None:
        self._call("put", key, lambda: self.inner.put(key, body))

    def create(self, key: str, body: Buffer) -> None:
        self._call("create", key, lambda: self.inner.create(key, body))

    def get(self, key: str) -> bytes | None:
        return self._call("get", key, lambda: self.inner.get(key))

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._call("get_into", key, lambda: self.inner.get_into(key, out, start))

    def list(self, prefix: str) -> list[str]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._call("delete", "", lambda: self.inner.delete(keys))

    def _call(self, verb: str, key: str, request: Callable[[], Any]) -> Any:
        self.calls.append((verb, key))
        fault = next((f for f in self.faults if f.times and f.verb == verb and f.part in key), None)
        if fault is None:
            return request()
        fault.times -= 1
        fault.before()
        if fault.lost:
            request()
        if fault.error is not None:
            raise fault.error
        return request()


class Foreign(Exception):
    """Marks an exception that no client of ours should raise, and one does."""


FOREIGN: list[type[Exception]] = [
    type(f"Foreign{base.__name__}", (Foreign, base), {}) for base in (ValueError, RuntimeError, OSError, KeyError)
]


class VectorState:
    """Fragments whose outer step is plain subtraction: θ_t can be told by eye."""

    def __init__(self, size: int = 3, value: float = 0.0, fragments: int = 1) -> None:
        self.theta = np.full(size * fragments, value, np.float32)
        self._size = size

    def size(self, fragment: int) -> int:
        return self._size

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        self._of(fragment)[:] -= mean

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {f"theta.{fragment}": self._of(fragment)}

    def load(self, arrays: Any) -> None:
        for name, array in arrays.items():
            self._of(int(name.rpartition(".")[2]))[:] = array

    def _of(self, fragment: int) -> np.ndarray:
        return self.theta[fragment * self._size : (fragment + 1) * self._size]


def unchecked(record: Record) -> bytes:
    """The bytes of a record that no reader accepts, as a faulty or hostile writer writes them."""
    fields = {"kind": record.kind, "wire": WIRE, **record.written_fields()}
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), default=vars).encode()


@contextmanager
def remembered_records() -> Iterator[None]:
    """Each body is decoded once, however many readers it has: a quarter of the time of a world in virtual time."""
    known: dict[tuple[type, bytes], Any] = {}
    decode = vars(Record)["decode"]

    def remembered(kind: type[Any], body: Any) -> Any:
        at = kind, bytes(body)
        if at not in known:
            known[at] = decode.__get__(None, kind)(body)
        return known[at]

    Record.decode = classmethod(remembered)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Record.decode = decode
