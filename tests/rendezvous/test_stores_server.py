"""The faulty server itself: limits, the control endpoint, and the process of its own."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.s3_server import S3Server


def ask(url: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    names = {k.replace("_", "-"): v for k, v in headers.items()}
    request = urllib.request.Request(url, body, names, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize(
    ("kind", "status", "there"),
    [("409", 409, False), ("412", 412, False), ("500", 500, False), ("503", 503, False), ("slow", 200, True)],
)
def test_each_fault_does_what_it_says_once(kind: str, status: int, there: bool) -> None:
    with S3Server() as s3:
        s3.fault(kind, op="PutObject", key="^k$", seconds=0.1)
        assert ask(f"{s3.endpoint}/bucket/other", "PUT", b"x")[0] == 200
        assert ask(f"{s3.endpoint}/bucket/k", "PUT", b"x")[0] == status
        assert (ask(f"{s3.endpoint}/bucket/k")[0] == 200) == there
        assert ask(f"{s3.endpoint}/bucket/k", "PUT", b"x")[0] == 200


@pytest.mark.parametrize(("kind", "there"), [("lost", True), ("dropped", False)])
def test_a_dropped_connection_before_and_after_the_effect(kind: str, there: bool) -> None:
    with S3Server() as s3:
        s3.fault(kind)
        with pytest.raises((urllib.error.URLError, ConnectionError)):
            ask(f"{s3.endpoint}/bucket/k", "PUT", b"x")
        assert (ask(f"{s3.endpoint}/bucket/k")[0] == 200) == there


def test_exclusive_create_and_ranges() -> None:
    with S3Server() as s3:
        url = f"{s3.endpoint}/bucket/k"
        assert ask(url, "PUT", b"0123456789", If_None_Match="*")[0] == 200
        assert ask(url, "PUT", b"other", If_None_Match="*")[0] == 412
        assert ask(url, Range="bytes=2-4") == (206, b"234") and ask(url, Range="bytes=8-99") == (206, b"89")
        assert ask(url, Range="bytes=-2") == (206, b"89") and ask(url, Range="bytes=10-11")[0] == 416
        assert ask(url, "DELETE")[0] == 204 and ask(url)[0] == 404
        assert b"NoSuchBucket" in ask(f"{s3.endpoint}/none/k")[1]


@pytest.mark.parametrize(("sizes", "good"), [((5, 5, 3), True), ((5, 4, 5), False), ((5,), True), ((5, 6), False)])
@pytest.mark.parametrize("order", [1, -1], ids=["in order", "last part first"])
def test_parts_make_an_object_if_all_but_the_last_are_equal(sizes: tuple[int, ...], good: bool, order: int) -> None:
    with S3Server() as s3:
        url = f"{s3.endpoint}/bucket/k"
        upload = ask(f"{url}?uploads", "POST")[1].split(b"<UploadId>")[1].split(b"<")[0].decode()
        for n, size in list(enumerate(sizes, 1))[::order]:
            assert ask(f"{url}?partNumber={n}&uploadId={upload}", "PUT", b"%d" % n * size)[0] == 200
        assert ask(url)[0] == 404, "not before it is complete"
        assert ask(f"{url}?uploadId={upload}", "POST", b"")[0] == (200 if good else 400)
        if good:
            assert ask(url)[1] == b"".join(b"%d" % n * size for n, size in enumerate(sizes, 1))


def test_bandwidth_is_limited_per_connection_and_in_all() -> None:
    for limit in ({"rate": 1e6}, {"connection_rate": 1e6}):
        with S3Server(**limit) as s3:
            began = time.monotonic()
            ask(f"{s3.endpoint}/bucket/k", "PUT", bytes(200_000))
            assert time.monotonic() - began > 0.19
            began = time.monotonic()
            assert len(ask(f"{s3.endpoint}/bucket/k")[1]) == 200_000
            assert time.monotonic() - began > 0.19


def test_latency() -> None:
    with S3Server(latency_s=0.2) as s3:
        began = time.monotonic()
        ask(f"{s3.endpoint}/bucket/k")
        assert time.monotonic() - began > 0.19


def test_as_a_process_with_a_control_endpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.s3_server", "0", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout
    try:
        endpoint = process.stdout.readline().strip()
        wish = {"fault": {"kind": "503", "op": "Put"}, "overwrites": True, "rate": 1e9}
        assert ask(f"{endpoint}/-/control", "POST", json.dumps(wish).encode())[0] == 200
        assert ask(f"{endpoint}/bucket/a", "PUT", b"x")[0] == 503
        assert ask(f"{endpoint}/bucket/a", "PUT", b"x")[0] == 200
        assert json.loads(ask(f"{endpoint}/-/control")[1]) == {"PutObject": 2}
        assert (tmp_path / "bucket" / "a=").read_bytes() == b"x"
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def test_nothing_listens_after_the_end() -> None:
    with S3Server() as s3:
        port = int(s3.endpoint.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
