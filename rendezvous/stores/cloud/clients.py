"""The clients of a bucket: one set for each address and environment of this process.

After a refusal, the environment and ~/.aws/credentials are read again, so a running job uses a renewed token.

Not promised: use in a forked child of a process that has used a store (it would hang, so it raises an error).
"""

import hashlib
import os
import threading
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from obstore.store import AzureStore, GCSStore, S3Store

from rendezvous.stores.cloud.address import Address, check_settings, endpoint_of, plain_http
from rendezvous.stores.cloud.credentials import credentials_from_file, file_counts, note_refusal

if TYPE_CHECKING:
    from obstore.store import BackoffConfig, ClientConfig, RetryConfig

Bucket = S3Store | GCSStore | AzureStore
RETRY_FOR = timedelta(seconds=180)  # no retry of one request begins later


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
        self._address, self._endpoint, self._silence = address, endpoint_of(address), silence
        self._request_s = request_s  # time limit of one request of an upload, in seconds
        check_settings(address, self._endpoint)
        self._common: ClientConfig = {"connect_timeout": "5s", "allow_http": plain_http(self._endpoint)}

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


_home: list[int] = []  # the process whose threads serve the client


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


def clients_for(address: Address, silence_s: float, request_s: float) -> Clients:
    key = address, silence_s, request_s, _environment_digest()
    with _connecting:
        if key not in _open:
            _open[key] = Clients(address, timedelta(seconds=silence_s), request_s)
        return _open[key]


def forget_clients() -> None:
    """Forget all clients after a refusal, so that the next request reads the credentials again."""
    with _connecting:
        note_refusal()
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
    if file_counts():
        given["credential_provider"] = credentials_from_file
    return S3Store(address.bucket, prefix=prefix, client_options=client, retry_config=retry, **given)
