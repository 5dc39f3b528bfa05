"""A session's folder for its downloads. It also removes the folders of killed sessions.

    TMPDIR/replica-x7f3/             model, code, the loop's files: a model's size for each session
                    .alive           locked while its process lives;  kill -9 ──▶ the lock is free, the files stay
    Scratch()  ──▶  removes every other replica-*/ whose .alive exists and is free, then makes its own

A folder without an .alive is not removed: it may be new, or another program's.

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
    """A folder that is removed when its block ends; after a kill, the machine's next session removes it."""

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
    """Make the lock file. It is locked before it gets its name, so it is never free while its session runs."""
    lock = (folder / f"{ALIVE}-new").open("wb")
    with suppress(OSError):  # without flock, no other process can lock it either
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(lock.name, folder / ALIVE)
    return lock


def remove_left_behind(temporary: Path) -> None:
    """Remove the folders of ended sessions.   Ignore errors."""
    for alive in temporary.glob(f"{PREFIX}*/{ALIVE}"):
        with suppress(OSError), alive.open("r+b") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(alive.parent, ignore_errors=True)
