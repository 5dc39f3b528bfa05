"""One launched script on three platforms: the real clients against servers on loopback, one replica of each killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from rendezvous import layout
from rendezvous.stores.open import open_store
from tests.executors.test_launch import TRAIN
from tests.support.hf_server import HFServer
from tests.support.modal_fixtures import KEYS
from tests.support.modal_server import ModalPlatform
from tests.support.modal_venv import stub_driver, venv_of
from tests.support.s3_server import S3Server

PLACES = "--place modal:1:L4 --place hf-jobs:1:t4-small --place local:1 --secret modal.aws"
SECRETS = " ".join(f"--secret hf-jobs.{name}" for name in KEYS)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run's URL; the current folder is a person's, with a script that needs a package of its own."""
    for name in [n for n in os.environ if n.startswith(("AWS_", "DILOCO_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text('# /// script\n# dependencies = ["einops"]\n# ///\n' + TRAIN)
    (tmp_path / "helper.py").write_text("EVERY = 20\n")
    (tmp_path / "rows.json").write_text(str([[(k + i) % 64 for i in range(16)] for k in range(64)]))
    monkeypatch.chdir(tmp_path)
    python = str(venv_of(None, tmp_path / "venv", with_gpu=True))
    with S3Server(access_key=KEYS["AWS_ACCESS_KEY_ID"]) as s3, HFServer(python=python) as hub, ModalPlatform():
        hub.plain = {"LD_LIBRARY_PATH": str(stub_driver(tmp_path / "driver"))}
        given = {"HF_ENDPOINT": hub.endpoint, "HF_TOKEN": hub.token, "OMP_NUM_THREADS": "1", **KEYS}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        subprocess.run(["modal", "secret", "create", "aws", *(f"{k}={v}" for k, v in KEYS.items())], check=True)
        yield f"s3://bucket/launched?endpoint={s3.endpoint}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_on_three_platforms_survives_a_kill_on_each(url: str) -> None:
    words = f"launch --run {url} {PLACES} {SECRETS} --max-usd 5 --yes train.py 400".split()
    launched = subprocess.Popen(
        [sys.executable, "-m", "executors.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    store = open_store(url)
    killed = {slot for slot in ("r00", "r01", "r02") if kill_soon(store, slot)}
    said, _ = launched.communicate(timeout=800)
    assert launched.returncode == 0 and killed == {"r00", "r01", "r02"}, said[-3000:]
    assert "rented machines install einops" in said and "sends helper.py, rows.json, train.py" in said
    report = read_report(store)
    assert report.done and all(c.ok for c in checks(report)), checks(report)
    places = {e["slot"]: e["executor"] for e in report.of_kind("launched")}
    assert places == {"r00": "modal", "r01": "hf-jobs", "r02": "local"}
    assert {x.name for x in report.sessions} >= {f"{slot}-{n}" for slot in places for n in (1, 2)}


def kill_soon(store: Any, slot: str) -> bool:
    """Kill the first session of a slot once an outer step counts it; -> whether it could be."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        time.sleep(0.1)
        if store.get(layout.RUN) is None:
            continue
        report = read_report(store)
        pids = [e["pid"] for e in report.of_kind("claimed") if e["who"] == f"{slot}-1"]
        if pids and any(slot in step.fresh for step in report.steps):
            os.kill(pids[0], signal.SIGKILL)
            return True
    return False


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("end", ["stop", "budget"])
def test_a_stop_and_the_budget_leave_nothing_on_any_platform(url: str, tmp_path: Path, end: str) -> None:
    """Stop and status come from another machine: another home and folder, the same bucket and accounts."""
    (tmp_path / "elsewhere").mkdir()
    limit = "--max-usd 5" if end == "stop" else "--max-hours 0.03"
    words = f"launch --run {url} {PLACES} {SECRETS} {limit} --yes train.py 100000".split()
    launched = subprocess.Popen(
        [sys.executable, "-m", "executors.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    store = open_store(url)
    wait_until(
        lambda: store.get(layout.RUN) and any(len(step.fresh) == 3 for step in read_report(store).steps), launched
    )
    told = elsewhere(tmp_path, "status", url)
    assert told.returncode == 0 and all(slot in told.stdout for slot in ("r00", "r01", "r02")), told.stdout
    if end == "stop":
        stopped = elsewhere(tmp_path, "stop", url)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    said, _ = launched.communicate(timeout=800)
    report = read_report(store)
    assert ("max_hours" in said) == (end == "budget") and all(c.ok for c in checks(report)), said[-3000:]
    pids = [e["pid"] for e in report.of_kind("claimed") if e["who"].startswith("r")]
    assert len(pids) >= 3 and not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    left = elsewhere(tmp_path, "stop", url)
    assert "no replica runs any more" in left.stdout, left.stdout + left.stderr


def elsewhere(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": str(folder / "elsewhere")}
    command = [sys.executable, "-m", "executors.cli", *words]
    return subprocess.run(command, cwd=folder / "elsewhere", env=environ, capture_output=True, text=True, timeout=200)


def wait_until(what: Any, process: subprocess.Popen[str], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0][-3000:])
        if what():
            return
        time.sleep(0.2)
    raise AssertionError("it never came to that")
