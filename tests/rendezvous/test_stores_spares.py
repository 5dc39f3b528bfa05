"""Deleted blobs of a folder lend their pages to the next ones, and no reader ever sees it."""

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rendezvous.errors import StoreFull
from rendezvous.machine import machine_name, start_ticks
from rendezvous.stores import files
from rendezvous.stores.files import LEAST, FileStore
from rendezvous.stores.spares import FREE, NAMES


def body(fill: int, size: int = LEAST) -> bytes:
    return bytes([fill]) * size


def inode(store: FileStore, key: str) -> int:
    return os.stat(store.root / key).st_ino


def spares(store: FileStore) -> list[str]:
    return sorted(p.name for p in (store.root / ".tmp").glob("*"))


def test_what_was_deleted_is_written_over_and_what_was_not_is_never_touched(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1))
    store.put("b", body(2))
    old = inode(store, "a")
    store.delete(["a"])
    store.put("c", body(3))
    assert inode(store, "c") == old and store.get("c") == body(3)
    assert store.get("a") is None and store.get("b") == body(2)
    assert store.list("") == ["b", "c"]


def test_it_does_not_matter_who_deleted_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("deep/down/a", body(1))
    old = inode(store, "deep/down/a")
    os.unlink(tmp_path / "deep/down/a")
    store.put("b", body(2))
    assert inode(store, "b") == old


def test_overwriting_a_key_never_bends_what_a_reader_has_open(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1))
    with open(tmp_path / "a", "rb") as reader:
        store.put("a", body(2))
        assert reader.read() == body(1)
    assert store.get("a") == body(2)


def test_only_files_of_the_same_size_serve(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1, LEAST + 1))
    store.delete(["a"])
    store.put("b", body(2))
    assert store.get("b") == body(2)


def test_small_bodies_leave_nothing_behind(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1, LEAST - 1))
    assert spares(store) == []


def test_at_most_a_few_deleted_ones_and_a_few_names_stay(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    for i in range(NAMES + 3):
        store.put(f"k{i}", body(0))
    assert len(spares(store)) == NAMES
    store.delete([f"k{i}" for i in range(NAMES + 3)])
    store.put("last", body(1))
    free = [n for n in spares(store) if os.stat(tmp_path / ".tmp" / n).st_nlink == 1]
    assert len(free) == FREE


def test_a_full_disk_gets_the_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1))
    store.delete(["a"])
    assert len(spares(store)) == 1

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files, "_write_body", full)
        with pytest.raises(StoreFull):
            store.put("b", body(2, 10))
    assert spares(store) == []


CHILD = """
import os, sys
from rendezvous.stores.files import FileStore
store = FileStore(sys.argv[1])
store.put("theirs", bytes(1 << 20))
print("written", flush=True)
if sys.argv[2] == "stay":
    sys.stdin.read()
"""


def child(folder: Path, how: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def test_a_process_that_ends_gives_its_names_back(tmp_path: Path) -> None:
    child(tmp_path, "go").communicate()
    assert spares(FileStore(tmp_path)) == []


def test_names_of_a_killed_process_are_cleared_by_the_next_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    killed, living = child(tmp_path, "stay"), child(tmp_path, "stay")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert len(spares(FileStore(tmp_path))) == 2
    store = FileStore(tmp_path)
    store.put("ours", body(1))
    left = spares(store)
    assert sum(f"-{killed.pid}." in n for n in left) == 0
    assert sum(f"-{living.pid}." in n for n in left) == 1
    living.communicate()
    assert store.get("theirs") == bytes(LEAST) and store.get("ours") == body(1)


def test_a_pid_that_another_process_has_by_now_keeps_no_file(tmp_path: Path) -> None:
    """The name has the start of its process, in ticks: a recycled pid is not taken for it."""
    with child(tmp_path, "stay") as living:
        (tmp_path / ".tmp").mkdir(exist_ok=True)
        started = start_ticks(living.pid)
        for kind in ("spare", "put"):
            for ticks in (started, (started or 0) - 1):
                (tmp_path / ".tmp" / f"{kind}-{machine_name()}-{living.pid}.{ticks}-left").write_bytes(b"x")
        FileStore(tmp_path).put("ours", body(1))
        left = {path.name for path in (tmp_path / ".tmp").glob("*-left")}
        assert left == {f"{kind}-{machine_name()}-{living.pid}.{started}-left" for kind in ("spare", "put")}
        living.communicate()


def test_another_container_of_this_hostname_keeps_its_files(tmp_path: Path) -> None:
    """Its pids mean other processes: a pid that is free here may be a living one there."""
    (tmp_path / ".tmp").mkdir()
    named = [
        f"{kind}-{host}-{2**22 + 1}{started}-left"
        for kind in ("spare", "put")
        for host in (f"{socket.gethostname()}~0123456789ab", socket.gethostname())
        for started in (".77", "")
    ]
    for name in named:
        (tmp_path / ".tmp" / name).write_bytes(b"x")
    FileStore(tmp_path).put("ours", body(1))
    assert {path.name for path in (tmp_path / ".tmp").glob("*-left")} == set(named)


def test_a_fork_does_not_write_over_its_parents_files(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store.put("a", body(1))
    store.delete(["a"])
    if (child := os.fork()) == 0:
        store.put("of the child", body(2))
        os._exit(0)
    os.waitpid(child, 0)  # this one: another test's child may end meanwhile
    store.put("of the parent", body(3))
    assert store.get("of the child") == body(2) and store.get("of the parent") == body(3)


def test_a_reader_in_the_middle_of_a_deleted_blob_is_told_by_its_digest(tmp_path: Path) -> None:
    from rendezvous.clock import SystemClock
    from rendezvous.records.digests import digest
    from rendezvous.records.wire import as_bytes, fetch_checked

    store, value = FileStore(tmp_path), np.arange(LEAST, dtype=np.uint8)
    store.put("a", as_bytes(value))
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    store.delete(["a"])
    store.put("b", body(9))
    assert os.pread(fd, 4, 0) == body(9, 4), "its pages serve another blob now"
    os.close(fd)
    out = np.empty(LEAST, np.uint8)
    assert "missing" in str(fetch_checked(store, SystemClock(), "a", [(LEAST, digest(as_bytes(value)))], out, tries=1))
