"""`diloco watch RUN --web` and `--publish`: who is answered, what is served, what a bad bucket does to it."""

import asyncio
import http.client
import io
import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.run.record import Run, RunRecord
from diloco.runlog.opening import View
from diloco.runlog.reader import read_report
from diloco.views.page.freeze import Publisher
from executors.cli import main as cli
from executors.cli.looking.report import publish_page
from executors.cli.main import main
from executors.cli.web import server as web
from executors.cli.web.run import PageLooks, PageRequest, PageWriter, watch_page
from executors.preflight.run_url import UsageError
from rendezvous import layout
from rendezvous.errors import StoreRefused, StoreUnclear
from rendezvous.store import Store
from rendezvous.stores.open import open_store
from tests.diloco.test_report import T0, FixedClock, killed_and_replaced
from tests.support.fakes import Fault, FaultyStore
from tests.support.long_run import LongRun, copied, long_run
from tests.support.page_runs import busy_run
from tests.support.s3_server import S3Server


def view_of(store: Any) -> View:
    return View(Run(store.url, store, RunRecord.decode(store.get(layout.RUN) or b"")), None)


def looks_at(run: LongRun, faults: list[Fault] | None = None) -> tuple[PageLooks, FaultyStore, FixedClock]:
    store = FaultyStore(run.store, faults or [])
    store.cheap, store.url = False, "s3://bucket/run"  # type: ignore[attr-defined]
    clock = FixedClock(T0 + 1e4)
    return PageLooks(view_of(store), clock), store, clock


def head_of(looks: PageLooks) -> dict[str, Any]:
    return json.loads(looks.files["head.json"])


# -------------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("127.0.0.1:8642", True), ("localhost:8642", True), ("[::1]:8642", True), ("LOCALHOST", True),
        ("evil.example:8642", False), ("127.0.0.1.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_on_loopback_only_this_machines_names_are_answered(host: str, good: bool) -> None:
    door = web.make_door("127.0.0.1", 8642)
    refused = door.refusal("GET", host, door.token)
    assert (refused is None) == good and (good or (refused is not None and refused[0] == 421))


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get_is_answered(method: str) -> None:
    assert (web.make_door("127.0.0.1", 1).refusal(method, "localhost", "") or (0,))[0] == 405


@pytest.mark.parametrize(("bind", "named"), [("0.0.0.0", socket.gethostname()), ("127.0.0.1", "127.0.0.1")])
def test_nothing_is_answered_without_the_token(bind: str, named: str) -> None:
    door = web.make_door(bind, 8642)
    assert len(door.token) >= 32 and web.make_door(bind, 8642).token != door.token
    for token in ("", "x", door.token[:-1], door.token + "x", "é"):
        assert (door.refusal("GET", f"{named}:8642", token) or (0,))[0] == 403
    assert door.refusal("GET", "10.0.0.7:8642", door.token) is None
    assert (door.refusal("GET", "evil.example", door.token) or (0,))[0] == 421
    assert web.page_address(bind, door) == f"http://{named}:8642/?token={door.token}"


def test_a_port_in_use_is_said_and_without_port_a_free_one_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(
            UsageError, match=f"--port {taken} on 127.0.0.1 cannot be used: .*--port 0 takes a free one"
        ):
            web.bound_socket("127.0.0.1", taken)
    with web.bound_socket("127.0.0.1", None) as first, web.bound_socket("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
    with pytest.raises(UsageError, match=r"--bind no\.such\.host\.invalid"):
        web.bound_socket("no.such.host.invalid", 0)


def test_the_grammar_refuses_a_port_that_is_none(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["watch", "runs/x", "--web", "--port", "99999"])
    assert "is not a port" in capsys.readouterr().err


# -------------------------------------------------------------------- answers


def bare_answer(app: web.PageApp, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The answer that an ASGI server would send."""
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    where, _, query = path.partition("?")
    raw = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()
    ]
    scope = {
        "type": "http", "method": method, "path": where, "query_string": query.encode(), "headers": raw,
        "scheme": "http", "server": ("localhost", 1),
    }  # fmt: skip
    asyncio.run(app(scope, None, send))
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(message.get("body", b"") for message in sent[1:])


def answer(app: web.PageApp, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """The same for a browser that has the cookie."""
    return bare_answer(app, path, method, cookie=f"{app.door.cookie}={app.door.token}", **headers)


@pytest.fixture
def app() -> web.PageApp:
    files = {"head.json": b'{"format":1}', "0.json": b"{}"}
    return web.PageApp(web.make_door("127.0.0.1", 1), "</title><b>", lambda: files)


def test_the_page_its_data_and_nothing_else_are_served(app: web.PageApp) -> None:
    status, headers, body = answer(app, "/")
    assert status == 200 and headers["content-type"].startswith("text/html") and b"</title><b>" not in body
    assert (
        "frame-ancestors 'none'" in headers["content-security-policy"]
        and headers["x-content-type-options"] == "nosniff"
    )
    assert "unsafe" not in headers["content-security-policy"] and headers["referrer-policy"] == "no-referrer"
    assert answer(app, "/data/head.json")[2] == b'{"format":1}' and answer(app, "/data/0.json")[2] == b"{}"
    for path in ("/data/7.json", "/data/", "/data/../run.json", "/etc/passwd", "/data/%2e%2e/x", "/page.js"):
        assert answer(app, path)[0] == 404
    assert answer(app, "/", "POST")[0] == 405 and answer(app, "/", host="evil.example")[0] == 421


def test_a_browser_that_has_shown_the_token_has_a_cookie(app: web.PageApp) -> None:
    for path in ("/", "/data/head.json", "/?token=x", "/nothing"):
        status, headers, _ = bare_answer(app, path)
        assert status == 403 and headers["connection"] == "close" and "set-cookie" not in headers
    status, headers, _ = bare_answer(app, f"/?token={app.door.token}")
    kept, *how = headers["set-cookie"].split("; ")
    assert status == 200 and {"HttpOnly", "SameSite=Strict", "Path=/"} <= {*how}
    assert bare_answer(app, "/data/head.json", cookie=f"other=1; {kept}")[0] == 200
    assert bare_answer(app, "/data/head.json", cookie=f"{app.door.cookie}=x")[0] == 403
    assert "set-cookie" not in answer(app, "/")[1]


def test_what_did_not_change_is_not_sent_again(app: web.PageApp) -> None:
    etag = answer(app, "/data/0.json")[1]["etag"]
    status, _, body = answer(app, "/data/0.json", if_none_match=etag)
    assert status == 304 and body == b""


def test_before_the_first_look_the_page_is_there_and_says_so(app: web.PageApp) -> None:
    app.files = dict
    assert answer(app, "/")[0] == 200
    assert b"The run is being read." in answer(app, "/data/head.json")[2]


# -------------------------------------------------------------------- connections


@pytest.fixture
def served(app: web.PageApp, monkeypatch: Any) -> Iterator[tuple[str, int]]:
    """The app on a port: (address with the token, port)."""
    monkeypatch.setattr(web, "HEADERS_S", 120.0)
    listening = web.bound_socket("127.0.0.1", 0)
    app.door = web.make_door("127.0.0.1", port := listening.getsockname()[1])
    server = web.PageServer(app, listening)
    server.start()
    yield web.page_address("127.0.0.1", app.door), port
    server.stop()
    listening.close()


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_open_connections_do_not_hold_other_readers(served: tuple[str, int]) -> None:
    """Half of a head, and no word at all: the oldest of those go, and no client that has shown the token."""
    address, port = served
    friend = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    friend.request("GET", address.partition(str(port))[2])
    assert friend.getresponse().read()
    held = list[socket.socket]()
    for n in range(3 * web.MOST):
        held.append(socket.create_connection(("127.0.0.1", port), timeout=120))
        held[-1].send(b"GET / HTTP/1.1\r\nX: " if n % 2 else b"")
    with urllib.request.urlopen(address, timeout=120) as page:
        assert page.status == 200
    friend.request("GET", address.partition(str(port))[2])
    assert friend.getresponse().status == 200
    assert all(is_ended(one) for one in held[: web.MOST])
    for one in [*held, friend]:
        one.close()


def test_a_request_that_does_not_arrive_ends_its_connection(served: tuple[str, int], monkeypatch: Any) -> None:
    monkeypatch.setattr(web, "HEADERS_S", 0.05)
    with socket.create_connection(("127.0.0.1", served[1]), timeout=120) as slow:
        slow.send(b"GET / HTTP/1.1\r\nHost: ")
        assert is_ended(slow)


# -------------------------------------------------------------------- looks


def test_the_first_look_shows_the_newest_steps_and_the_second_all_of_them() -> None:
    looks, store, _ = looks_at(long_run(230, 4))
    looks.look()
    assert len(store.calls) < 200 and set(looks.files) == {"head.json", "2.json"}
    head = head_of(looks)
    assert head["partial"] and head["step"] == 230 and head["chunks"][:2] == [None, None] and head["chunks"][2]
    newest = json.loads(looks.files["2.json"])
    assert newest["first"] == 219 and len(newest["at"]) == 11 and newest["metrics"]["reward"][-1] is not None
    assert looks.pause_s == 0.0
    looks.look()
    assert set(looks.files) == {"head.json", "0.json", "1.json", "2.json"} and not head_of(looks)["partial"]
    assert [chunk["first"] for n in range(3) for chunk in [json.loads(looks.files[f"{n}.json"])]] == [0, 100, 200]


@pytest.mark.slow
def test_ten_minutes_of_a_page_cost_a_request_per_second_however_many_look() -> None:
    """Browsers read files; only looks ask the bucket."""
    run = long_run(30, 32)
    looks, store, clock = looks_at(run)
    looks.look()
    looks.look()
    store.calls.clear()
    began = clock.at
    for second in range(0, 600, 5):
        clock.at = began + second
        if second % 45 == 40:
            run.step(30 + second // 45)
        run.beat(30 + second // 45, clock.wall() - 1)
        looks.look()
    assert len(store.calls) <= 600 + 30 and head_of(looks)["step"] == 30 + 600 // 45


def test_a_bucket_that_fails_leaves_the_page_and_says_since_when() -> None:
    run = long_run(20, 2)
    looks, store, clock = looks_at(run)
    looks.look()
    looks.look()
    before = head_of(looks)
    store.faults += [Fault("get", layout.commit_key(20), error=StoreUnclear("503 SlowDown")) for _ in range(2)]
    clock.at += 60
    looks.look()
    first = head_of(looks)
    assert "has given no answer since 2027-" in first["stale"] and "503 SlowDown" in first["stale"]
    assert {**first, "stale": ""} == before and looks.pause_s == 5.0
    clock.at += 60
    looks.look()
    assert head_of(looks)["stale"].split("since ")[1][:19] == first["stale"].split("since ")[1][:19]
    clock.at += 60
    looks.look()
    assert head_of(looks)["stale"] == "" and looks.pause_s == 5.0


def test_a_bucket_that_fails_from_the_first_look_on_is_said_too() -> None:
    looks, store, _ = looks_at(long_run(20, 2))
    store.faults.append(Fault("get", layout.commit_key(0), error=StoreUnclear("503 SlowDown")))
    store.faults.append(Fault("get", layout.control_key(0), error=StoreUnclear("503 SlowDown")))
    looks.look()
    app = web.PageApp(web.make_door("127.0.0.1", 1), "x", lambda: looks.files, lambda: looks.stale)
    assert looks.files == {} and b"503 SlowDown" in answer(app, "/data/head.json")[2]
    looks.look()
    looks.look()
    assert looks.stale == "" and head_of(looks)["step"] == 20


def test_a_view_writes_nothing(tmp_path: Path) -> None:
    looks, store, _ = looks_at(busy_run(12, 3))
    for _ in range(4):
        looks.look()
    assert {verb for verb, _ in store.calls} <= {"get", "get_into", "list"}
    assert head_of(looks)["early"] and head_of(looks)["costs"]["usd"] > 0


# -------------------------------------------------------------------- publishing


def test_a_published_page_is_dense_and_only_what_changed_is_written_again() -> None:
    run = busy_run(130, 2)
    store = FaultyStore(run.store)
    looks = PageLooks(view_of(run.store), FixedClock(T0 + 1e4), 30.0)
    looks.look()
    looks.look()
    publisher = Publisher(store, "x")
    assert publisher.publish(looks.files) == 4
    assert [key for _, key in store.calls] == [
        "page/index.html", "page/data/0.json", "page/data/1.json", "page/data/head.json",
    ]  # fmt: skip
    run.step(130)
    looks.look()
    store.calls.clear()
    publisher.publish(looks.files)
    assert [key for _, key in store.calls] == ["page/data/1.json", "page/data/head.json"]
    assert {verb for verb, _ in store.calls} == {"put"}


def test_publishing_changes_nothing_that_anybody_reads() -> None:
    b = killed_and_replaced()
    before = read_report(b.store)
    records = {key: b.store.get(key) for key in b.store.list("")}
    url = publish_page(before, b.store, T0 + 20)
    assert url.endswith("/page/index.html") and read_report(b.store) == before
    assert {key: b.store.get(key) for key in b.store.list("") if not key.startswith(layout.PAGE)} == records
    assert layout.record_kind("page/data/head.json") is None, "no seal, no cache"


def test_only_views_and_the_layout_know_the_published_keys() -> None:
    root = Path(cli.__file__).parent.parent.parent
    knows = {
        path.relative_to(root).as_posix()
        for room in ("diloco", "executors", "inner", "rendezvous")
        for path in (root / room).rglob("*.py")
        if any(word in path.read_text() for word in ("page_data_key", "PAGE_INDEX", "layout.PAGE"))
    }
    assert knows == {"rendezvous/layout.py", "diloco/views/page/freeze.py"}


class ReadOnly(FaultyStore):
    def put(self, key: str, body: Any) -> None:
        raise StoreRefused("403 AccessDenied")


def test_a_bucket_that_may_only_be_read_says_what_still_works() -> None:
    run = busy_run(12, 3)
    store = ReadOnly(run.store)
    with pytest.raises(UsageError, match=r"403 AccessDenied.*still works: diloco watch RUN --web, diloco report RUN"):
        publish_page(read_report(run.store), store, T0)
    out = io.StringIO()
    looks = PageLooks(view_of(run.store), FixedClock(T0 + 1e4))
    writer = PageWriter(view_of(store), FixedClock(), out)
    for _ in range(3):
        looks.look()
        writer.write(looks)
    assert writer.refused and "diloco watch RUN --web" in out.getvalue()


def test_a_published_run_that_is_over_ends_the_command(capsys: Any) -> None:
    b = killed_and_replaced()
    b.store.url = "memory://over"  # type: ignore[misc]
    from executors.cli.web import run as module

    original = module.open_view
    module.open_view = lambda url, scope: view_of(b.store)  # type: ignore[assignment]
    try:
        assert watch_page(PageRequest(publish=True), "memory://over", FixedClock(T0 + 30)) == 0
    finally:
        module.open_view = original
    assert "published: memory://over/page/index.html" in capsys.readouterr().out
    assert json.loads(b.store.get("page/data/head.json") or b"")["state"] == "done"


def test_a_bucket_is_told_what_a_browser_must_know() -> None:
    assert layout.content_type("page/index.html") == "text/html; charset=utf-8"
    assert layout.content_type("page/data/0.json") == "application/json"
    assert layout.content_type(layout.commit_key(0)) is None and layout.content_type("page/x.bin") is None


# -------------------------------------------------------------------- the command


@pytest.fixture
def run_folder(tmp_path: Path) -> str:
    """A run on disk."""
    b, folder = killed_and_replaced(), tmp_path / "run"
    folder.mkdir()
    store: Store = open_store(str(folder))
    for key in b.store.list(""):
        store.put(key, b.store.get(key) or b"")
    return str(folder)


def test_the_command_serves_prints_its_address_and_a_kill_changes_nothing(run_folder: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(run_folder).rglob("*")}
    command = [sys.executable, "-m", "executors.cli.main", "watch", run_folder, "--web", "--port", "0", "--json"]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert served.stdout is not None
    try:
        address = json.loads(served.stdout.readline())["address"]
        with urllib.request.urlopen(address) as page:
            assert page.status == 200 and b"Who contributed" in page.read()
        request = urllib.request.Request(address, method="POST", data=b"x")
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(request)
        head = wait_for_head(address)
        assert head["step"] == 6 and head["state"] == "done"
    finally:
        served.kill()
        served.wait()
        served.stdout.close()
    assert {path: path.stat().st_mtime_ns for path in Path(run_folder).rglob("*")} == before


def wait_for_head(address: str) -> dict[str, Any]:
    for _ in range(2000):
        with urllib.request.urlopen(address.replace("?", "data/head.json?")) as answered:
            head = json.load(answered)
        if "waiting" not in head:
            return head
    raise AssertionError("no head")


@pytest.mark.parametrize("option", ["--web", "--publish"])
def test_a_folder_without_a_run_and_a_newer_run_are_said(option: str, tmp_path: Path, capsys: Any) -> None:
    assert cli.main(["watch", str(tmp_path / "none"), option]) == 2
    assert "no run" in capsys.readouterr().err
    (tmp_path / "newer").mkdir()
    open_store(str(tmp_path / "newer")).put(layout.RUN, b'{"wire": 99, "kind": "run"}')
    assert cli.main(["watch", str(tmp_path / "newer"), option]) == 2
    assert capsys.readouterr().err.startswith("diloco watch: ")


def test_report_publish_writes_into_a_real_bucket_with_its_type(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    with S3Server() as s3:
        url = copied(long_run(3, 2).store, s3)
        assert cli.main(["report", url, "--to", str(tmp_path), "--publish"]) == 0
        assert "published: " in capsys.readouterr().out
        assert s3.path("bucket", "run/page/index.html").read_bytes().startswith(b"<!doctype html>")
        assert json.loads(s3.path("bucket", "run/page/data/head.json").read_bytes())["step"] == 3
        s3.fault("403", op="Put", times=99)
        assert cli.main(["report", url, "--to", str(tmp_path), "--publish"]) == 2
        assert "still works" in capsys.readouterr().err
