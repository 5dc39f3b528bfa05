"""Is the store still the store of this run?  Real processes whose folder, disk or bucket is taken away.

    mount gone · another disk in its place · the folder renamed, deleted, emptied · the bucket emptied

Each must end, or wait until it is back: no outer step with two θ, no "done" without a run, no file below a mount point.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreGone, StoreRefused
from rendezvous.stores.files import FileStore
from rendezvous.stores.open import open_store
from tests.support.s3_server import S3Server

PATIENCE_S = 120.0
ROOT = Path(__file__).parents[2]


def can_mount() -> bool:
    probe = ["unshare", "-m", "sh", "-c", "mount --bind /tmp /tmp"]
    return shutil.which("nsenter") is not None and subprocess.run(probe, capture_output=True).returncode == 0


mounts = pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")


class Fleet:
    """Processes of tests/support/lost_replica.py, and what they report."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, url: str, slot: str, *prefix: str) -> None:
        command = [
            *prefix,
            sys.executable,
            "-m",
            "tests.support.lost_replica",
            url,
            slot,
            str(self.steps),
            self.report(slot),
        ]
        self.processes[slot] = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})

    def start_mounted(self, share: Path, mount: Path, slot: str) -> None:
        """In a mount namespace of its own, with `share` at `mount`."""
        bind = f'mount --bind {share} {mount} && exec "$@"'
        self.start(str(mount / "run"), slot, "unshare", "-m", "--propagation", "private", "sh", "-c", bind, "sh")

    def inside(self, slot: str, command: str) -> None:
        """Run a command in the namespace of a replica."""
        pid = str(self.processes[slot].pid)
        subprocess.run(["nsenter", "-t", pid, "-m", "sh", "-c", command], check=True)

    def report(self, slot: str) -> str:
        return str(self.folder / f"{slot}.jsonl")

    def lines(self, slot: str) -> list[dict]:
        with contextlib.suppress(FileNotFoundError), open(self.report(slot)) as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
        return []

    def wait_for_step(self, step: int) -> None:
        _wait_until(lambda: all(any(x.get("step") == step for x in self.lines(slot)) for slot in self.processes))

    def ends(self) -> dict[str, str]:
        for process in self.processes.values():
            process.wait(PATIENCE_S)
        return {slot: self.lines(slot)[-1].get("end", "?") for slot in self.processes}

    def splits(self) -> list[int]:
        """Outer steps after which two replicas have another θ."""
        bases = defaultdict[int, set[str]](set)
        for slot in self.processes:
            for line in self.lines(slot):
                if "step" in line:
                    bases[line["step"]].add(line["base"])
        return [step for step, seen in bases.items() if len(seen) > 1]


def _wait_until(holds) -> None:
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def found(url: str, replicas: int, steps: int, min_replicas: int = 2) -> None:
    store = open_store(url)
    store.create(layout.RUN, b"{}")
    write_control(store, SystemClock(), replicas=replicas, min_replicas=min_replicas, steps=steps)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, 15)
    yield made
    for process in made.processes.values():
        process.kill()
        process.wait()


def start_on_two_machines(fleet: Fleet, tmp_path: Path) -> Path:
    """Two replicas on the machine that owns the folder, two that mount it; -> the mount point."""
    share, mount = tmp_path / "share", tmp_path / "mount"
    share.mkdir()
    mount.mkdir()
    found(str(share / "run"), 4, fleet.steps)
    for slot in ("r00", "r01"):
        fleet.start(str(share / "run"), slot)
    for slot in ("r02", "r03"):
        fleet.start_mounted(share, mount, slot)
    fleet.wait_for_step(3)
    return mount


@mounts
def test_a_mount_that_goes_away_splits_nothing(fleet: Fleet, tmp_path: Path) -> None:
    """54 of 55 later outer steps had two θ, and all four replicas ended "done"."""
    mount = start_on_two_machines(fleet, tmp_path)
    for slot in ("r02", "r03"):
        fleet.inside(slot, f"umount -l {mount}")
    assert fleet.ends() == {"r00": "done", "r01": "done", "r02": "GaveUp", "r03": "GaveUp"}
    assert fleet.splits() == [] and not list(mount.rglob("*"))
    assert "is not there any more" in fleet.lines("r02")[-2]["why"]


@mounts
@pytest.mark.slow
def test_a_mount_that_comes_back_is_gone_on_with(fleet: Fleet, tmp_path: Path) -> None:
    mount = start_on_two_machines(fleet, tmp_path)
    for slot in ("r02", "r03"):
        fleet.inside(slot, f"umount -l {mount} && sleep 0.5 && mount --bind {tmp_path}/share {mount}")
    assert set(fleet.ends().values()) == {"done"} and fleet.splits() == [] and not list(mount.rglob("*"))


@mounts
@pytest.mark.slow
def test_a_copy_in_the_place_of_the_mount_is_not_written_to(fleet: Fleet, tmp_path: Path) -> None:
    """As a file system that is served anew shows the same names; here they are even the same objects."""
    mount = start_on_two_machines(fleet, tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "share", copy)
    before = sorted(copy.rglob("*"))
    for slot in ("r02", "r03"):
        fleet.inside(slot, f"mount --bind {copy} {mount}")
    assert fleet.ends() == {"r00": "done", "r01": "done", "r02": "GaveUp", "r03": "GaveUp"}
    assert fleet.splits() == [] and sorted(copy.rglob("*")) == before
    assert "leads to another folder than before" in fleet.lines("r03")[-2]["why"]


def start_two(fleet: Fleet, url: str) -> None:
    found(url, 2, fleet.steps)
    for slot in ("r00", "r01"):
        fleet.start(url, slot)
    fleet.wait_for_step(3)


@pytest.mark.slow
def test_a_folder_that_is_deleted_ends_its_replicas(fleet: Fleet, tmp_path: Path) -> None:
    """They ended "done", in a folder that they had made anew, without a run.json."""
    start_two(fleet, str(tmp_path / "run"))
    os.rename(tmp_path / "run", tmp_path / "trash")
    assert fleet.ends() == {"r00": "GaveUp", "r01": "GaveUp"} and not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", [pytest.param("folder", marks=pytest.mark.slow), "bucket"])
def test_a_store_that_is_emptied_ends_its_replicas(
    fleet: Fleet, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rm -rf RUN/*`, `aws s3 rm --recursive`: the folder and the bucket stay."""
    with contextlib.ExitStack() as stack:
        url = str(tmp_path / "run")
        if where == "bucket":
            server = stack.enter_context(S3Server(access_key="AKIDTEST", buckets=("bucket",)))
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            monkeypatch.setenv("AWS_REGION", "us-east-1")
            url = "s3://bucket/run"
        start_two(fleet, url)
        store = open_store(url)
        store.delete(store.list(""))
        assert set(fleet.ends().values()) <= {"RecordsLost", "GaveUp"} and fleet.splits() == []
        assert len([key for key in store.list("") if key.endswith("commit.json")]) <= 1  # it was on its way


@pytest.mark.slow
def test_a_folder_that_is_renamed_is_waited_for(fleet: Fleet, tmp_path: Path) -> None:
    """`mv RUN RUN2` split the run in halves."""
    start_two(fleet, str(tmp_path / "run"))
    os.rename(tmp_path / "run", tmp_path / "moved")
    time.sleep(0.3)
    assert not (tmp_path / "run").exists()
    os.rename(tmp_path / "moved", tmp_path / "run")
    assert fleet.ends() == {"r00": "done", "r01": "done"} and fleet.splits() == []


# ---------------------------------------------------------------------- the folder store by itself


def test_a_store_that_has_seen_its_folder_never_makes_it_again(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "run")
    store.put("key", b"x")
    shutil.rmtree(tmp_path / "run")
    for act in (
        lambda: store.put("key", b"y"),
        lambda: store.get("key"),
        lambda: store.list(""),
        lambda: store.create("k", b"y"),
    ):
        with pytest.raises(StoreGone, match=r"run is not there any more: unmounted, renamed or deleted"):
            act()
    (tmp_path / "run").mkdir()
    with pytest.raises(StoreGone, match="leads to another folder than before"):
        store.put("key", b"y")
    assert not list((tmp_path / "run").iterdir())


def test_a_reader_of_a_run_makes_no_folder(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "run"), make=False)
    assert store.get("key") is None and store.list("") == []
    with pytest.raises(StoreGone, match="does not exist"):
        store.put("key", b"x")
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["fifo", "folder", "socket"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, what: str) -> None:
    """A FIFO in a run's folder froze every replica, the supervisor and `stop`, also after it was removed."""
    import socket

    store = FileStore(tmp_path / "run")
    store.put("control/000000.json", b"x")
    path = tmp_path / "run/control/000001.json"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        os.chdir(path.parent)
        socket.socket(socket.AF_UNIX).bind(path.name)
    for act in (
        lambda: store.get("control/000001.json"),
        lambda: store.get_into("control/000001.json", memoryview(bytearray(4))),
    ):
        with pytest.raises(StoreRefused, match=r"000001.json"):
            act()
    path.rmdir() if what == "folder" else path.unlink()
    assert store.get("control/000001.json") is None
