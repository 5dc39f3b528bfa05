"""This machine's disk: a session's folder for its downloads, and the wait for space on a full disk.

    TMPDIR/replica-x7f3/             model, code, the loop's files: a model's size for each session
                    .alive           locked while its process lives;  kill -9 ──▶ the lock is free, the files stay
    Scratch()  ──▶  removes every other replica-*/ whose .alive exists and is free, then makes its own

    retry_when_full(session, "the start model", fetch)
        ── ENOSPC ──▶ note "no space left on …: free some" ──▶ again … ──▶ GaveUp

A folder without an .alive is not removed: it may be new, or another program's.

Not promised: that a folder on a file system without flock is ever removed; that free space stays free until it is used.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

from diloco.process.output import FULL

if TYPE_CHECKING:
    from diloco.process.session import Session

T = TypeVar("T")
PREFIX = "replica-"
ALIVE = ".alive"


class Scratch:
    """A folder that is removed when its block ends; after a kill, the machine's next session removes it."""

    def __init__(self) -> None:
        remove_left_behind(Path(tempfile.gettempdir()))
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self._lock = _locked_file(Path(self._folder.name))

    def __enter__(self) -> Path:
        return Path(self._folder.name)

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()
        self._lock.close()


def _locked_file(folder: Path) -> IO[bytes]:
    """Make the lock file. We lock it before it gets its name, so the lock is never free while its session runs."""
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


def retry_when_full(session: "Session", what: str, act: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """Call `act` until there is space for it, and return its result.   check: called before each wait; may raise.

    Raises GaveUp after the run's give_up_s without space."""
    began = session.clock.now()
    while True:
        try:
            return act()
        except OSError as error:
            if not is_full(error):
                raise
            from diloco.process.full_disk import wait_for_space

            wait_for_space(session, what, error, session.clock.now() - began, check)


def is_full(error: Exception) -> bool:
    """Whether the error means a full disk. Python raises FileNotFoundError if no temporary folder has space, and
    safetensors a SafetensorError, whose text ends with the errno."""
    if not isinstance(error, OSError):
        return any(f"(os error {number})" in str(error) for number in FULL)
    return error.errno in FULL or (
        isinstance(error, FileNotFoundError) and "No usable temporary" in str(error.strerror)
    )
