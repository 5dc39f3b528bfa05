"""Real replica processes under a run key, beside an outsider who can write to their bucket.

The audit reads what only the key opens: tags are taken off here, with nothing but hmac and hashlib.
"""

import hashlib
import hmac
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from executors.cli import main as cli
from executors.supervision.notices.messages import all_troubles
from rendezvous import layout
from rendezvous.errors import Forged
from rendezvous.records.records import Claim, Control, Offer
from rendezvous.stores.files import FileStore
from rendezvous.stores.open import open_store
from tests.executors.test_bad_input import events
from tests.support.audit import Audit, check_run
from tests.support.fleet import Fleet, config

ROOT = Path(__file__).parents[2]
SECRET = "31415926535897932384626433832795"
SLOW: dict[str, Any] = {"outer": {"sync_every": 20, "snapshot_every": 2}, "fleet": {"steps": 5}}


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("DILOCO_RUN_KEY", SECRET)
    return {"DILOCO_RUN_KEY": SECRET}


def without_tags(run: Path, to: Path) -> Path:
    """A copy of a run's folder: true records without their tags, forged ones not at all."""
    identity = json.loads((run / "seal.json").read_bytes())["nonce"]
    for path in sorted(p for p in run.rglob("*") if p.is_file() and "processes" not in p.parts):
        name, body = path.relative_to(run).as_posix(), path.read_bytes()
        assert SECRET.encode() not in body, f"the key is in {name}"
        if layout.record_kind(name) not in (None, "seal"):
            record, end = body[: -len(',"seal":""}') - 64] + b"}", body[-len('":""}') - 64 :]
            if body.endswith(b"\n"):
                record, end = body[: -len('{"seal":""}\n') - 64], body[-len('":""}\n') - 64 : -1]
            message = identity.encode() + b"\0" + name.encode() + b"\0" + record
            if end != b'":"' + hmac.new(SECRET.encode(), message, hashlib.sha256).hexdigest().encode() + b'"}':
                continue
            body = record
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes(body)
    return to


def audited(fleet: Fleet, steps: int) -> Audit:
    return check_run(without_tags(fleet.folder / "run", fleet.folder / "audit"), steps)


class Outsider(threading.Thread):
    """Writes, without the key, what would turn the run if it counted: for every step that opens."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(daemon=True)
        self.bucket, self.fleet, self.over = FileStore(fleet.folder / "run"), fleet, threading.Event()
        self.wrote = list[str]()

    def run(self) -> None:
        self.write(layout.claim_key("r02", 2), Claim("r02", 2, "n", 0.0, "elsewhere", 1).encode())
        self.write(layout.control_key(1), Control(1, "n", 0.0, stop=True).encode())
        for t in range(self.fleet.config.fleet.steps):
            base = self.wait_for_base(t)
            elements = sum(int(np.prod(shape)) for _, shape, _ in self.fleet.model.layout)
            for slot, value in (("r00", np.nan), ("r01", 1e30)):
                body, blob = np.full(elements, value, np.float32).tobytes(), layout.delta_blob(t, slot, 1, "outsider")
                self.bucket.put(blob, body)
                offer = Offer(t, slot, 1, "n", base, 4, blob, len(body), xxhash.xxh3_128_hexdigest(body), 1.0, 0.0)
                self.write(layout.offer_key(t, slot, 0), offer.encode())

    def wait_for_base(self, t: int) -> str:
        """The base that an offer for step t must name: the one in the commit before it, or in the first snapshot."""
        while not self.over.is_set():
            body = self.bucket.get(layout.commit_key(t - 1)) if t else self.bucket.get(layout.snapshot_key(0))
            if body is not None:
                return json.loads(body)["base"]
            self.over.wait(0.005)
        return ""

    def write(self, key: str, body: bytes) -> None:
        try:
            self.bucket.create(key, body)
            self.wrote.append(key)
        except Exception:
            return  # a replica was faster


@contextmanager
def outsider(fleet: Fleet) -> Iterator[Outsider]:
    someone = Outsider(fleet)
    someone.start()
    try:
        yield someone
    finally:
        someone.over.set()
        someone.join(10)


def shown_troubles(url: str) -> set[str]:
    """Their kinds, as status, watch and alerts have them, by a reader without the key."""
    report = read_report(open_store(url))
    return {found.kind for found in all_troubles(report, report.last_sign)}


def test_an_outsider_writes_forged_records_and_none_counts(tmp_path: Path, key: dict[str, str]) -> None:
    fleet = Fleet(tmp_path, environ=key, **SLOW)
    with outsider(fleet) as someone:
        fleet.start_all()
        assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    found = audited(fleet, 5)
    assert np.isfinite(found.theta[0]).all() and np.abs(found.theta[0]).max() < 100
    offers = [k for k in someone.wrote if "/offer/" in k]
    assert len(offers) >= 5 and len(someone.wrote) >= len(offers) + 2, "it was in time"
    told = {str(e["key"]) for e in events(fleet, "forged")}
    assert told == set(someone.wrote)
    assert shown_troubles(fleet.url) >= {"forged"}
    for who in ("r00", "r01", "r02"):
        log = fleet.log(who).read_text()
        assert '"forged"' in log and SECRET not in log
        assert all(log.count(k) <= 1 for k in told), "each is told once"


@pytest.mark.slow
def test_a_forged_commit_ends_every_replica_for_good(tmp_path: Path, key: dict[str, str]) -> None:
    fleet = Fleet(tmp_path, environ=key, **SLOW)
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(1))
    body = FileStore(tmp_path / "run").get(layout.commit_key(1)) or b""
    FileStore(tmp_path / "run").put(layout.commit_key(3), body.replace(b'"t":1', b'"t":3'))
    assert set(map(tuple, fleet.wait().values())) == {(exitcodes.USER_ERROR,)}, fleet.logs()
    assert "not written with this run's key" in fleet.log("r00").read_text()
    with pytest.raises(Forged):
        fleet.commit(3)


@pytest.mark.parametrize(
    ("environ", "words"),
    [({"DILOCO_RUN_KEY": ""}, "DILOCO_RUN_KEY is not set here"), ({"DILOCO_RUN_KEY": SECRET[::-1]}, "another run key")],
)
def test_a_replica_without_the_key_is_refused(
    tmp_path: Path, key: dict[str, str], environ: dict[str, str], words: str
) -> None:
    fleet = Fleet(tmp_path, environ=key, fleet={"replicas": 2})
    fleet.start("r00", **environ)
    assert fleet.wait() == {"r00": [exitcodes.USER_ERROR]}
    log = fleet.log("r00").read_text()
    assert words in log and "Traceback" not in log and SECRET[::-1] not in log
    assert list((tmp_path / "run").glob("replicas/r00/*")) == [], "it has not even claimed its slot"


def cmdlines() -> bytes:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes())
        except OSError:
            continue
    return b"\n".join(found)


@pytest.mark.slow
def test_the_command_under_a_key(tmp_path: Path, key: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    config(tmp_path)  # writes the text
    (tmp_path / "run.toml").write_text(
        "[outer]\nsync_every = 4\n[fleet]\nreplicas = 2\nsteps = 3\n"
        '[inner]\nloop = "supervised"\nmodel = "tiny"\nbatch_size = 4\n'
        '[inner.data]\ntext = "text.txt"\ncontext_length = 16\n'
    )
    url, out = str(tmp_path / "run"), tmp_path / "out.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "executors.cli.main", "train", str(tmp_path / "run.toml"), "--run", url]
    with open(out, "wb") as log:
        train = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        while train.poll() is None:
            assert SECRET.encode() not in cmdlines(), "ps shows the key"
            time.sleep(0.1)
    assert train.returncode == 0, out.read_text()
    assert SECRET not in out.read_text()
    assert all(SECRET.encode() not in p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file())
    capsys.readouterr()
    assert cli.main(["status", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outer_step"] == 3
    assert cli.main(["stop", url]) == 0
    assert cli.main(["export", url, "--to", str(tmp_path / "model")]) == 0
    assert cli.main(["report", url]) == 0 and (tmp_path / "run" / "report.html").exists()
    check_run(without_tags(tmp_path / "run", tmp_path / "audit"), 3)
    monkeypatch.delenv("DILOCO_RUN_KEY")
    capsys.readouterr()
    for verb in (["status", url], ["stop", url], ["export", url, "--to", "x"], ["report", url], command[3:]):
        assert cli.main(verb) == 2
        assert "DILOCO_RUN_KEY is not set here" in capsys.readouterr().err
