"""Folders of sessions: one's own goes at its end, a killed one's with the next session, a living one's never."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from diloco.process.disk import ALIVE, Scratch

HOLDS = (
    "import sys, time; from diloco.process.disk import Scratch\n"
    "with Scratch() as folder:\n"
    "    (folder / 'model').write_bytes(b'w' * 1000); print(folder, flush=True); time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def session() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_its_own_folder_is_removed_and_nothing_else(temporary: Path) -> None:
    for name in ("replica-without-lock", "other-folder"):
        (temporary / name).mkdir()
    with Scratch() as folder:
        (folder / "model").mkdir()
        (folder / "model" / "weights").write_bytes(b"w")
        assert folder.parent == temporary and (folder / ALIVE).exists()
    assert sorted(p.name for p in temporary.iterdir()) == ["other-folder", "replica-without-lock"]


def test_a_killed_sessions_folder_goes_with_the_next_session_and_a_living_ones_stays() -> None:
    living, here = session()
    killed, left = session()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert (left / "model").exists()
        with Scratch() as folder:
            assert folder.exists() and not left.exists()
            assert (here / "model").read_bytes() == b"w" * 1000
    finally:
        for process in (living, killed):
            process.kill()
            process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def test_a_folder_that_stays_is_no_failure(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS and sshfs, an open file that is deleted keeps a hidden name, and its folder cannot be removed.

    Seen with TMPDIR on the real sshfs: replicas that were done crashed with "Directory not empty: 'model'".
    """

    def refuse(path: str, **at: int) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)

    monkeypatch.setattr(os, "rmdir", refuse)
    with Scratch() as folder:
        (folder / "model").mkdir()
    assert folder.exists()
