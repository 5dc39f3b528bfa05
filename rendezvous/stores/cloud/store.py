"""A bucket in the cloud, through obstore:  s3://  gs://  az://  and  hf://buckets/…  by its S3 gateway.

    create      one PUT with If-None-Match: *           never retried here: put_once must see every outcome
    put         one PUT up to 64 MiB, directly from the caller's memory; above, equal parts of 32 MiB, 8 at a time;
                smaller parts on a slow link, and before the link's first measurement (uplink.py)
                a Stream in parts of 8 MiB, 4 at a time; if it is interrupted, no object is visible
    get_into    GETs of 16 MiB, 16 at a time, into the caller's memory         three retries, as for all but create
                while bytes arrive, the limit is 12 hours: the usual time limit is on silence

obstore's own threads move the bytes, and hardly need the GIL.  clients.py makes the clients, refusals.py the errors.

Not promised: a complete `get` from a server that cuts an object short and gives a wrong length (its digest shows it).
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from obstore.exceptions import BaseError

from rendezvous import layout
from rendezvous.errors import StoreError, StoreRefused, StoreUnclear
from rendezvous.store import Body, Buffer, body_bytes, plain_key, plain_prefix
from rendezvous.stores.cloud.address import endpoint_of, is_loopback, parse_address
from rendezvous.stores.cloud.clients import Bucket, Clients, clients_for, forget_clients, stay_home
from rendezvous.stores.cloud.credentials import keys_of
from rendezvous.stores.cloud.refusals import explain_error, in_words, not_a_store
from rendezvous.stores.uplink import LEAST, REQUEST_S, Uplink

if TYPE_CHECKING:
    from obstore import ObjectMeta

SMALL = 1 << 16  # a slow uplink that large blobs fill still sends this many bytes within one silence
SINGLE = 64 << 20
PART = 32 << 20
PARTS_AT_ONCE = 8
STREAMED, STREAMED_AT_ONCE, MOST_PARTS = 8 << 20, 4, 5000  # for a Stream: bytes per part, parts at once, limit of parts
RANGE = 16 << 20
RANGES_AT_ONCE = 16
BULK = 256  # at most so many keys per delete request: Azure's limit.  One missing key makes the whole request fail
TURN_S = 1.0  # seconds by which a signal may be heard later while the main thread waits
T = TypeVar("T")


class CloudStore:
    def __init__(self, url: str, silence_s: float = 30.0, request_s: float = REQUEST_S) -> None:
        self.address = parse_address(url)
        self.url = self.address.url
        self._silence_s = silence_s
        self._uplink = Uplink(request_s)
        self.request_s = 0.0  # seconds of the newest `get`
        self._bulk_deletes = self.address.scheme != "gs"  # Google has no such request
        self._current_clients()  # raises an error for a wrong endpoint or option

    @property
    def near(self) -> bool:
        """Whether this machine serves the bucket."""
        return is_loopback(urlsplit(endpoint_of(self.address)).hostname or "")

    def put(self, key: str, body: Body) -> None:
        plain_key(key)
        while True:
            began = time.monotonic()
            try:
                self._upload(key, body)
            except StoreUnclear:
                timed_out = time.monotonic() - began >= self._uplink.request_s  # only then do fewer bytes help
                if not timed_out or body_bytes(body) <= LEAST or not self._uplink.slow_down():
                    raise
            else:
                return self._uplink.note_upload(body_bytes(body), time.monotonic() - began, PART * PARTS_AT_ONCE)

    def _upload(self, key: str, body: Body) -> None:
        if not isinstance(body, Buffer):
            part, at_once = self._uplink.parts(body.size, STREAMED, STREAMED_AT_ONCE, MOST_PARTS)
            parts = {"chunk_size": part, "max_concurrency": at_once}
            self._ask_bucket("write", key, lambda at: at.for_writing.put(key, iter(body), use_multipart=True, **parts))
            return
        body = memoryview(body).cast("B")
        single = len(body) <= min(SINGLE, self._uplink.in_flight)
        parts: dict[str, Any] = {}
        if not single:
            part, at_once = self._uplink.parts(len(body), PART, PARTS_AT_ONCE, MOST_PARTS)
            parts = {"chunk_size": part, "max_concurrency": at_once}
        if (content_type := layout.content_type(key)) is not None:
            parts["attributes"] = {"Content-Type": content_type}

        def send(at: Clients) -> object:
            client = at.for_small if len(body) <= SMALL else at.for_writing
            return client.put(key, body, use_multipart=not single, **parts)

        self._ask_bucket("write", key, send)

    def create(self, key: str, body: Buffer) -> None:
        plain_key(key)
        body = memoryview(body).cast("B")
        self._ask_bucket("create", key, lambda at: at.for_registers.put(key, body, mode="create", use_multipart=False))

    def get(self, key: str) -> bytes | None:
        plain_key(key)
        began = time.monotonic()
        body = self._ask_bucket("read", key, lambda at: _read_object(at.for_records, key), missing=True)
        self.request_s = time.monotonic() - began
        return body

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        plain_key(key)
        out = out.cast("B")
        if not out:
            return self._ask_bucket("read", key, lambda at: at.for_records.head(key), missing=True) is not None
        if len(out) <= RANGE:
            return self._get_range(key, out, start)
        jobs = [
            _thread_pool().submit(self._get_range, key, out[i : i + RANGE], start + i)
            for i in range(0, len(out), RANGE)
        ]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:  # no thread may write into the caller's memory after the return
            for job in jobs:
                job.cancel()
            wait(jobs)
        return all(job.result() for job in jobs if not job.cancelled())

    def _get_range(self, key: str, out: memoryview, start: int) -> bool:
        end = start + len(out)
        part = self._ask_bucket(
            "read", key, lambda at: at.for_reading.get_range(key, start=start, end=end), missing=True
        )
        if part is None or len(part) != len(out):  # a range past the end is short, without an error
            return False
        out[:] = memoryview(part)
        return True

    def list(self, prefix: str) -> list[str]:
        folder = plain_prefix(prefix).rpartition("/")[0] or None  # the client's prefixes are whole folders
        keys = self._ask_bucket("list", prefix, lambda at: _list_keys(at.for_records, folder))
        return sorted(key for key in keys or [] if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        keys = [plain_key(key) for key in keys]
        if not self._bulk_deletes:
            self._delete_singly(keys)
            return
        for i in range(0, len(keys), BULK):
            self._delete_bulk(keys[i : i + BULK])

    def _delete_bulk(self, keys: Sequence[str]) -> None:
        """Delete all keys by one request.  If it fails (some S3 clones lack it), send one per key, but not to Azure."""
        try:
            self._ask_bucket("delete", keys[0], lambda at: at.for_reading.delete(keys), missing=True)
        except StoreError:
            if self.address.scheme == "az":  # Azure's client has no other request
                raise
            self._delete_singly(keys)
            self._bulk_deletes = False  # only after single requests have worked

    def _delete_singly(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._ask_bucket("delete", key, lambda at, key=key: at.for_deleting.delete(key), missing=True)

    def __repr__(self) -> str:
        return f"CloudStore({self.url!r})"

    def _current_clients(self) -> Clients:
        stay_home()
        try:
            clients = clients_for(self.address, self._silence_s, self._uplink.request_s)
            _ = clients.for_reading  # all take the same address and options
            return clients
        except BaseError as error:
            why = in_words(error)
        files = " and ".join(name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))
        if files and "builder error" in why:
            advice = f"{files} is set: no certificate in PEM (-----BEGIN CERTIFICATE-----) was found there"
        else:
            advice = keys_of(self.address.scheme)
        raise StoreRefused(f"cannot open {self.url}: {why}. {advice}")

    def _ask_bucket(self, verb: str, key: str, request: Callable[[Clients], T], missing: bool = False) -> T | None:
        """Return the answer; None for a missing object, if `missing` allows it.   Raise a StoreError for an error."""
        at = self._current_clients()
        try:
            return _heeding_signals(lambda: request(at))
        except (BaseError, OSError, ValueError) as error:
            failure = explain_error(self.address, verb, key, error, missing)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of obstore's Rust, which is no Exception
                raise
            failure = StoreRefused(
                f"cannot {verb} {self.url}: obstore cannot make the request. Look for a line break or a blank in the "
                f"keys, the region or the endpoint. {keys_of(self.address.scheme)}"
            )
        if isinstance(failure, StoreRefused):
            forget_clients()
        if failure is not None:
            raise failure  # outside `except`, so that no traceback shows the client's text with a signed request
        return None


def _heeding_signals(request: Callable[[], T]) -> T:
    """Make a request of the main thread in another thread, because obstore holds back Ctrl-C and SIGTERM.

    The wait has turns: Python hears a signal that arrives just before a turn only after that turn."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    try:
        future = _pool_of_main().submit(request)
    except RuntimeError:  # the process ends: Python starts no thread any more, and a script offers its last work
        return request()
    while not wait([future], timeout=TURN_S).done:
        pass
    return future.result()


def _read_object(bucket: Bucket, key: str) -> bytes:
    """Return the object.  If the object is too long, return one byte more than allowed and close the connection."""
    most = layout.most_bytes(key)
    found = bucket.get(key)
    if found.attributes.get("Content-Type", "").startswith("text/html") and layout.content_type(key) is None:
        raise StoreRefused(f"cannot read {key}: {not_a_store()}")
    if found.meta["size"] <= most:
        return found.bytes().to_bytes()
    body = bytearray()
    for piece in found.stream(min_chunk_size=1 << 16):
        body += memoryview(piece)[: most + 1 - len(body)]
        if len(body) > most:
            break
    return bytes(body)


def _list_keys(bucket: Bucket, folder: str | None) -> list[str]:
    stream: Iterable[Sequence[ObjectMeta]] = bucket.list(folder)  # pyright: ignore[reportUnknownMemberType]
    return [found["path"] for page in stream for found in page]


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="store")


@cache
def _pool_of_main() -> ThreadPoolExecutor:
    """Threads for requests of the main thread, which would wait behind hundreds of ranges in the other pool."""
    return ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="store-main")
