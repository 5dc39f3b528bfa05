"""The six operations of an object store, and `put_once`, the only primitive by which replicas agree.

    put_once(key, body) -> (won, value)

        GET key ── there ──▶ that is the value; it is mine iff its bytes are mine
           │
         absent
           │
        create ── done ──▶ mine
           │
        any other outcome: back to GET, with the same bytes

A *register* is a key that is written only by `put_once`.  A register's content, and no status code, shows which writer
won: a retried request can collide with its own first try, and a store may answer "exists" where no object is.  So every
body contains a nonce of its writer.

Not promised: that a listed key can be read, or that a readable key is listed.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Protocol, TypeVar

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import BadKey, GaveUp, KeyExists, StoreFull, StoreRefused, StoreUnclear

Buffer = bytes | bytearray | memoryview


class Stream(Protocol):
    """A body that is produced in pieces while it is uploaded.

    A second iteration gives the same bytes, or an error.  A piece must not change before the whole request has ended,
    because clients send it without a copy.
    size: bytes of the whole body.
    """

    size: int

    def __iter__(self) -> Iterator[Buffer]: ...
    def __bytes__(self) -> bytes: ...


Body = Buffer | Stream
SAY_AGAIN_S = 10.0  # seconds between two reports of the same trouble
KEY = "DILOCO_RUN_KEY"  # the environment variable with the run key (stores/run_key.py)
SEALED = re.compile(rb',"seal":"[0-9a-f]{64}"\}$')  # the end of a record with the run key's tag
VOID = b""  # what `get` returns for a register that was written without the run's key; readers ignore it
T = TypeVar("T")


class Readable(Protocol):
    """The reading operations of a store, all that a view of a run needs."""

    url: str

    def get(self, key: str) -> bytes | None:
        """Return the whole object, or None if there is none.  (GET)

        If the object is longer than `layout.most_bytes` allows for its key, return only its beginning, but at least
        one byte more than allowed.  So no reader takes it for a record.
        """
        ...

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        """Fill `out` with the object's bytes from `start` on.  (ranged GETs)

        Return False if the object is missing or too short.
        """
        ...

    def list(self, prefix: str) -> list[str]:
        """Return the keys that start with `prefix`, sorted.  A hint: the list may be out of date.  (LIST)"""
        ...


class Store(Readable, Protocol):
    """An object store: whole objects under keys, read-after-write consistent, thread-safe."""

    def put(self, key: str, body: Body) -> None:
        """Write a whole object; readers see the old object or the new one.  (PUT)

        If a Stream raises an error, raise the same error; the new object is then not visible.
        """
        ...

    def create(self, key: str, body: Buffer) -> None:
        """Write a whole object.  Raise KeyExists if the key has one already.  (PUT, If-None-Match: *)"""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete the objects under `keys`, none of which is a register.  (DELETE)"""
        ...


def plain_key(key: str) -> str:
    """Return `key` unchanged.   Raise BadKey if the key names a place outside the run's folder or prefix."""
    if not layout.is_plain(key):
        raise BadKey(
            f"{key!r} is not a key of a run: it would lead out of the run's folder. Nothing was read or written there. "
            "A record in the bucket names it; check which other programs can write to the bucket"
        )
    return key


def plain_prefix(prefix: str) -> str:
    """Return `prefix` unchanged: "" or the beginning of keys.   Raise BadKey as `plain_key` does."""
    plain_key(f"{prefix}x")
    return prefix


def put_once(store: Store, clock: Clock, key: str, body: bytes) -> tuple[bool, bytes]:
    """Write `body` under `key` if the key has no object yet.

    Return (whether `body` is the object there, the object there).  `body` must contain a nonce of this writer and this
    proposal.
    """
    for pause in chain((0.0,), _backoff_pauses()):
        value = store.get(key)
        if value is not None:
            return value == body, value
        try:
            store.create(key, body)
            return True, body
        except (KeyExists, StoreUnclear):
            clock.sleep(pause)  # the next read shows whether our body is there, or another body, or no body
    raise AssertionError("the back-off never ends")


def in_pieces(body: Body) -> Iterable[memoryview]:
    """Return the bytes of a body, in order, as memoryviews."""
    return (memoryview(piece).cast("B") for piece in ([body] if isinstance(body, Buffer) else body))


def body_bytes(body: Body) -> int:
    """Return the size of a body, in bytes."""
    return memoryview(body).nbytes if isinstance(body, Buffer) else body.size


@dataclass(eq=False, repr=False)
class PatientStore:
    """A store that retries failed requests where that is safe.

    StoreUnclear     is retried with back-off, except in `create`, which raises it: only `put_once` can resolve it
    StoreRefused     is retried every few seconds and reported to `on_trouble`: a person can repair the cause (free
                     space, renew a token), and the run then continues.  With waits_on_refusal=False it is raised at
                     once, for a command whose user can repair the cause
    GaveUp           is raised after `patience_s` seconds without an answer (for a full store: `full_s`)

    on_recovered: called when a refused store answers again.
    before_pause: called before every pause; it may raise, because a replica that is asked to leave must not wait here.
    """

    store: Store
    clock: Clock
    patience_s: float
    before_pause: Callable[[], None] = lambda: None
    on_trouble: Callable[[str], None] = lambda text: None
    _: KW_ONLY
    full_s: float = 0.0
    on_recovered: Callable[[], None] = lambda: None
    waits_on_refusal: bool = True

    def __post_init__(self) -> None:
        self.url = self.store.url
        self.cheap = getattr(self.store, "cheap", False)
        self.digests: str | None = getattr(self.store, "digests", None)  # the kind of digest that blobs need, if given
        self._undone = dict[str, float]()  # key whose `create` failed -> the time when it first did

    def put(self, key: str, body: Body) -> None:
        self._ask_patiently(lambda: self.store.put(key, body))

    def create(self, key: str, body: Buffer) -> None:
        try:
            self._ask_patiently(lambda: self.store.create(key, body), unclear=False)
            self._undone.pop(key, None)
        except (KeyExists, StoreUnclear) as error:  # a store may say "exists" for ever, and show no object
            since = self._undone.get(key)
            if since is not None or isinstance(error, StoreUnclear):
                self._give_up_if_late(error, self.clock.now() if since is None else since)
            self._undone[key] = self.clock.now() if since is None else since
            raise

    def get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)  # usually it succeeds, without the cost of the loop below
        except (StoreUnclear, StoreRefused):
            return self._ask_patiently(lambda: self.store.get(key))

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._ask_patiently(lambda: self.store.get_into(key, out, start))

    def list(self, prefix: str) -> list[str]:
        return self._ask_patiently(lambda: self.store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._ask_patiently(lambda: self.store.delete(keys))

    def _ask_patiently(self, request: Callable[[], T], unclear: bool = True) -> T:
        began = self.clock.now()
        said = began - SAY_AGAIN_S
        for pause in _backoff_pauses():
            try:
                answer = request()
                if said >= began:
                    self.on_recovered()
                return answer
            except StoreUnclear as error:
                if not unclear:
                    raise
                self._give_up_if_late(error, began)
                self.clock.sleep(pause)
            except StoreRefused as error:
                if not self.waits_on_refusal:
                    raise
                if self.clock.now() - said >= SAY_AGAIN_S:
                    said = self.clock.now()
                    self.on_trouble(f"{error}; trying again until {self._patience_for(error):.0f} s have passed")
                self._give_up_if_late(error, began)
                self.clock.sleep(max(pause, 1.0))
        raise AssertionError("the back-off never ends")

    def _patience_for(self, error: Exception) -> float:
        """Return the seconds to retry: more for a full store (a person must free space) than for other errors."""
        return max(self.patience_s, self.full_s) if isinstance(error, StoreFull) else self.patience_s

    def _give_up_if_late(self, error: Exception, began: float) -> None:
        self.before_pause()
        if self.clock.now() - began > self._patience_for(error):
            raise GaveUp(
                f"the store gave no usable answer for {self._patience_for(error):.0f} s. Last: {error}. "
                "No commit is lost: repair the store and run the same command again."
            ) from error


def _backoff_pauses() -> Iterator[float]:
    """Yield pauses of 0.05, 0.1, … 2, 2, … seconds."""
    pause = 0.05
    while True:
        yield pause
        pause = min(2.0, 2 * pause)
