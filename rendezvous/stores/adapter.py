"""Any fsspec file system as a store; registers only in file systems with a reliable create-if-absent.

    put, get, get_into, list, delete      every file system
    create                                s3fs, gcsfs, adlfs, and only if no race of 16 writers had two winners

On most file systems fsspec's `mode="create"` checks first and then writes: on local ones, 28 of 60 races had several
winners.  So only these three may `create`.  Bytes are copied more often than in `cloud`, and this needs the GIL.

Not promised: an atomic `put` (a reader of a folder may see half an object, which its digest shows), or few copies.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar, cast
from urllib.parse import urlsplit

from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import KeyExists, StoreError, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.store import Body, Buffer, Stream, plain_key, plain_prefix
from rendezvous.stores.race import race_writers
from rendezvous.stores.urls import plain_url

T = TypeVar("T")

OWN = "fsspec+"  # prefix of a URL that chooses this store, also for schemes that another client serves
CONTAINERS = ("abfs", "abfss")  # the part before "@" is a container: abfs://CONTAINER@ACCOUNT.dfs.core.windows.net
CREATES = ("S3FileSystem", "GCSFileSystem", "AzureBlobFileSystem")
RANGE = 16 << 20
_REFUSED = ("NoSuchBucket", "bucket does not exist", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken")
_EXISTS = ("PreconditionFailed", "pre-conditions")
_PAST_THE_END = ("InvalidRange", "range is not satisfiable")


class AdapterStore:
    def __init__(self, url: str, clock: Clock | None = None, **options: Any) -> None:
        bare = url.removeprefix(OWN)
        self._fs, root = _file_system(bare, options)
        self._root, self._clock = root.rstrip("/"), clock or SystemClock()
        self.url = url.removesuffix(bare) + url_without_secrets(bare)
        self._pid, self._checking, self._creates = os.getpid(), threading.Lock(), False

    def put(self, key: str, body: Body) -> None:
        if isinstance(body, Buffer) or "memory" in self._fs.protocol:  # memory:// shows incomplete files
            self._ask_files("write", key, lambda: self._write_file(key, bytes(body)))
        else:
            self._ask_files("write", key, lambda: self._write_stream(key, body))

    def _write_stream(self, key: str, body: Stream) -> None:
        path = self._path_of(key)
        with suppress(FileExistsError):  # file systems with real folders need this folder
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        file = self._fs.open(path, "wb", autocommit=False)  # the old object stays until `commit`
        try:
            for piece in body:
                file.write(piece)
        except BaseException:
            with suppress(Exception):  # otherwise the file's destructor would close it and publish half an object
                file.discard()
                file.closed = True
            raise
        file.close()
        file.commit()

    def create(self, key: str, body: Buffer) -> None:
        plain_key(key)
        self._check_creates()
        self._create_file(key, body)

    def get(self, key: str) -> bytes | None:
        return self._ask_files("read", key, lambda: self._read_file(self._path_of(key), layout.most_bytes(key) + 1))

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        out = out.cast("B")
        if not out:
            return bool(self._ask_files("read", key, lambda: self._fs.exists(self._path_of(key))))
        return all(self._get_range(key, out[i : i + RANGE], start + i) for i in range(0, len(out), RANGE))

    def _read_file(self, path: str, most: int) -> bytes:
        try:
            end = {} if most > layout.MOST_OF_FILES else {"start": 0, "end": most}
            return bytes(self._fs.cat_file(path, **end))
        except Exception as error:
            if _mentions(error, _PAST_THE_END):  # a range of an empty object
                return b""
            raise

    def _get_range(self, key: str, out: memoryview, start: int) -> bool:
        end = start + len(out)
        part = self._ask_files("read", key, lambda: self._fs.cat_file(self._path_of(key), start=start, end=end))
        if part is None or len(part) != len(out):
            return False
        out[:] = part
        return True

    def list(self, prefix: str) -> list[str]:
        folder = f"{self._root}/{plain_prefix(prefix).rpartition('/')[0]}".rstrip("/")
        found = self._ask_files("list", prefix, lambda: list(self._fs.find(folder))) or []
        keys = [path[len(self._root) + 1 :] for path in found]
        return sorted(key for key in keys if key.startswith(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask_files("delete", key, lambda key=key: self._fs.rm_file(self._path_of(key)))

    def __repr__(self) -> str:
        return f"AdapterStore({self.url!r})"

    def _path_of(self, key: str) -> str:
        return f"{self._root}/{plain_key(key)}"

    def _write_file(self, key: str, body: bytes) -> None:
        path = self._path_of(key)
        try:
            self._fs.pipe_file(path, body)
        except FileNotFoundError as error:  # a file system with real folders
            if _mentions(error, _REFUSED):
                raise
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._fs.pipe_file(path, body)

    def _create_file(self, key: str, body: Buffer) -> None:
        path = self._path_of(key)
        self._ask_files("create", key, lambda: self._fs.pipe_file(path, bytes(body), mode="create"))

    def _check_creates(self) -> None:
        """Raise StoreRefused unless the file system is in CREATES and a race has shown that only one writer wins."""
        name = type(self._fs).__name__
        if name not in CREATES:
            raise StoreRefused(
                f"{self.url}: {name} has no create-if-absent that can be trusted, so it can hold files but not a run. "
                "Use s3://, gs://, az://, hf://buckets/… or a folder"
            )
        with self._checking:
            if not self._creates and (reason := race_writers(_Unchecked(self), self._clock, rounds=3).why_unfit()):
                raise StoreRefused(f"{self.url} cannot carry a run: {reason}. Use another store")
            self._creates = True

    def _ask_files(self, verb: str, key: str, request: Callable[[], T]) -> T | None:
        """Return the answer; None for a missing object.   Raise a StoreError in place of the file system's error."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.url} was opened in process {self._pid}; after a fork, open it again or use spawn"
            )
        try:
            return request()
        except (FileNotFoundError, KeyError) as error:  # fsspec's memory:// raises KeyError
            if verb in ("read", "list", "delete") and not _mentions(error, _REFUSED):
                return None
            failure = explain_error(f"{self.url}/{key}", verb, error)
        except RuntimeError:
            raise  # an error in this code, not in the store
        except Exception as error:  # every file system has its own errors
            if verb == "read" and _mentions(error, _PAST_THE_END):
                return None
            failure = explain_error(f"{self.url}/{key}", verb, error)
        raise failure


def is_served(scheme: str) -> bool:
    """Whether fsspec is installed and knows this URL scheme."""
    try:
        from fsspec import available_protocols  # pyright: ignore[reportMissingTypeStubs]
    except ImportError:
        return False
    return scheme in available_protocols()


class _Unchecked(AdapterStore):
    """The same store, but `create` does not first check the file system: the check itself writes through it."""

    def __init__(self, store: AdapterStore) -> None:
        self.__dict__.update(store.__dict__)

    def create(self, key: str, body: Buffer) -> None:
        self._create_file(key, body)


def explain_error(where: str, verb: str, error: Exception) -> StoreError:
    if isinstance(error, FileExistsError) or _mentions(error, _EXISTS):
        return KeyExists(f"{where} exists")
    what = f"cannot {verb} {where}: {type(error).__name__} {_safe_words(error)}".rstrip()
    if _mentions(error, _REFUSED):
        advice = "Create the bucket, correct the URL, or renew the credentials and start again"
        return StoreRefused(f"{what}. {advice}")
    if isinstance(error, PermissionError):
        return StoreReadOnly(f"{what}. Give this user or key the right to read, write, list and delete there")
    return StoreUnclear(what)


def _mentions(error: Exception, words: Iterable[str]) -> bool:
    """Whether the text of the error, or of the client's error that caused it, contains one of these words."""
    texts = [str(e) for e in (error, error.__cause__, error.__context__) if e]
    return any(word in text for word in words for text in texts)


def _safe_words(error: Exception) -> str:
    """Return the error's text without URLs and without parts that may be keys."""
    said = (isinstance(error, OSError) and error.strerror) or str(error if any(error.args) else error.__cause__)
    return re.sub(r"\S*://\S+|[\w+/=-]{16,}", "…", said.split("\n")[0][:200])


def url_without_secrets(url: str) -> str:
    """Return the URL without its query, and without a password or token before "@"; an Azure container there stays."""
    parts = urlsplit(plain_url(url))
    user, _, host = parts.netloc.rpartition("@")
    place = parts.netloc if parts.scheme in CONTAINERS and ":" not in user else host
    return f"{parts.scheme}://{place}{parts.path.rstrip('/')}"


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Open the file system without caches, because other replicas' new files must be visible.

    Raise ImportError if fsspec is missing, ValueError for an unknown URL.
    """
    try:
        from fsspec.core import url_to_fs  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]
    except ImportError as error:
        raise ImportError(
            f"{urlsplit(url).scheme}:// needs fsspec: pip install 'serverless-diloco[serverless]'"
        ) from error
    find = cast("Callable[..., tuple[Any, str]]", url_to_fs)
    return find(url, use_listings_cache=False, skip_instance_cache=True, **options)
