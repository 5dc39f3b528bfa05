"""fsspec file systems as stores: data everywhere, registers on s3fs only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from rendezvous.clock import SystemClock
from rendezvous.errors import KeyExists, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.store import Store, put_once
from rendezvous.stores.adapter import AdapterStore, explain_error, url_without_secrets
from rendezvous.stores.open import open_store
from tests.rendezvous import test_store as contract
from tests.rendezvous.test_store import (  # noqa: F401  the part of the contract that needs no register
    test_a_stream_is_written_as_its_pieces_come,
    test_a_stream_that_breaks_off_passes_its_error_on_and_changes_nothing,
    test_bodies_of_every_size,
    test_delete_forgets_and_does_not_mind_what_is_missing,
    test_get_into_fills_the_buffer_or_says_no,
    test_list_is_sorted_and_by_prefix,
    test_put_and_get,
)
from tests.support.s3_server import S3Server

pytest.importorskip("fsspec")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    pytest.importorskip("s3fs")
    with S3Server(access_key="AKIDTEST") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.delenv("AWS_PROFILE", raising=False)
        yield server


@pytest.fixture(params=["s3", "memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_store("fsspec+s3://bucket/runs/demo")
    return open_store(f"fsspec+memory://{tmp_path}" if request.param == "memory" else f"fsspec+file://{tmp_path}")


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_file_system_without_exclusive_create_can_hold_no_run(scheme: str, tmp_path: Path) -> None:
    store = open_store(f"fsspec+{scheme}://{tmp_path}/x")
    with pytest.raises(StoreRefused, match=r"no create-if-absent.*files but not a run"):
        store.create("reg", b"one")
    assert store.get("reg") is None


@pytest.mark.slow
def test_s3fs_creates_once_after_it_was_checked(s3: S3Server) -> None:
    store = open_store("fsspec+s3://bucket/runs/demo")
    contract.test_create_writes_once(store)
    checks = s3.count("PutObject", "probe/")
    assert checks == 3 * 16 and store.list("probe/") == []
    store.create("empty", b"")
    with pytest.raises(KeyExists):
        store.create("empty", b"")
    assert s3.count("PutObject", "probe/") == checks, "checked once"
    contract.test_one_of_sixteen_threads_wins(store)


@pytest.mark.slow
def test_s3fs_over_a_store_that_overwrites_is_refused(s3: S3Server) -> None:
    s3.overwrites = True
    with pytest.raises(StoreRefused, match="silently overwrites: 16 of 16"):
        open_store("fsspec+s3://bucket/run").create("reg", b"one")


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["lost", "409", "503"])
def test_put_once_through_s3fs_survives(s3: S3Server, kind: str) -> None:
    store = open_store("fsspec+s3://bucket/run")
    store.create("warm", b"")
    s3.fault(kind, op="PutObject", key="reg$", times=2)
    assert put_once(store, SystemClock(), "reg", b"mine") == (True, b"mine")


def test_s3fs_does_not_make_buckets(s3: S3Server) -> None:
    store = open_store("fsspec+s3://none/run")
    for verb, request in (
        ("write", lambda: store.put("k", b"")),
        ("read", lambda: store.get("k")),
        ("create", lambda: store.create("k", b"")),
    ):
        with pytest.raises(StoreRefused, match=f"cannot {verb} .*Create the bucket"):
            request()
    assert not s3.count("CreateBucket")


def test_an_error_without_a_message_has_the_words_of_its_cause() -> None:
    """Ceph's gateway sends a code and no message, of which s3fs makes FileNotFoundError(None)."""
    error = FileNotFoundError(None)
    error.__cause__ = RuntimeError("An error occurred (NoSuchBucket) when calling the PutObject operation: None")
    assert "FileNotFoundError An error occurred (NoSuchBucket) when" in str(explain_error("s3://b/k", "create", error))


def test_s3fs_with_wrong_keys(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDWRONG")
    with pytest.raises(StoreRefused, match="credentials"):
        open_store("fsspec+s3://bucket/run").put("k", b"")


@pytest.mark.slow
def test_other_replicas_files_are_seen(s3: S3Server) -> None:
    ours, theirs = (open_store("fsspec+s3://bucket/run") for _ in range(2))
    assert ours.list("steps/") == [] and ours.get("steps/1") is None
    theirs.put("steps/1", b"x")
    assert ours.list("steps/") == ["steps/1"] and ours.get("steps/1") == b"x"


class Broken:
    """A file system that fails with `error` at every call."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> object:
        def fail(*args: object, **kwargs: object) -> None:
            raise self.error

        return fail


@pytest.mark.parametrize(
    ("error", "ours"),
    [
        (PermissionError(13, "Permission denied"), StoreReadOnly),
        (TimeoutError("slow"), StoreUnclear),
        (ConnectionResetError(104, "reset"), StoreUnclear),
        (Exception("token wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY at https://user:secret@host"), StoreUnclear),
    ],
)
def test_foreign_errors_become_ours_without_what_looks_secret(error: Exception, ours: type, tmp_path: Path) -> None:
    store = AdapterStore(f"file://{tmp_path}")
    store._fs = Broken(error)
    for request in (lambda: store.put("k", b""), lambda: store.get("k"), lambda: store.list("")):
        with pytest.raises(ours) as caught:
            request()
        assert "EXAMPLEKEY" not in str(caught.value) and "secret" not in str(caught.value)


def test_a_password_in_the_url_is_not_repeated() -> None:
    pytest.importorskip("fsspec")
    store = AdapterStore("memory://me:hunter2@host/folder")
    assert "hunter2" not in f"{store.url} {store!r}"


def test_another_process_must_open_it_again(tmp_path: Path) -> None:
    store = AdapterStore(f"file://{tmp_path}")
    store._pid -= 1
    with pytest.raises(RuntimeError, match="spawn"):
        store.get("k")


def test_the_url_of_a_store_opens_the_same_store_again() -> None:
    """`diloco stop` and the names of jobs know a run by the URL of its store alone."""
    pytest.importorskip("fsspec")
    assert AdapterStore("fsspec+memory://a/b/").url == "fsspec+memory://a/b"
    assert url_without_secrets("abfss://runs@me.dfs.core.windows.net/a/") == "abfss://runs@me.dfs.core.windows.net/a"
    for secret in ("memory://token@host/run", "memory://me:hunter2@host/run"):
        assert url_without_secrets(secret) == "memory://host/run"
    store = open_store("fsspec+memory://a/b")
    again = open_store(store.url)
    assert type(store) is type(again) is AdapterStore and store.url == again.url
