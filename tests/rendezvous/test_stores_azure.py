"""az:// against Azurite, Microsoft's own emulator of its blob service: the store contract, doctor, a fleet with a kill.

    npm ──▶ make azurite ──▶ azurite-blob on loopback ◀── obstore ◀── CloudStore("az://runs/…?endpoint=http://…")

Slow, and skipped where Azurite is not installed: `make azurite`, then `make test-slow`.
"""

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from executors.cli import main as cli
from rendezvous.store import Store
from rendezvous.stores.open import open_store
from tests.diloco.test_s3_fleet import audited
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
from tests.support.fleet import Fleet

ROOT = Path(__file__).parents[2]
ACCOUNT = "devstoreaccount1"  # Azurite's, with its key, as its README gives them
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

pytestmark = pytest.mark.slow


def installed() -> str:
    local = ROOT / ".venv" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
    return str(local) if local.exists() else shutil.which("azurite-blob") or ""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Azurite, serving; its container is `runs`."""
    if not (program := installed()):
        pytest.skip("Azurite is not installed: make azurite")
    port, folder = free_port(), tmp_path_factory.mktemp("azurite")
    address = ["--location", str(folder), "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    server = subprocess.Popen([program, *address, "--silent", "--skipApiVersionCheck", "--disableTelemetry"])
    try:
        create_container("runs", port)
        yield port
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def create_container(name: str, port: int, patience_s: float = 60.0) -> None:
    """PUT /account/name?restype=container, signed with the shared key, once the server listens."""
    date, version = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"), "2021-08-06"
    path = f"/{ACCOUNT}/{name}"
    text = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}{path}\nrestype:container"
    tag = base64.b64encode(hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{tag}"}
    end = time.monotonic() + patience_s
    while True:
        try:
            server = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            server.request("PUT", f"{path}?restype=container", headers={**headers, "Content-Length": "0"})
            assert server.getresponse().status == 201
            return
        except ConnectionError:
            assert time.monotonic() < end, f"Azurite did not listen on port {port} within {patience_s} s"
            time.sleep(0.1)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Ours and the replicas'."""
    for name in [n for n in os.environ if n.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    values = {"AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def url(port: int, environ: dict[str, str]) -> str:
    return f"az://runs/{os.urandom(4).hex()}?endpoint=http://127.0.0.1:{port}/{ACCOUNT}"


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url)


def test_a_range_that_starts_at_or_past_the_end_is_no_error(store: Store) -> None:
    store.put("k", b"0123456789")
    out = bytearray(5)
    assert [store.get_into("k", memoryview(out), start) for start in (5, 6, 10, 50)] == [True, False, False, False]


def test_more_keys_than_one_request_deletes_some_of_them_missing(store: Store) -> None:
    keys = [f"m/{n:03d}" for n in range(300)]
    for key in keys[::2]:
        store.put(key, b"x")
    store.delete(keys)
    assert store.list("m/") == []


def test_doctor_prints_its_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", url, "--parameters", "1M"]) == 0
    out = capsys.readouterr().out
    assert "This store can carry a run." in out and "deletes objects         ok" in out
    assert open_store(url).list("") == [], "nothing of the probe stays"


def test_three_replicas_one_killed_and_replaced(tmp_path: Path, url: str, environ: dict[str, str]) -> None:
    fleet = Fleet(tmp_path, url, environ, outer={"sync_every": 60, "snapshot_every": 2})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r01", 2))
    fleet.signal("r01", signal.SIGKILL)
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = audited(fleet, 6)
    assert sum(slot == "r01" for _, slot in found.listed) >= 2
