"""The store contract, put_once and bad days on S3: our faulty server, and moto as a second opinion."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rendezvous.clock import SystemClock
from rendezvous.errors import GaveUp, KeyExists, StoreError, StoreFull, StoreReadOnly, StoreRefused, StoreUnclear
from rendezvous.store import PatientStore, Store, put_once
from rendezvous.stores.cloud import clients, credentials
from rendezvous.stores.cloud import store as cloud
from rendezvous.stores.cloud.refusals import explain_error, in_words
from rendezvous.stores.cloud.store import CloudStore
from rendezvous.stores.open import open_store
from rendezvous.stores.uplink import FIRST, LEAST, Uplink
from tests.rendezvous.test_store import (  # noqa: F401  the contract, run here on this file's `store`
    test_a_stream_is_written_as_its_pieces_come,
    test_a_stream_that_breaks_off_passes_its_error_on_and_changes_nothing,
    test_bodies_of_every_size,
    test_create_writes_once,
    test_delete_forgets_and_does_not_mind_what_is_missing,
    test_get_into_fills_the_buffer_or_says_no,
    test_list_is_sorted_and_by_prefix,
    test_one_of_sixteen_threads_wins,
    test_put_and_get,
)
from tests.support.fakes import ManualClock
from tests.support.s3_server import S3Server

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
TOKEN = "FwoGZXIvYXdzEXAMPLETOKEN1234567890"


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_S3"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(access_key="AKIDTEST", buckets=("bucket", "runs")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """moto looks whether a key is there and then writes it, in two steps; here no other request comes between."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    from moto.s3.responses import S3Response

    two_steps, lock = S3Response.put_object, threading.Lock()

    def in_one(self: S3Response) -> Any:
        with lock:
            return two_steps(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Response, "put_object", in_one)
        server.start()
        yield "http://{}:{}".format(*server.get_host_and_port())
        server.stop()


@pytest.fixture(params=["ours", "ours, two keys a page", "gs", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    if request.param == "moto":
        import boto3

        endpoint = request.getfixturevalue("moto")
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        bucket = f"b{os.urandom(4).hex()}"
        boto3.client("s3", endpoint_url=endpoint).create_bucket(Bucket=bucket)
        yield CloudStore(f"s3://{bucket}/runs/demo")
        return
    s3: S3Server = request.getfixturevalue("s3")
    s3.page = 2 if "page" in request.param else 1000
    yield open_store("s3://bucket/runs/demo") if request.param != "gs" else google(s3, tmp_path, monkeypatch)


def google(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """We send Google's XML API the same requests as S3, except for the header of an exclusive create."""
    s3.access_key = None
    account = {"gcs_base_url": s3.endpoint, "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    monkeypatch.setattr(clients, "plain_http", lambda endpoint: True)
    return open_store("gs://bucket/runs/demo")


def at(url: str = "s3://bucket/run", silence_s: float = 30.0) -> CloudStore:
    return CloudStore(url, silence_s)


# ---------------------------------------------------------------------- requests


def test_a_key_and_a_folder_of_that_name_stand_side_by_side(s3: S3Server) -> None:
    store = at()
    for key in ("a", "a/b", "a b/ü", "a%20b"):
        store.put(key, key.encode())
    assert store.list("") == sorted(["a", "a/b", "a b/ü", "a%20b"])
    assert [store.get(k) for k in store.list("")] == [k.encode() for k in store.list("")]


def test_big_objects_go_in_equal_parts_and_come_in_ranges(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SINGLE", 6 << 20)
    monkeypatch.setattr(cloud, "PART", 5 << 20)
    monkeypatch.setattr(cloud, "RANGE", 1 << 20)
    store, body = at(), os.urandom(13 << 20)
    store.put("small", memoryview(body)[: 6 << 20])
    assert s3.count("UploadPart") == 0
    store.put("big", body)
    assert s3.count("UploadPart", "big") == 3 and s3.count("PutObject", "big") == 0
    out = bytearray(len(body) - 10)
    assert store.get_into("big", memoryview(out), 10) and out == body[10:]
    assert s3.count("GetObject", "big") == 13
    assert not store.get_into("big", memoryview(out), 11), "one byte past the end"
    assert not store.get_into("none", memoryview(out))


def test_where_many_cannot_be_deleted_at_once_they_are_deleted_one_by_one(s3: S3Server) -> None:
    s3.fault("501", op="DeleteObjects", times=100)
    store = at()
    for key in "abc":
        store.put(key, b"x")
    store.delete(["a", "never", "b"])
    asked = s3.count("DeleteObjects")
    assert store.list("") == ["c"] and asked > 0 and s3.count("DeleteObject$") == 3
    store.delete(["c"])
    assert store.list("") == [] and s3.count("DeleteObjects") == asked, "it does not ask again for what the store lacks"


def test_a_failed_big_upload_leaves_nothing(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "SINGLE", 1 << 20)
    monkeypatch.setattr(cloud, "PART", 5 << 20)
    s3.fault("403", op="UploadPart", times=100)
    with pytest.raises(StoreReadOnly):
        at().put("big", bytes(8 << 20))
    assert s3.uploads == {} and at().get("big") is None


def test_create_asks_exactly_once(s3: S3Server) -> None:
    for kind in ("500", "503", "409", "lost", "dropped"):
        s3.fault(kind, op="PutObject", key=f"{kind}$")
        with pytest.raises(KeyExists if kind == "409" else StoreUnclear):
            at().create(kind, b"x")
        assert s3.count("PutObject", f"{kind}$") == 1
        assert at().get(kind) == (b"x" if kind == "lost" else None)


@pytest.mark.parametrize("kind", ["500", "503", "dropped", "lost"])
def test_data_is_asked_for_again(s3: S3Server, kind: str) -> None:
    store = at()
    store.put("warm", b"")
    s3.fault(kind, times=2)
    store.put("k", b"body")
    s3.fault(kind, times=2)
    assert store.get("k") == b"body"
    s3.fault(kind, op="ListObjectsV2", times=2)
    assert store.list("") == ["k", "warm"]


@pytest.mark.parametrize("kind", ["truncated", "short"])
def test_a_cut_range_never_passes_for_a_whole_one(s3: S3Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "RANGE", 1 << 20)
    store, body = at(), os.urandom(5 << 20)
    store.put("k", body)
    s3.fault(kind, op="GetObject", times=3)
    patient, out = PatientStore(store, SystemClock(), 20.0), bytearray(len(body))
    assert patient.get_into("k", memoryview(out)) and out == body
    assert not s3.faults[0].times


def test_no_thread_writes_into_the_buffer_after_a_failure(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud, "RANGE", 1 << 20)
    store, out = at(), bytearray(8 << 20)
    store.put("k", b"\1" * len(out))
    s3.fault("403", op="GetObject")
    s3.fault("slow", op="GetObject", times=100, seconds=0.1)
    with pytest.raises(StoreRefused):
        store.get_into("k", memoryview(out))
    seen = bytes(out)
    time.sleep(0.4)
    assert out == seen


def test_redirects_are_followed_when_reading(s3: S3Server) -> None:
    at().put("elsewhere", b"0123456789")
    s3.fault("302", op="GetObject", key="k$", times=2, location=f"{s3.endpoint}/bucket/run/elsewhere")
    assert at().get("k") == b"0123456789"
    out = bytearray(3)
    assert at().get_into("k", memoryview(out), 4) and out == b"456"
    s3.fault("302", op="PutObject", location=f"{s3.endpoint}/bucket/run/elsewhere")
    with pytest.raises(StoreUnclear, match="302"):
        at().create("k", b"x")


def test_a_silent_store_is_not_waited_for_for_ever(s3: S3Server) -> None:
    store = at(silence_s=1.0)
    answered = threading.Event()
    s3.fault("slow", op="PutObject", until=answered)
    with pytest.raises(StoreUnclear, match="no answer in time"):
        store.create("k", b"x")
    s3.fault("slow", op="GetObject", until=answered)
    assert store.get("k") in (b"x", None) and s3.count("GetObject") >= 2
    assert not answered.is_set(), "both came back while the store was silent"
    answered.set()


def test_a_view_gives_up_after_two_silences(s3: S3Server) -> None:
    """Seen with a server that accepts and never answers: every command took 123 s, four silences of 30 s."""
    answered = threading.Event()
    s3.fault("slow", op="GetObject|ListObjects", until=answered, times=10**9)
    for ask in (lambda at: at.get("k"), lambda at: at.list("")):
        before = s3.count("GetObject") + s3.count("ListObjectsV2")
        with pytest.raises(StoreUnclear, match="no answer in time"):
            ask(at(silence_s=1.0))
        assert s3.count("GetObject") + s3.count("ListObjectsV2") == before + 2
    answered.set()


def test_the_lost_answer_to_a_small_write_costs_one_silence(s3: S3Server) -> None:
    """Seen with tinyproxy, which kept some answers: a heartbeat or a log stood still for 120 s."""
    answered = threading.Event()
    s3.fault("slow", op="PutObject", until=answered)
    at(silence_s=0.5).put("beat", b"x")
    assert s3.count("PutObject") == 2 and not answered.is_set()
    answered.set()


def test_a_store_knows_how_long_a_request_takes(s3: S3Server) -> None:
    store = at()
    s3.latency_s = 0.2
    store.get("k")
    assert store.request_s >= 0.2


def test_a_server_without_conditional_writes_is_refused_in_words(s3: S3Server) -> None:
    """OpenStack Swift's s3api answers so."""
    s3.fault("501", op="PutObject", times=100)
    with pytest.raises(StoreRefused, match=r"has no create-if-absent .*use another store"):
        at().create("k", b"")
    with pytest.raises(StoreRefused, match="lacks the request; `diloco doctor URL`"):
        at().put("k", b"")


def test_an_unreachable_server_is_unclear() -> None:
    with pytest.raises(StoreUnclear, match=r"cannot create s3://b/run/k: no connection \(http://127.0.0.1:9\)"):
        at("s3://b/run?endpoint=http://127.0.0.1:9").create("k", b"")


def test_hugging_face_buckets_speak_s3(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cloud.parse_address("hf://buckets/team/runs/demo/1").endpoint == "https://s3.hf.co/team"
    with S3Server(access_key="AKIDTEST", buckets=("runs",), base="/team") as gateway:
        monkeypatch.setenv("HF_S3_ENDPOINT", gateway.endpoint.removesuffix("/team"))
        store = open_store("hf://buckets/team/runs/demo/1")
        assert store.url == "hf://buckets/team/runs/demo/1"
        store.create("reg", b"one")
        with pytest.raises(KeyExists):
            store.create("reg", b"two")
        assert store.get("reg") == b"one" and store.list("") == ["reg"]
        assert gateway.requests[0] == ("PutObject", "demo/1/reg") and not s3.requests


# ---------------------------------------------------------------------- put_once under faults


def race(store: Store, key: str, writers: int = 16) -> list[tuple[bool, bytes]]:
    gate, results = threading.Barrier(writers), list[tuple[bool, bytes]]()

    def run(n: int) -> None:
        gate.wait()
        results.append(put_once(store, SystemClock(), key, b"%d %s" % (n, os.urandom(8).hex().encode())))

    threads = [threading.Thread(target=run, args=(n,)) for n in range(writers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


@pytest.mark.parametrize(
    "kinds", [("lost",), ("409",), ("503",), ("dropped",), ("lost", "409", "503", "500", "dropped")]
)
def test_sixteen_writers_agree_whatever_happens_to_their_requests(s3: S3Server, kinds: tuple[str, ...]) -> None:
    store = at()
    for n in range(4):
        for kind in kinds:
            s3.fault(kind, op="PutObject", key=f"reg/{n}$", times=3)
            s3.fault(kind, op="PutObject", key=f"reg/{n}$", times=20, probability=0.3)
        results = race(store, f"reg/{n}")
        assert len(results) == 16 and len({value for _, value in results}) == 1
        assert sum(won for won, _ in results) == 1


def test_sixteen_writers_agree_on_moto(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    boto3.client("s3", endpoint_url=moto).create_bucket(Bucket="race")
    for n in range(3):
        results = race(at("s3://race"), f"reg/{n}")
        assert len({value for _, value in results}) == 1 and sum(won for won, _ in results) == 1


def test_a_lost_first_write_is_mine(s3: S3Server) -> None:
    s3.fault("lost", op="PutObject")
    assert put_once(at(), ManualClock(), "r", b"mine") == (True, b"mine")
    s3.fault("409", op="PutObject", times=2)
    assert put_once(at(), ManualClock(), "r2", b"mine") == (True, b"mine"), "a 409 is nobody's victory"


# ---------------------------------------------------------------------- what a person has to mend

REFUSALS = [
    ("403", "", StoreReadOnly, "AccessDenied.*AWS_ACCESS_KEY_ID"),
    ("404", "", StoreRefused, "no bucket 'bucket': create it .`aws s3 mb s3://bucket`"),
    ("expired", "", StoreRefused, "expired.*renew it; the run continues.*credentials"),
    (
        "403",
        "<Error><Code>InvalidAccessKeyId</Code></Error>",
        StoreRefused,
        "InvalidAccessKeyId.*AWS_SECRET_ACCESS_KEY",
    ),
    ("403", "<Error><Code>RequestTimeTooSkewed</Code></Error>", StoreRefused, "clock is wrong"),
    ("500", "<Error><Code>QuotaExceeded</Code></Error>", StoreFull, "Free some space"),
    ("403", "<Error><Code>AuthorizationHeaderMalformed</Code></Error>", StoreRefused, "AWS_REGION"),
]


@pytest.mark.parametrize(("kind", "body", "error", "words"), REFUSALS)
def test_a_refusal_says_what_to_do(s3: S3Server, kind: str, body: str, error: type, words: str) -> None:
    s3.bodies = [body] if body else []
    s3.fault(kind, op="PutObject")
    with pytest.raises(error, match=f"cannot create s3://bucket/run/k.*{words}"):
        at().create("k", b"x")


@pytest.mark.parametrize("verb", ["put", "create", "get", "get_into", "list", "delete"])
def test_every_verb_notices_a_missing_bucket_and_wrong_keys(s3: S3Server, verb: str, monkeypatch: Any) -> None:
    out = memoryview(bytearray(1))
    args = {
        "put": ("k", b""),
        "create": ("k", b""),
        "get": ("k",),
        "get_into": ("k", out),
        "list": ("",),
        "delete": (["k"],),
    }
    with pytest.raises(StoreRefused, match="no bucket 'none'"):
        getattr(at("s3://none/run"), verb)(*args[verb])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDWRONG")
    with pytest.raises(StoreRefused, match=r"InvalidAccessKeyId.*AWS_ACCESS_KEY_ID"):
        getattr(at(), verb)(*args[verb])


def test_no_credentials_at_all(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(StoreRefused, match=r"cannot open s3://bucket/run: .*Set AWS_ACCESS_KEY_ID"):
        at()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    error = explain_error(
        cloud.parse_address("s3://b/run"),
        "read",
        "k",
        OSError("Error performing PUT http://169.254.169.254/latest/api/token in 1ms"),
    )
    assert isinstance(error, StoreRefused) and "No credentials were found. Set AWS_ACCESS_KEY_ID" in str(error)


@pytest.mark.slow
def test_a_token_file_that_is_not_there_is_named(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/x")
    with pytest.raises(StoreRefused, match="AWS_WEB_IDENTITY_TOKEN_FILE must name a file"):
        at().get("k")


def test_a_token_that_expires_is_waited_for(s3: S3Server) -> None:
    said = list[str]()
    store = PatientStore(at(), SystemClock(), 60.0, on_trouble=said.append)
    store.put("before", b"1")
    s3.expired = True
    threading.Timer(1.5, setattr, (s3, "expired", False)).start()
    assert put_once(store, SystemClock(), "reg", b"mine") == (True, b"mine")
    assert store.get("before") == b"1"
    assert said and "renew it; the run continues" in said[0] and "trying again until 60 s" in said[0]


def test_renewed_keys_are_taken_from_the_file(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = at()
    store.put("k", b"v")
    s3.access_key = "AKIDNEW"
    with pytest.raises(StoreRefused):
        store.get("k")
    (tmp_path / "credentials").write_text(
        f"[default]\naws_access_key_id = AKIDNEW\naws_secret_access_key = {SECRET}\naws_session_token = {TOKEN}\n"
    )
    monkeypatch.setattr(credentials, "_began", time.time() - 60)
    assert store.get("k") == b"v"


def test_keys_may_come_from_the_file_alone(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    (tmp_path / "credentials").write_text(f"[lab]\naws_access_key_id=AKIDTEST\naws_secret_access_key={SECRET}\n")
    at().create("k", b"v")
    assert at().get("k") == b"v"


def test_an_outage_ends_in_advice(s3: S3Server) -> None:
    s3.expired = True
    with pytest.raises(GaveUp, match=r"ExpiredToken.*run the same command again"):
        PatientStore(at(), ManualClock(), 60.0).put("k", b"v")


# ---------------------------------------------------------------------- secrets


@pytest.mark.parametrize(
    "url",
    [
        f"s3://AKIDTEST:{SECRET.replace('/', '%2F')}@bucket/run",
        f"s3://{TOKEN}@bucket/run",
        f"az://container/run?sig={TOKEN}",
        f"s3://bucket/run?X-Amz-Signature={TOKEN}",
        f"s3://bucket/run?endpoint=https://me:{TOKEN}@host",
        f"s3://[{TOKEN}/run",
    ],
)
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_store(url)
    assert_clean(str(caught.value))


@pytest.mark.parametrize("kind", ["403", "404", "409", "412", "500", "503", "expired"])
@pytest.mark.parametrize("verb", ["create", "put", "get"])
def test_what_a_server_quotes_back_does_not_travel(s3: S3Server, kind: str, verb: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    quoted = f"<Message>{SECRET}</Message><AWSAccessKeyId>AKIDTEST</AWSAccessKeyId><CanonicalRequest>{TOKEN}"
    s3.bodies = [f"<Error><Code>SomeCode</Code>{quoted}</CanonicalRequest></Error>"] * 9
    s3.fault(kind, times=9)
    error: BaseException | None = None
    try:
        getattr(at(), verb)("k", *([] if verb == "get" else [b"x"]))
    except StoreError as caught:
        error = caught
    assert error is not None or kind == "404"
    while error is not None:  # nor in the errors that a traceback prints below it
        assert_clean(f"{error!r} {error}")
        error = error.__cause__ or error.__context__


def test_no_secret_in_the_store_itself(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    store = at()
    store.put("k", b"v")
    assert_clean(f"{store!r} {store.url} {vars(store)} {cloud.parse_address(store.url)}")


def assert_clean(text: str) -> None:
    for secret in (SECRET, SECRET.replace("/", "%2F"), TOKEN, "AKIDTEST"):
        assert secret not in text


# ---------------------------------------------------------------------- URLs, http, forks


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3:///run", "the bucket is missing"),
        ("hf://models/me/x", "hf://buckets/namespace/bucket/prefix"),
        ("hf://buckets/me", "hf://buckets/namespace/bucket/prefix"),
        ("s3://b/run?endpoint=http://192.0.2.1:9000", "unencrypted; use https, or set AWS_ALLOW_HTTP=true"),
    ],
)
def test_a_wrong_url_says_what_is_right(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        open_store(url)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "modal"])
def test_a_bucket_has_no_folder_above_another(scheme: str) -> None:
    with pytest.raises(ValueError, match=r"URL has '\.\.' as the name of a folder"):
        open_store(f"{scheme}://buckets/me/a/../b?region=../x")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "hf", "modal", "fsspec+s3"])
@pytest.mark.parametrize("end", ["exp#1", "exp#1?endpoint=https://other", "exp\t1", "exp\n", "exp1 "])
def test_what_a_parser_drops_from_a_url_is_refused(scheme: str, end: str) -> None:
    """s3://bucket/exp#1 and #2 were one prefix; #3 went on with the first one's run."""
    with pytest.raises(ValueError, match=r"A parser would drop it|begins or ends with a blank"):
        open_store(f"{scheme}://buckets/me/{end}")


def test_a_folder_may_be_called_anything(tmp_path: Path) -> None:
    for name in ("exp#1", "exp#2"):
        open_store(str(tmp_path / name)).put("key", name.encode())
    assert open_store(f"file://{tmp_path}/exp#2").get("key") == b"exp#2"


def test_plain_http_beyond_this_machine_has_to_be_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    assert at("s3://b/run?endpoint=http://192.0.2.1:9000").address.endpoint == "http://192.0.2.1:9000"


def test_an_endpoint_in_the_url_stays_in_it(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    store = open_store(f"s3://bucket/run?endpoint={s3.endpoint}")
    store.put("k", b"v")
    assert open_store(store.url).get("k") == b"v"


def test_a_record_does_not_wait_behind_the_ranges_of_a_large_blob(s3: S3Server) -> None:
    store, over = at(), threading.Event()
    store.put("k", b"v")
    ranges = [cloud._thread_pool().submit(over.wait) for _ in range(3 * cloud.RANGES_AT_ONCE)]
    try:
        assert store.get("k") == b"v" and not any(one.done() for one in ranges)
    finally:
        over.set()


def test_a_request_at_the_process_end_is_made(s3: S3Server) -> None:
    """A script that ends with an error leaves the run in an atexit callback, when Python starts no thread any more."""
    code = (
        "import atexit; from rendezvous.stores.cloud.store import CloudStore; store = CloudStore('s3://bucket/run')\n"
        "store.put('k', b'early'); atexit.register(lambda: store.put('k', b'late'))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert at().get("k") == b"late"


def test_a_forked_child_is_told_and_does_not_hang(s3: S3Server) -> None:
    store = at()
    store.put("k", b"v")
    child = os.fork()
    if child == 0:
        said = 0
        for use in (lambda: store.get("k"), lambda: open_store("s3://bucket/other")):
            try:
                use()
            except RuntimeError as error:
                said += "spawn" in str(error) and not isinstance(error, StoreError)
        os._exit(40 + said)
    for _ in range(100):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 42


def test_one_client_serves_all_stores_of_a_bucket(s3: S3Server) -> None:
    assert at()._current_clients() is at()._current_clients()


# ---------------------------------------------------------------------- what it takes

PEAK = """
import resource, sys
from rendezvous.stores.cloud.store import CloudStore
store, body = CloudStore("s3://bucket/run"), bytearray(int(sys.argv[1]) << 20)
store.put("warm", memoryview(body)[:1 << 20])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store.put("k", memoryview(body))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize("mib", [60, 100], ids=["one request", "in parts"])
def test_an_upload_copies_nothing(s3: S3Server, mib: int) -> None:
    assert int(python(PEAK, str(mib))) <= 20, "MiB of memory on top of the caller's"
    assert bool(s3.count("UploadPart")) == (mib > 64)


def test_without_the_package_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["obstore"] = sys.modules["obstore.exceptions"] = None
from rendezvous.stores.open import open_store
from rendezvous.stores.uplink import FIRST, LEAST, Uplink
try:
    open_store("s3://b/run")
except ImportError as error:
    print(error)
"""
    assert "pip install 'serverless-diloco[serverless]'" in python(code)


def python(code: str, *args: str) -> str:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, timeout=180).stdout


# ---------------------------------------------------------------------- slow links


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_link_finishes_a_large_blob(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """24 MiB that share a link of 16 MiB/s cannot arrive in 1 s; the same with 256 MiB, 7.2 Mbit/s and 300 s."""
    body = bytes(range(256)) * (24 << 12)
    with S3Server(access_key="AKIDTEST", rate=16 << 20) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        store = CloudStore("s3://bucket/run", request_s=1.0)
        store.put("blob", Pieces(body) if stream else body)
        assert store.get("blob") == body
        first = store._uplink.in_flight
        assert LEAST <= first < FIRST  # and so it stays: the next one is not tried in vain
        store.put("again", body[: 12 << 20])
        assert not [op for op, key in server.requests if "again" in key and "Abort" in op]


class Pieces:
    """A body in pieces of a megabyte."""

    def __init__(self, body: bytes) -> None:
        self._body, self.size = body, len(body)

    def __iter__(self) -> Iterator[bytes]:
        return (self._body[at : at + (1 << 20)] for at in range(0, self.size, 1 << 20))

    def __bytes__(self) -> bytes:
        return self._body


def test_what_is_in_flight_follows_the_link() -> None:
    link = Uplink(request_s=120.0)
    assert link.parts(1 << 30, 32 << 20, 8, 5000) == (8 << 20, 8)
    link.note_upload(1 << 30, 10.0, 256 << 20)
    assert link.parts(1 << 30, 32 << 20, 8, 5000) == (32 << 20, 8)
    assert link.parts(1 << 40, 32 << 20, 8, 5000)[0] * 5000 >= 1 << 40
    link.note_upload(8 << 20, 120.0, 256 << 20)  # 0.6 Mbit/s
    assert link.parts(1 << 30, 32 << 20, 8, 5000) == (LEAST, 1)
    assert not link.slow_down()


@pytest.mark.parametrize("kind", ["Connect", "Timeout"])
def test_a_proxy_of_the_environment_is_named_when_there_is_no_answer(kind: str, monkeypatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    error = RuntimeError(f"request failed, kind: {kind}, …")
    assert "PROXY" not in in_words(error)
    monkeypatch.setenv("HTTP_PROXY", "http://me:secret@proxy:1")
    assert in_words(error).endswith(" (HTTP_PROXY is set)")


# ---------------------------------------------------------------------- a network of somebody else's


@contextmanager
def answers(reply: bytes, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Answer each request with these bytes, and close the connection.   Yield the port."""

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
                with context.wrap_socket(connection, server_side=True) if context else connection as open_one:
                    head, _, body = open_one.recv(1 << 16).partition(b"\r\n\r\n")
                    length = int(found[1]) if (found := re.search(rb"(?i)content-length: (\d+)", head)) else 0
                    while len(body) < length:
                        body += open_one.recv(1 << 16)
                    open_one.sendall(reply)
            except ssl.SSLError:
                continue  # the client did not like the certificate
            except OSError:
                if listener.fileno() < 0:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def html(status: str) -> bytes:
    page = b"<!DOCTYPE html><html><body>Guest Wi-Fi: log in</body></html>"
    return f"HTTP/1.1 {status}\r\nContent-Type: text/html\r\nContent-Length: {len(page)}\r\n\r\n".encode() + page


@pytest.mark.parametrize(
    "status", ["200 OK", "403 Forbidden", "405 Not Allowed", "511 Network Authentication Required"]
)
def test_a_page_of_html_is_no_object_and_no_stores_refusal(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with a login page that answered each request: `status` asked for the run key of a run that was not there."""
    with answers(html(status)) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(StoreRefused, match=r"cannot read .*A page of HTML answered.*login page"):
            at().get("run.json")


def test_a_page_that_asks_for_a_later_request_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with answers(html("429 Too Many Requests")) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(StoreUnclear):
            at().create("a/b", b"x")


def test_a_page_of_the_run_itself_may_be_html(s3: S3Server) -> None:
    at().put("page/index.html", b"<html></html>")
    assert at().get("page/index.html") == b"<html></html>"


def test_a_proxy_that_wants_a_password_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with tinyproxy's BasicAuth."""
    with answers(html("407 Proxy Authentication Required")) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(StoreRefused, match=r"407.*proxy wants a name and a password: set HTTPS_PROXY"):
            at().get("k")


def certificate(folder: Path, host: str, ends: datetime, authority: bool) -> Path:
    """Write a certificate that has signed itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, host)])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(7).not_valid_before(datetime(2020, 1, 1)).not_valid_after(ends)
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    made = made.add_extension(x509.BasicConstraints(authority, None), critical=True).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    kind, no_password = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = folder / "server.pem"
    path.write_bytes(key.private_bytes(pem, kind, no_password) + made.public_bytes(pem))
    return path


@pytest.mark.parametrize(
    ("host", "year", "authority", "trusted", "words"),
    [
        ("localhost", 2999, False, False, "no authority that is known here.*SSL_CERT_FILE.*REQUESTS_CA_BUNDLE are not"),
        ("localhost", 2021, False, True, "has expired"),
        ("elsewhere.example", 2999, False, True, "another host's"),
        ("localhost", 2999, True, True, "an authority's own.*CA:FALSE"),
    ],
)
def test_a_refused_certificate_says_why_at_once(
    host: str, year: int, authority: bool, trusted: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = certificate(tmp_path, host, datetime(year, 1, 1), authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    clients.forget_clients()
    with answers(b"", context) as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{port}")
        with pytest.raises(StoreRefused, match=rf"no connection \(https://localhost:{port}\)\. .*certificate.*{words}"):
            at().create("k", b"x")


def test_a_host_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://no-such-host.invalid")
    words = r"no connection \(https://no-such-host\.invalid\): there is no host of that name"
    with pytest.raises(StoreUnclear, match=words):
        at().create("k", b"x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIDTEST\n"), ("AWS_SECRET_ACCESS_KEY", "x\r"), ("AWS_SESSION_TOKEN", " x"),
        ("AWS_REGION", "us-east-1\n"),
    ],
)  # fmt: skip
def test_a_line_break_in_a_variable_is_refused_by_name(name: str, value: str, s3: S3Server, monkeypatch) -> None:
    """obstore's Rust panics for one in a header; in a secret, it only signs wrongly."""
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"the variable {name} begins or ends with a blank") as found:
        at()
    assert_clean(str(found.value))


@pytest.mark.parametrize("endpoint", ["minio:9000", "127.0.0.1:9000", "https//minio", "http:/minio", "https://"])
def test_an_endpoint_without_a_scheme_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=rf"the endpoint '{endpoint}' is not a URL: write http"):
        at(f"s3://bucket/run?endpoint={endpoint}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"me:{SECRET}@{endpoint}")
    with pytest.raises(ValueError, match="is not a URL") as found:
        at()
    assert_clean(str(found.value))


def test_a_panic_of_the_client_is_a_refusal(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:99999")
    with pytest.raises(StoreRefused, match=r"obstore cannot make the request.*or a blank"):
        at().get("k")


def test_a_file_of_no_certificates_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", os.devnull)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    clients.forget_clients()
    with pytest.raises(StoreRefused, match=r"SSL_CERT_FILE is set: no certificate in PEM.* was found there"):
        at()


def test_an_endpoint_of_aws_config_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """aws would ask that server, and we Amazon's: a bucket of the same name may be there."""
    (tmp_path / "config").write_text("[profile r2]\nendpoint_url = https://r2.example\n")
    at()  # the default profile names none
    monkeypatch.setenv("AWS_PROFILE", "r2")
    with pytest.raises(
        ValueError, match=r"'https://r2\.example'.*set AWS_ENDPOINT_URL, or write s3://bucket/run\?endp"
    ):
        at()
    at("s3://bucket/run?endpoint=https://r2.example")
