"""A bucket in the cloud, through obstore:  s3://  gs://  az://  and  hf://buckets/…  by its S3 gateway.

    create      one PUT with If-None-Match: *           never retried here: put_once must see every outcome
    put         one PUT up to 64 MiB, directly from the caller's memory; above, equal parts of 32 MiB, 8 at a time;
                smaller parts on a slow link, and before the link's first measurement (uplink.py)
                a Stream in parts of 8 MiB, 4 at a time; if it is interrupted, no object is visible
    get_into    GETs of 16 MiB, 16 at a time, into the caller's memory         three retries, as for all but create
                while bytes arrive, the limit is 12 hours: the usual time limit is on silence

    obstore's error                               our error
    AlreadyExists                                 KeyExists      (a 409 does not prove that an object is there:
                                                                 put_once reads the key)
    403, expired, no such bucket, quota full,     StoreRefused   with advice; the next request makes a new client
    a certificate, a page of HTML, …
    an error for which we have no advice          StoreUnclear   the request may have succeeded

obstore's own threads move the bytes, and hardly need the GIL.  After a refusal, the environment and ~/.aws/credentials
are read again, so a running job uses a renewed token.  An error text has the status, the code and our own words, and a
server's message only about a checksum: other texts of a server may quote keys or signed requests.

Not promised: use in a forked child of a process that has used a store (it would hang, so it raises an error); profiles
that need a command or a browser (export their keys); a complete `get` from a server that cuts an object short and gives
a wrong length (its digest shows it).
"""

import configparser
import hashlib
import ipaddress
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

from rendezvous import layout
from rendezvous.errors import KeyExists, StoreError, StoreFull, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.store import Body, Buffer, body_bytes, plain_key, plain_prefix
from rendezvous.stores.uplink import LEAST, REQUEST_S, Uplink
from rendezvous.stores.urls import plain_url

try:
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import AzureStore, GCSStore, S3Store
except ImportError as error:
    raise ImportError(
        "s3://, gs://, az:// and hf:// need obstore: pip install 'serverless-diloco[serverless]'"
    ) from error

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig, S3Credential

SMALL = 1 << 16  # a slow uplink that large blobs fill still sends this many bytes within one silence
SINGLE = 64 << 20
PART = 32 << 20
PARTS_AT_ONCE = 8
STREAMED, STREAMED_AT_ONCE, MOST_PARTS = 8 << 20, 4, 5000  # for a Stream: bytes per part, parts at once, limit of parts
RANGE = 16 << 20
RANGES_AT_ONCE = 16
RETRY_FOR = timedelta(seconds=180)  # no retry of one request begins later
BULK = 256  # at most so many keys per delete request: Azure's limit.  One missing key makes the whole request fail
HF_GATEWAY = "https://s3.hf.co"
OPTIONS = ("endpoint", "region")  # options that a URL's query may have; none is secret

Bucket = S3Store | GCSStore | AzureStore
T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Address of a bucket.   url: a URL without secrets, for messages."""

    scheme: str
    bucket: str
    prefix: str
    url: str
    endpoint: str = ""
    region: str = ""


class Clients:
    """Clients of one bucket, with different time limits and retries.

    for_registers    no retry
    for_reading      a limit on silence, and 12 hours while bytes arrive
    for_records      the same, and at most two silences
    for_small        uploads of up to SMALL bytes, such as heartbeats: a lost answer costs one silence
    for_writing      a limit for long uploads
    for_deleting     one request per key
    Each client is made at its first use, because that takes 6 ms and a view of a run only reads.
    """

    def __init__(self, address: Address, silence: timedelta, request_s: float) -> None:
        self._address, self._endpoint, self._silence = address, _endpoint_of(address), silence
        self._request_s = request_s  # time limit of one request of an upload, in seconds
        _check_settings(address, self._endpoint)
        self._common: ClientConfig = {"connect_timeout": "5s", "allow_http": _plain_http(self._endpoint)}

    @cached_property
    def for_registers(self) -> Bucket:
        return self._make_client({"timeout": self._silence}, retries=0)

    @cached_property
    def for_reading(self) -> Bucket:
        return self._make_client({"read_timeout": self._silence, "timeout": "12h"})

    @cached_property
    def for_records(self) -> Bucket:
        """Client that gives up after two silences: a view waits for one record before it asks for the next."""
        return self._make_client({"read_timeout": self._silence, "timeout": "12h"}, retry_for=1.5 * self._silence)

    @cached_property
    def for_small(self) -> Bucket:
        return self._make_client({"timeout": self._silence})

    @cached_property
    def for_writing(self) -> Bucket:
        return self._make_client({"timeout": timedelta(seconds=self._request_s)})

    @cached_property
    def for_deleting(self) -> Bucket:
        """Client that deletes by one request for each key."""
        return self._make_client({"read_timeout": self._silence, "timeout": "600s"}, bulk=False)

    def _make_client(
        self, patience: "ClientConfig", retries: int = 3, bulk: bool = True, retry_for: timedelta = RETRY_FOR
    ) -> Bucket:
        backoff: BackoffConfig = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5)}
        retry: RetryConfig = {"max_retries": retries, "retry_timeout": retry_for, "backoff": backoff}
        return _connect_bucket(self._address, self._endpoint, {**self._common, **patience}, retry, bulk)


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
        return _is_loopback(urlsplit(_endpoint_of(self.address)).hostname or "")

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
            clients = _clients_for(self.address, self._silence_s, self._uplink.request_s)
            _ = clients.for_reading  # all take the same address and options
            return clients
        except BaseError as error:
            why = _in_words(error)
        files = " and ".join(name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(name))
        if files and "builder error" in why:
            advice = f"{files} is set: no certificate in PEM (-----BEGIN CERTIFICATE-----) was found there"
        else:
            advice = _keys_of(self.address.scheme)
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
                f"keys, the region or the endpoint. {_keys_of(self.address.scheme)}"
            )
        if isinstance(failure, StoreRefused):
            _forget_clients()
        if failure is not None:
            raise failure  # outside `except`, so that no traceback shows the client's text with a signed request
        return None


def _heeding_signals(request: Callable[[], T]) -> T:
    """Make a request of the main thread in another one, because obstore holds back Ctrl-C and SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        return request()
    try:
        future = _thread_pool().submit(request)
    except RuntimeError:  # the process ends: Python starts no thread any more, and a script offers its last work
        return request()
    return future.result()


def _read_object(bucket: Bucket, key: str) -> bytes:
    """Return the object.  If the object is too long, return one byte more than allowed and close the connection."""
    most = layout.most_bytes(key)
    found = bucket.get(key)
    if found.attributes.get("Content-Type", "").startswith("text/html") and layout.content_type(key) is None:
        raise StoreRefused(f"cannot read {key}: {_not_a_store()}")
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


# ---------------------------------------------------------------------- the URL


def parse_address(url: str) -> Address:
    """Parse the URL of a bucket.   Raise ValueError for a wrong URL; the error's text has no possible secrets."""
    plain_url(url)
    try:
        parts = urlsplit(url)
        plain = parts.netloc.rpartition("@")[2]
        secret = "@" in parts.netloc
        query = dict(parse_qsl(parts.query))
    except ValueError:
        raise ValueError("this URL cannot be read; write s3://bucket/prefix") from None
    where = f"{parts.scheme}://{plain}{parts.path.rstrip('/')}"
    if secret or set(query) - set(OPTIONS) or "@" in query.get("endpoint", ""):
        raise ValueError(
            f"{where}: the URL of a run is written into logs and records, so it may not carry credentials or options "
            f"other than {' and '.join(OPTIONS)}. {_keys_of(parts.scheme)}"
        )
    bucket = plain
    prefix = parts.path.strip("/")
    endpoint = query.get("endpoint", "")
    if parts.scheme == "hf":
        bucket, prefix, endpoint = _parse_hf(where, f"{plain}{parts.path}", endpoint)
    if not bucket:
        raise ValueError(f"{where}: the bucket is missing; write {parts.scheme}://bucket/prefix")
    kept = f"?{urlencode(query, safe=':/')}" if query else ""
    return Address(parts.scheme, bucket, prefix, f"{where}{kept}", endpoint, query.get("region", ""))


def _parse_hf(where: str, path: str, endpoint: str) -> tuple[str, str, str]:
    kind, namespace, bucket, prefix = [*path.strip("/").split("/", 3), "", "", ""][:4]
    if kind != "buckets" or not bucket:
        raise ValueError(f"{where}: on the Hub, a run must be in a bucket; write hf://buckets/namespace/bucket/prefix")
    gateway = endpoint or os.environ.get("HF_S3_ENDPOINT") or HF_GATEWAY
    return bucket, prefix, f"{gateway.rstrip('/')}/{namespace}"


_ENDPOINT_ENV = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}


_ENDPOINT = re.compile(r"https?://([^/@]*@)?(\[[\da-fA-F:.]+\]|[^][/:@\s]+)(:\d{1,5})?(/\S*)?")


def _endpoint_of(address: Address) -> str:
    """Return the server that the URL's `endpoint` or the environment names; "" for the cloud's own server."""
    named = _ENDPOINT_ENV.get(address.scheme, ())
    return address.endpoint or next((os.environ[n] for n in named if os.environ.get(n)), "")


def _plain_http(endpoint: str) -> bool:
    """Whether the endpoint uses http.   Raise ValueError if the run would be sent unencrypted without permission."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http":
        return False
    if _is_loopback(parts.hostname or "") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        return True
    raise ValueError(
        f"http://{parts.hostname} would carry the run unencrypted; use https, or set AWS_ALLOW_HTTP=true if you mean it"
    )


def _check_settings(address: Address, endpoint: str) -> None:
    """Raise ValueError for a setting with which obstore panics, signs wrongly, or asks another server than aws does."""
    read = {"s3": ("AWS_", "HF_S3"), "az": ("AZURE_STORAGE_",)}.get(address.scheme, ())
    for name, value in os.environ.items():
        if name.startswith(read) and not (value.isprintable() and value == value.strip()):
            raise ValueError(
                f"the variable {name} begins or ends with a blank, or has a line break: set it again, without"
            )
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        shown = endpoint.rpartition("@")[2]
        raise ValueError(f"the endpoint {shown!r} is not a URL: write http://HOST:PORT, or https://HOST:PORT")
    if address.scheme == "s3" and not endpoint and (named := _profile_in(_aws_file("CONFIG")).get("endpoint_url")):
        raise ValueError(
            f"~/.aws/config names the endpoint {named.rpartition('@')[2]!r}. Other machines' replicas do not have "
            f"that file, so it is not used: set AWS_ENDPOINT_URL, or write {address.url.partition('?')[0]}?endpoint=…"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------------- one client per process

_home: list[int] = []  # the process whose threads serve the client
_refusals = 0
_began = time.time()


def stay_home() -> None:
    """Raise RuntimeError in a forked child: the client's threads do not exist there, and a request would hang."""
    _home[:] = _home or [os.getpid()]
    if _home[0] != os.getpid():
        raise RuntimeError(
            f"process {os.getpid()} was forked from {_home[0]}, which had used a cloud store already; its client would "
            "hang here. Start processes with multiprocessing.get_context('spawn'), and keep the store out of "
            "DataLoader workers"
        )


def _environment_digest() -> str:
    """Return a digest of the environment variables on which a client depends, so that no secret is stored."""
    names = sorted(n for n in os.environ if n.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_S3")))
    text = "\0".join(f"{n}={os.environ[n]}" for n in names)
    return hashlib.sha256(text.encode()).hexdigest()


_connecting = threading.Lock()
_open: dict[tuple[Address, float, float, str], Clients] = {}


def _clients_for(address: Address, silence_s: float, request_s: float) -> Clients:
    key = address, silence_s, request_s, _environment_digest()
    with _connecting:
        if key not in _open:
            _open[key] = Clients(address, timedelta(seconds=silence_s), request_s)
        return _open[key]


def _forget_clients() -> None:
    """Forget all clients after a refusal, so that the next request reads the credentials again."""
    global _refusals
    with _connecting:
        _refusals += 1
        _open.clear()


def _connect_bucket(
    address: Address, endpoint: str, client: "ClientConfig", retry: "RetryConfig", bulk: bool = True
) -> Bucket:
    prefix = address.prefix or None
    if address.scheme == "gs":
        server: dict[str, Any] = {"base_url": endpoint} if endpoint else {}
        return GCSStore(address.bucket, prefix=prefix, client_options=client, retry_config=retry, **server)
    given: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if address.scheme == "az":
        return AzureStore(address.bucket, prefix=prefix, client_options=client, retry_config=retry, **given)
    if not bulk:
        given["disable_bulk_delete"] = True
    if region := address.region or ("us-east-1" if address.scheme == "hf" else ""):
        given["region"] = region
    if _file_counts():
        given["credential_provider"] = credentials_from_file
    return S3Store(address.bucket, prefix=prefix, client_options=client, retry_config=retry, **given)


@cache
def _thread_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(RANGES_AT_ONCE, thread_name_prefix="store")


# ---------------------------------------------------------------------- credentials


def _aws_file(kind: str) -> Path:
    """Return the path of a file of AWS's own tools.   kind: SHARED_CREDENTIALS or CONFIG."""
    named = os.environ.get(f"AWS_{kind}_FILE")
    return Path(named or os.path.expanduser("~/.aws/" + ("config" if kind == "CONFIG" else "credentials")))


def _file_counts() -> bool:
    """Whether to use the credentials file.

    Keys in the environment come first, unless a request was refused and the file is newer than this process.
    """
    try:
        written = _aws_file("SHARED_CREDENTIALS").stat().st_mtime
    except OSError:
        return False
    in_environment = os.environ.get("AWS_ACCESS_KEY_ID") or os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE")
    return (not in_environment or (_refusals > 0 and written > _began)) and bool(_read_profile())


def _read_profile() -> dict[str, str]:
    found = _profile_in(_aws_file("SHARED_CREDENTIALS"))
    return found if "aws_access_key_id" in found and "aws_secret_access_key" in found else {}


def _profile_in(path: Path) -> dict[str, str]:
    """Return the settings of AWS_PROFILE in this file; {} without them."""
    file = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeError):
        file.read(path)
    name = os.environ.get("AWS_PROFILE") or "default"
    section = f"profile {name}" if f"profile {name}" in file else name
    return dict(file[section]) if section in file else {}


def credentials_from_file() -> "S3Credential":
    """Return the file's keys.  obstore calls this again 10 s later: it replaces keys that expire within 5 minutes."""
    profile = _read_profile()
    return {
        "access_key_id": profile.get("aws_access_key_id", ""),
        "secret_access_key": profile.get("aws_secret_access_key", ""),
        "token": profile.get("aws_session_token"),
        "expires_at": datetime.now(UTC) + timedelta(minutes=5, seconds=10),
    }


# ---------------------------------------------------------------------- errors

_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}
_WRONG_KEYS = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed", "InvalidAuthenticationInfo"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_LATER = {"408", "425", "429"}  # statuses that ask for a later request
_FULL = {"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage"}
_CERTIFICATE = {  # rustls's word -> what is wrong, and what you can do
    "UnknownIssuer": "no authority that is known here has signed it. Name a file with your organisation's authority in "
    "SSL_CERT_FILE, or a folder in SSL_CERT_DIR (AWS_CA_BUNDLE and REQUESTS_CA_BUNDLE are not read)",
    "CaUsedAsEndEntity": "it is an authority's own. Give the server one of CA:FALSE that this authority has signed, "
    "and name the authority's in SSL_CERT_FILE",
    "Expired": "it has expired. Renew it on the server, or set this machine's clock",
    "NotValidForName": "it is another host's. Write the name that it is for into the endpoint",
}
_NO_CONNECTION = {"dns error": "there is no host of that name", "TunnelUnsuccessful": "the proxy refuses it"}
_METADATA = ("169.254.169.254", "metadata.google.internal")  # clients try them last, if they find no credentials


def explain_error(address: Address, verb: str, key: str, error: Exception, missing: bool = False) -> StoreError | None:
    """Return our error for an error of obstore; None for a missing object, if `missing` allows it."""
    text = str(error)
    status = _first_match(r"status code: (\d{3})", text)
    code = _first_match(r"<Code>(\w+)</Code>", text)
    place = f"{address.url.partition('?')[0]}/{key}"
    where = f"cannot {verb} {place}: {' '.join(s for s in (status, code) if s) or _in_words(error)}"
    past_the_end = status == "416" or "Wanted range starting at" in text  # the latter is obstore's own text
    if missing and code not in _NO_BUCKET and (isinstance(error, FileNotFoundError) or past_the_end):
        return None
    if isinstance(error, AlreadyExistsError) and verb == "create":  # for a plain write a 409 means: try again
        return KeyExists(f"{place} exists: {status} {code}")
    if code in _FULL or status == "507":
        return StoreFull(f"{where}. Free some space, or raise the bucket's quota")
    advice = _next_thing_to_do(address, verb, status, code, text)
    if advice and code == "AccessDenied" and verb in ("write", "create", "delete"):
        return StoreReadOnly(f"{where}. {advice}")
    return StoreRefused(f"{where}. {advice}") if advice else StoreUnclear(where)


def _next_thing_to_do(address: Address, verb: str, status: str, code: str, text: str) -> str:
    """Return advice on the next thing to do; "" if a retry may help."""
    if any(host in text for host in _METADATA):
        export = (
            '; `eval "$(aws configure export-credentials --format env)"` sets those of a login, a role or a command'
        )
        return f"No credentials were found. {_keys_of(address.scheme)}{export if address.scheme == 's3' else ''}"
    if bad := "".join(_first_match(r"InvalidCertificate\(([\w(\s]+)", text).split()):
        why = next((said for word, said in _CERTIFICATE.items() if word in bad), f"it is not valid ({bad})")
        return f"The server's certificate is refused: {why}"
    if status == "407":
        return "The proxy wants a name and a password: set HTTPS_PROXY=http://NAME:PASSWORD@HOST:PORT (or HTTP_PROXY)"
    is_page = not code and re.search(r"(?i)<html|<!doctype html", text)
    if is_page and (status[:1] in ("3", "4") or status == "511") and status not in _LATER:
        return _not_a_store()
    if "Failed to read token file" in text:
        return "AWS_WEB_IDENTITY_TOKEN_FILE must name a file that this process can read"
    if code in _NO_BUCKET:
        return f"There is no bucket {address.bucket!r}: create it ({_how_to_create(address)}) or correct the URL"
    if code in _EXPIRED:
        return f"The token has expired or is not valid: renew it; the run continues. {_how_to_renew(address.scheme)}"
    if code == "RequestTimeTooSkewed":
        return "This machine's clock is wrong: set it (`timedatectl set-ntp true`)"
    if status == "301" or code in _WRONG_REGION:
        return "The bucket is in another region: set AWS_REGION to it"
    if "checksum" in text or "Content-MD5" in text:
        said = _first_match(r"<Message>([^<]{1,200})</Message>", text)
        return f"Set AWS_CHECKSUM_ALGORITHM=sha256: this bucket demands a checksum with each write. It said: {said!r}"
    if status == "501" and verb == "create":
        return "This store has no create-if-absent (If-None-Match), which every run needs: use another store"
    if status == "501":
        return "This store lacks the request; `diloco doctor URL` shows what it can do"
    if status in ("401", "403") or code in _WRONG_KEYS or text.startswith("The operation lacked "):
        return f"The store does not let this key {verb} there. {_keys_of(address.scheme)}"
    return ""


def _not_a_store() -> str:
    return (
        f"A page of HTML answered, and no store: the endpoint is another server's address, or a proxy, a firewall or a "
        f"login page is in between{_proxy()}. Open the endpoint in a browser on this machine, or name it in NO_PROXY"
    )


def _keys_of(scheme: str) -> str:
    if scheme == "gs":
        return (
            "Set GOOGLE_APPLICATION_CREDENTIALS to a key file, or run `gcloud auth application-default login`; "
            "the role is Storage Object User"
        )
    if scheme == "az":
        return "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN)"
    whose = "S3 keys of your Hugging Face namespace" if scheme == "hf" else "`aws sts get-caller-identity` shows whose"
    return (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN) or write ~/.aws/credentials "
        f"({whose}); they need to get, put, delete and list there"
    )


def _how_to_renew(scheme: str) -> str:
    if scheme in ("s3", "hf"):
        return "Write the new keys to ~/.aws/credentials: a running replica reads it again at every try"
    return _keys_of(scheme)


def _how_to_create(address: Address) -> str:
    if address.scheme == "gs":
        return f"`gcloud storage buckets create gs://{address.bucket}`"
    if address.scheme == "az":
        return f"`az storage container create -n {address.bucket}`"
    return "on huggingface.co" if address.scheme == "hf" else f"`aws s3 mb s3://{address.bucket}`"


def _proxy() -> str:
    """Return " (HTTPS_PROXY is set)" if the environment names a proxy; else "".   Its value may hold a password."""
    names = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")
    found = [name for name in names if os.environ.get(name)]
    return f" ({', '.join(found)} {'is' if len(found) == 1 else 'are'} set)" if found else ""


def _in_words(error: Exception) -> str:
    """Return a text for an error that has no status, without URLs (but the server's) and without possible keys."""
    text = str(error)
    if kind := _first_match(r"kind: (Connect|Timeout|Interrupted)", text):
        server = _first_match(r"Error performing \w+ (https?://[^/?@\s]+)[/?]", text)
        why = next((f": {said}" for word, said in _NO_CONNECTION.items() if word in text), "")
        words = {"Connect": "no connection", "Timeout": "no answer in time"}.get(kind, "the connection broke")
        return f"{words}{f' ({server})' if server else ''}{why}{_proxy()}"
    if "HTTP error" in text:
        return "the connection broke"
    line = re.split(r"\n|<\?xml|Server returned", text)[0][:200]
    line = re.sub(r"\S*://\S+", "…", line)
    return re.sub(r"[\w+/=-]{16,}", "…", line).strip() or type(error).__name__


def _first_match(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
