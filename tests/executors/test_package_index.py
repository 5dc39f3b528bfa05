"""Packages that rented machines would install: asked of an index by the real pip, told in the quote."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from diloco.run.config import RunConfig
from executors.platforms.places import Place
from executors.preflight import quote
from executors.preflight.needs.task_packages import pip_versions, unknown_packages
from executors.preflight.quote import PlaceRequest, StartRequest
from inner import InnerConfig

FILES = "".join(f'<a href="judge-{v}.tar.gz">judge-{v}.tar.gz</a>' for v in ("1.0", "2.1"))


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/simple/judge/"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<!DOCTYPE html><body>{FILES}</body>".encode() if found else b"")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Index)
    Thread(target=server.serve_forever, daemon=True).start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    yield "pip asks it"
    server.shutdown()
    server.server_close()


def test_the_real_pip_says_which_versions_an_index_has(index: str) -> None:
    assert pip_versions("judge") == ["2.1", "1.0"]
    assert pip_versions("jugde") == []


@pytest.mark.slow
def test_an_index_that_cannot_be_reached_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert pip_versions("judge") is None


@pytest.mark.parametrize(
    ("package", "told"),
    [
        ("judge", ""),
        ("judge[all]>=2", ""),
        ("jugde", "pip finds no package 'jugde' from here"),
        ("judge>3", "pip finds no version of judge with >3 from here; the newest is 2.1"),
        ("judge @ https://example.com/judge.tar.gz", ""),
        ("./judge.whl", ""),
        ("jugde; sys_platform == 'win32'", ""),
        ("unreachable", ""),
    ],
)
def test_each_kind_of_requirement(package: str, told: str) -> None:
    versions = {"judge": ["2.1", "1.0"], "jugde": []}
    found = unknown_packages([Place("modal", options={"pip": [package]})], versions.get)
    assert (found[0] if found else "").startswith(told) and bool(found) == bool(told)
    assert unknown_packages([Place("local", options={"pip": [package]})], versions.get) == []


def test_a_quote_tells_a_mistyped_package_before_its_price(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.preflight.needs.task_packages.pip_versions", lambda name: [])
    asked = StartRequest("s3://bucket/run", PlaceRequest(executor="modal", gpu=("T4",), pip=("jugde",)))
    config = RunConfig("run", inner=InnerConfig())
    lines = quote.quote_start(asked, config, 2, wanted=quote.Wanted(), is_new=True).lines()
    assert lines[-2].startswith("pip finds no package 'jugde'") and "per hour" in lines[-1]
