"""A session's folder for its downloads, and the folders that killed sessions left behind.

    TMPDIR/replica-x7f3/             model, code, the loop's files: as much as the model, again and again
                    .alive           locked while its process lives;  kill -9 ──▶ the lock is free, the files stay
    Scratch()  ──▶  removes every replica-*/ beside it whose .alive is there and free, then makes its own

A folder without an .alive is left alone: it may be in the making, or another program's.

Not promised: that a folder on a file system without flock is ever removed.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

PREFIX = "replica-"
ALIVE = ".alive"


class Scratch:
    """A folder that goes when its block ends, or with the next session on this machine after a kill."""

    def __init__(self) -> None:
        remove_left_behind(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        self._lock = _locked_file(Path(self._folder.name))

    def __enter__(self) -> Path:
        return Path(self._folder.name)

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()
        self._lock.close()


def _locked_file(folder: Path) -> IO[bytes]:
    """Make the lock file; it is locked before it has its name, so it is never free while its session lives."""
    lock = (folder / f"{ALIVE}-new").open("wb")
    with suppress(OSError):  # no flock here: no other process can lock it either
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / ALIVE)
    return lock


def remove_left_behind(temporary: Path) -> None:
    """Remove the folders of sessions that are dead.   What cannot be removed stays."""
    for alive in temporary.glob(f"{PREFIX}*/{ALIVE}"):
        with suppress(OSError), alive.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(alive.parent, ignore_errors=True)
