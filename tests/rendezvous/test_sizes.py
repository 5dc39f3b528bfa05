"""The memory that a bucket may cost its readers: a record's own limit, and no more."""

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rendezvous import layout
from rendezvous.agreement.membership import read_control
from rendezvous.errors import Corrupt
from rendezvous.records.records import Control, WireError
from rendezvous.records.tensors import read_tensors
from rendezvous.store import Store
from rendezvous.stores.adapter import AdapterStore
from rendezvous.stores.cloud.store import CloudStore
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.signed import SignedStore
from tests.support.s3_server import S3Server

LONG = 64 << 20
KEY = layout.control_key(1)


@pytest.fixture(params=["memory", "files", "s3", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "s3":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        with S3Server(access_key="AKIDTEST", buckets=("bucket",)) as server:
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            yield CloudStore("s3://bucket/run")
    else:
        made: dict[str, Callable[[], Store]] = {
            "memory": MemoryStore,
            "files": lambda: FileStore(tmp_path / "run"),
            "fsspec": lambda: AdapterStore(f"file://{tmp_path}/run"),
        }
        yield made[request.param]()


def test_a_record_that_is_too_long_is_not_read_to_its_end(store: Store) -> None:
    """A control record of 1.5 GB cost every reader 1.6 GB, under a run key 6.2 GB, and `stop` did not end."""
    first = Control(0, "n", 0.0, 3, 10, 2).encode()
    store.put(layout.control_key(0), first)
    store.put(KEY, bytes(LONG))
    body = store.get(KEY)
    assert body is not None and len(body) == layout.most_bytes(KEY) + 1
    with pytest.raises(WireError, match="at most 262144 are allowed"):
        Control.decode(body)
    assert store.get(layout.control_key(0)) == first
    assert read_control(store).replicas == 3  # passed over, like all that is not a record


def test_what_is_exactly_as_long_as_it_may_be_is_read_whole(store: Store) -> None:
    body = bytes(layout.most_bytes(KEY))
    store.put(KEY, body)
    assert store.get(KEY) == body
    store.put(KEY, b"")
    assert store.get(KEY) == b""


def test_files_that_a_record_names_are_read_whole(store: Store) -> None:
    key = layout.code_key("0" * 64, "prompts.jsonl")
    store.put(key, bytes(40 << 20))
    assert len(store.get(key) or b"") == 40 << 20


def test_under_a_run_key_a_long_record_costs_its_limit(tmp_path: Path) -> None:
    bare = FileStore(tmp_path / "run")
    bare.put(KEY, bytes(LONG))
    sealed = SignedStore(bare, b"k" * 16, "run", lambda *_, **__: None)
    tracemalloc.start()
    try:
        assert sealed.get(KEY) == b""
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_every_kind_of_record_has_its_limit_in_one_place() -> None:
    assert Control.most == layout.MOST_BYTES["control"]
    assert {*layout.MOST_BYTES} <= {layout.record_kind(key) for key in _KEYS}


_KEYS = [
    layout.RUN, layout.MODEL_MANIFEST, layout.offer_key(0, "r00", 0), layout.commit_key(0), layout.weights_key(0),
    layout.control_key(0), layout.log_key("r00", 1, 0), layout.bundle_key("r00", 0, 0, 0),
]  # fmt: skip


def test_a_header_that_is_absurd_is_not_parsed() -> None:
    """The header of a snapshot is read before its digest is known."""
    store = MemoryStore()
    header = b"[" * (5 << 20)
    body = len(header).to_bytes(8, "little") + header
    store.put("snapshots/x.safetensors", body)
    with pytest.raises(Corrupt, match="says that its header has"):
        read_tensors(store, "snapshots/x.safetensors", len(body))
