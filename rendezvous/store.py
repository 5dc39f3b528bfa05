"""Six verbs on bytes, and the one primitive that all agreement rests on.

    put_once(key, body) -> (won, value)

        GET key ── there ──▶ that is the value; it is mine iff its bytes are mine
           │
         absent
           │
        create ── done ──▶ mine
           │
        any other outcome: back to GET, proposing the same bytes

A status code does not tell the winner (a retried request can lose to itself; a store may answer "exists"
with no object there), so the register's content decides.  Hence every body carries a nonce of its writer.

Not promised: that a key seen by `list` can be read, or that one which can be read is listed.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Protocol, TypeVar

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import BadKey, GaveUp, KeyExists, StoreFull, StoreRefused, StoreUnclear

Buffer = bytes | bytearray | memoryview


class Stream(Protocol):
    """A body that is read while it is written, in pieces; a reader that begins again gets the same bytes, or an error.

    size: bytes in all.   A piece stays as it is until the whole request is over: clients send it without copying.
    """

    size: int

    def __iter__(self) -> Iterator[Buffer]: ...
    def __bytes__(self) -> bytes: ...


Body = Buffer | Stream
SAY_AGAIN_S = 10.0
VOID = b""  # read from a register that a writer without the run's key has taken: it counts for nothing
T = TypeVar("T")


class Readable(Protocol):
    """The half of a store that reads: all that a view of a run needs."""

    url: str

    def get(self, key: str) -> bytes | None:
        """The whole object, or None.  (GET)

        Of an object that is longer than its key allows (layout.most_bytes), the beginning and at least one byte too
        many, so that no reader takes it for a record.
        """
        ...

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        """Fill `out` from byte `start` on; False if the object is missing or too short.  (ranged GETs)"""
        ...

    def list(self, prefix: str) -> list[str]:
        """Keys that start with `prefix`, sorted.  A hint: may lag behind.  (LIST)"""
        ...


class Store(Readable, Protocol):
    """An object store: whole objects under keys, read-after-write consistent, thread-safe."""

    def put(self, key: str, body: Body) -> None:
        """Write a whole object; readers see the old one or the new one.  (PUT)

        An error of a Stream is passed on; then readers see nothing of the new one.
        """
        ...

    def create(self, key: str, body: Buffer) -> None:
        """Write a whole object if there is none, else KeyExists.  (PUT, If-None-Match: *)"""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects; never called on a register.  (DELETE)"""
        ...


def plain_key(key: str) -> str:
    """Return the key itself.   Raises BadKey if it would lead out of the run's folder or prefix."""
    if not layout.is_plain(key):
        raise BadKey(
            f"{key!r} is not a key of a run: it would lead out of the run's folder. Nothing was read or written there. "
            "Some record in the bucket names it; see who else can write to the bucket"
        )
    return key


def plain_prefix(prefix: str) -> str:
    """Return the prefix itself, "" or the beginning of keys.   Raises BadKey as `plain_key` does."""
    plain_key(f"{prefix}x")
    return prefix


def plain_url(url: str) -> str:
    """Return the URL of a bucket itself.   Raises ValueError for characters that URL parsers drop in silence.

    They end a URL at "#", and take tabs and line ends out of it: two runs would be one.
    """
    if bad := next((c for c in url if c == "#" or not c.isprintable()), ""):
        raise ValueError(
            f"this {url.partition(':')[0]}:// URL has {bad!r} in it, which would be dropped with all that follows. "
            "Write it without, e.g. exp-1 for exp#1"
        )
    if url != url.strip():
        raise ValueError(f"this {url.strip().partition(':')[0]}:// URL begins or ends with a blank; write it without")
    return url


def put_once(store: Store, clock: Clock, key: str, body: bytes) -> tuple[bool, bytes]:
    """Write `body` under `key` if nothing stands there; -> (whether mine stands, the body that stands).

    `body` must contain a nonce of this writer and this proposal.
    """
    for pause in chain((0.0,), _backoff_pauses()):
        value = store.get(key)
        if value is not None:
            return value == body, value
        try:
            store.create(key, body)
            return True, body
        except (KeyExists, StoreUnclear):
            clock.sleep(pause)  # ours, another's, or none stands: the next read tells
    raise AssertionError("the back-off never ends")


def in_pieces(body: Body) -> Iterable[memoryview]:
    """A body's bytes, in order."""
    return (memoryview(piece).cast("B") for piece in ([body] if isinstance(body, Buffer) else body))


def body_bytes(body: Body) -> int:
    """Number of a body's bytes."""
    return memoryview(body).nbytes if isinstance(body, Buffer) else body.size


class PatientStore:
    """A store that retries requests that may be retried, so that its caller sees only answers.

    StoreUnclear is retried with back-off, StoreRefused every few seconds and with a loud word, since a person
    can mend it (free some space, renew a token) and the run goes on; `on_recovered` is called when it does.  After
    `patience_s` without an answer (a full store: `full_s`): GaveUp.  `create` still says StoreUnclear, until then:
    only `put_once` knows how to read that.
    `before_pause` is called before every pause and may raise (a replica that is asked to leave must not wait here).
    waits_on_refusal=False: StoreRefused goes to the caller at once, where a person waits who can mend it.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        patience_s: float,
        before_pause: Callable[[], None] = lambda: None,
        on_trouble: Callable[[str], None] = lambda text: None,
        *,
        full_s: float = 0.0,
        on_recovered: Callable[[], None] = lambda: None,
        waits_on_refusal: bool = True,
    ) -> None:
        self.url = store.url
        self._waits_on_refusal = waits_on_refusal
        self._store = store
        self._clock = clock
        self._full_s = max(patience_s, full_s)
        self._on_recovered = on_recovered
        self.digests: str | None = getattr(store, "digests", None)  # the kind that blobs need, if it says
        self._patience_s = patience_s
        self.before_pause = before_pause
        self._on_trouble = on_trouble
        self._unclear = "", 0.0  # the last key that was created without a clear answer, and the time of the first try

    def put(self, key: str, body: Body) -> None:
        self._ask_patiently(lambda: self._store.put(key, body))

    def create(self, key: str, body: Buffer) -> None:
        try:
            self._ask_patiently(lambda: self._store.create(key, body), unclear=False)
        except StoreUnclear as error:
            if self._unclear[0] != key:
                self._unclear = key, self._clock.now()
            self._give_up_if_late(error, self._unclear[1])
            raise

    def get(self, key: str) -> bytes | None:
        try:
            return self._store.get(key)  # the common case costs nothing
        except (StoreUnclear, StoreRefused):
            return self._ask_patiently(lambda: self._store.get(key))

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._ask_patiently(lambda: self._store.get_into(key, out, start))

    def list(self, prefix: str) -> list[str]:
        return self._ask_patiently(lambda: self._store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        self._ask_patiently(lambda: self._store.delete(keys))

    def _ask_patiently(self, request: Callable[[], T], unclear: bool = True) -> T:
        began = self._clock.now()
        said = began - SAY_AGAIN_S
        for pause in _backoff_pauses():
            try:
                answer = request()
                if said >= began:
                    self._on_recovered()
                return answer
            except StoreUnclear as error:
                if not unclear:
                    raise
                self._wait_or_give_up(error, began, pause)
            except StoreRefused as error:
                if not self._waits_on_refusal:
                    raise
                if self._clock.now() - said >= SAY_AGAIN_S:
                    said = self._clock.now()
                    self._on_trouble(f"{error}; trying again until {self._patience_for(error):.0f} s have passed")
                self._wait_or_give_up(error, began, max(pause, 1.0))
        raise AssertionError("the back-off never ends")

    def _wait_or_give_up(self, error: Exception, began: float, pause: float) -> None:
        self._give_up_if_late(error, began)
        self._clock.sleep(pause)

    def _patience_for(self, error: Exception) -> float:
        """Seconds to retry: more for a full store, where a person must make room, than for a server's bad moment."""
        return self._full_s if isinstance(error, StoreFull) else self._patience_s

    def _give_up_if_late(self, error: Exception, began: float) -> None:
        self.before_pause()
        if self._clock.now() - began > self._patience_for(error):
            raise GaveUp(
                f"the store gave no usable answer for {self._patience_for(error):.0f} s. Last: {error}. "
                "Nothing that was committed is lost: mend the store and run the same command again."
            ) from error


def _backoff_pauses() -> Iterator[float]:
    """Pauses of 0.05, 0.1, … 2, 2, … seconds."""
    pause = 0.05
    while True:
        yield pause
        pause = min(2.0, 2 * pause)
