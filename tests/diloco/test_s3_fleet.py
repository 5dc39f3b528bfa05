"""Real replica processes that meet in a bucket, on good days and bad: what the folder's tests show, through S3.

The audit (tests/support/audit.py) reads the bucket as it lies there, downloaded into a folder.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.run import founding
from diloco.run.config import FleetConfig
from diloco.run.founding import open_run
from diloco.run.record import timing_for
from executors.cli import main as cli
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreRefused
from rendezvous.stores.open import open_store
from tests.support.audit import Audit, check_run
from tests.support.fleet import ENDLESS, Fleet, config
from tests.support.s3_server import S3Server

URL = "s3://bucket/runs/fleet"
ROOT = Path(__file__).parents[2]
SLOW = {"outer": {"sync_every": 30, "snapshot_every": 2}}  # an outer step lasts for some beats, so that tests can aim
FOREVER = 1 << 30


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Ours and the replicas'."""
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    values = {
        "AWS_ACCESS_KEY_ID": "AKIDTEST",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return values


@pytest.fixture
def s3(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(access_key="AKIDTEST") as server:
        environ["AWS_ENDPOINT_URL"] = server.endpoint
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        yield server


def audited(fleet: Fleet, steps: int) -> Audit:
    """Download the bucket and replay it."""
    return check_run(downloaded(fleet.url, fleet.folder / "bucket"), steps)


def downloaded(url: str, folder: Path) -> Path:
    store = open_store(url)
    for key in store.list(""):
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(store.get(key) or b"")
    return folder


# -------------------------------------------------------------------- replicas


@pytest.mark.slow
def test_one_is_killed_and_replaced_and_no_step_is_lost(tmp_path: Path, s3: S3Server, environ: dict[str, str]) -> None:
    fleet = Fleet(tmp_path, URL, environ, **SLOW, fleet={"steps": ENDLESS})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.counted("r01") and fleet.training("r01", 2))
    fleet.signal("r01", signal.SIGKILL)
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.counted("r01", 2))
    fleet.end_in(2)
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = audited(fleet, len(fleet.commits()))
    assert sum(slot == "r01" for _, slot in found.listed) >= 2
    assert open_store(URL).list("probe/") == [], "what the first look wrote is gone"


@pytest.mark.slow
def test_a_bad_day(tmp_path: Path, s3: S3Server, environ: dict[str, str]) -> None:
    """Lost answers, refusals that mean nothing, slowness: every request may meet one."""
    s3.fault("lost", op="PutObject", times=FOREVER, probability=0.05)
    s3.fault("409", op="PutObject", times=FOREVER, probability=0.05)
    s3.fault("503", op="Object", times=FOREVER, probability=0.03)
    s3.fault("slow", times=FOREVER, probability=0.02, seconds=0.3)
    fleet = Fleet(tmp_path, URL, environ, fleet={"steps": 8})
    fleet.start_all()
    codes = fleet.wait()
    s3.faults.clear()
    assert codes == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    audited(fleet, 8)


@pytest.mark.slow
def test_a_token_expires_and_the_keys_are_renewed_beside_the_run(
    tmp_path: Path, s3: S3Server, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(tmp_path, URL, environ)
    fleet.start_all()
    fleet.wait_for(lambda: fleet.commit(1))
    s3.expired, s3.access_key = True, "AKIDNEW"
    time.sleep(3.0)
    s3.expired = False
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = AKIDNEW\naws_secret_access_key = new\n")
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    assert "The token has expired or is not valid: renew it; the run continues" in fleet.logs()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDNEW")
    audited(fleet, 6)


# -------------------------------------------------------------------- founding


def test_a_store_that_overwrites_is_refused_before_anything_is_written(tmp_path: Path, s3: S3Server) -> None:
    s3.overwrites = True
    with pytest.raises(StoreRefused, match=r"cannot carry a run: silently overwrites.*diloco doctor s3://bucket"):
        open_run(config(tmp_path), URL, SystemClock())
    assert s3.keys("bucket", "") == []


def test_a_store_that_overwrites_by_now_is_refused_though_it_has_a_run(
    tmp_path: Path, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Ceph's gateway does, once versioning is turned on. Before, replicas noticed it some ten steps later."""
    assert open_run(config(tmp_path), URL, SystemClock()).resumed is False
    assert open_run(config(tmp_path), URL, SystemClock()).resumed
    stands = s3.keys("bucket", "")
    s3.overwrites = True
    with pytest.raises(StoreRefused, match="cannot carry a run: silently overwrites"):
        open_run(config(tmp_path), URL, SystemClock())
    assert cli.main(["resume", URL, "--yes"]) == 2 and "cannot carry a run" in capsys.readouterr().err
    assert s3.keys("bucket", "") == stands


def test_missing_credentials_are_told_at_once(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONG")
    monkeypatch.setattr(founding, "LAUNCH_PATIENCE_S", 0.2)
    with pytest.raises(Exception, match=r"InvalidAccessKeyId.*Set AWS_ACCESS_KEY_ID"):
        open_run(config(tmp_path), URL, SystemClock())


def test_a_cloud_is_looked_at_less_often(tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = FleetConfig(give_up_s=77.0)
    for near in (str(tmp_path), "memory://timing", URL):
        assert timing_for(open_store(near), fleet) == fleet.timing
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    far = timing_for(open_store(URL), fleet)
    assert (far.beat, far.poll, far.dead_after, far.give_up) == (5.0, 1.0, 20.0, 77.0)


# -------------------------------------------------------------------- the command


def test_the_command_from_train_to_export(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    config(tmp_path)  # writes the text
    (tmp_path / "run.toml").write_text(
        "[outer]\nsync_every = 4\n[fleet]\nreplicas = 2\nsteps = 3\n"
        '[inner]\nloop = "supervised"\nmodel = "tiny"\nbatch_size = 4\n'
        '[inner.data]\ntext = "text.txt"\ncontext_length = 16\n'
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "executors.cli.main", "train", str(tmp_path / "run.toml"), "--run", URL]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("diloco/processes/**/r01.1.log")), "logs of the processes lie on this machine"
    capsys.readouterr()
    assert cli.main(["status", URL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outer_step"] == 3
    assert cli.main(["stop", URL]) == 0
    assert cli.main(["export", URL, "--to", str(tmp_path / "model")]) == 0
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 100_000
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", URL]) == 0 and (tmp_path / "report.html").exists()
    check_run(downloaded(URL, tmp_path / "bucket"), 3)


def test_the_demo_wants_a_folder(s3: S3Server, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["demo", "--run", URL])
    assert f"{URL!r} is no path of this machine" in capsys.readouterr().err
