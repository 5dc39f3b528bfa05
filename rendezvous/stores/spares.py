"""Files whose pages are used again.

    put ─▶ .tmp/… ──link──▶ steps/7/delta/…     and a second name, .tmp/spare-…
                                 ✗ collected    now that is the only one: nobody else can open it
    put ─▶ the same file, overwritten ──link──▶ steps/8/delta/…

Fresh pages are two thirds of what a large write to a folder in memory costs, and a run writes blobs of one size for
ever.  So a process keeps a second name for what it wrote, and writes over what was deleted meanwhile.  A reader that
still has such a file open sees bytes with another digest, as of any blob that is gone.

Not promised: space at once.  Up to `FREE` deleted blobs per process stay allocated, until it ends, the disk is full,
or (after a kill) the next process of this machine looks.
"""

import os
import socket
import threading
import weakref
from contextlib import suppress
from pathlib import Path

LEAST = 1 << 20  # bytes; below that a fresh file is as good
NAMES = 64
FREE = 2


class Spares:
    """The second names that this process keeps in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._pid, self._stem, self._count, self._names = 0, "", 0, list[str]()
        weakref.finalize(self, _drop_mine, self._names, os.getpid())

    def reuse_file(self, size: int, name: str) -> bool:
        """Put a file of exactly `size` bytes, of which nobody else has a name, in the place of `name`."""
        with self._lock:
            self._begin_in_process()
            for spare in self._names:
                if _free_size(spare) == size:
                    self._names.remove(spare)
                    with suppress(OSError):
                        os.rename(spare, name)
                        return True
                    return False
        return False

    def keep_name(self, name: str) -> None:
        """Keep this name for a file that has a key by now."""
        with self._lock:
            self._begin_in_process()
            self._count += 1
            spare = f"{self._stem}{self._count}"
            with suppress(OSError):
                os.rename(name, spare)
                self._names.append(spare)
            free = [n for n in self._names if _free_size(n) is not None]
            for old in {*self._names[:-NAMES], *free[:-FREE]}:
                self._names.remove(old)
                _unlink_quietly(old)

    def drop_all(self) -> None:
        """Give the space back."""
        with self._lock:
            _drop_mine(self._names, self._pid)
            self._names.clear()

    def _begin_in_process(self) -> None:
        """At first, and after a fork: the names so far are the parent's."""
        if self._pid == os.getpid():
            return
        self._pid, host = os.getpid(), f"spare-{socket.gethostname()}-"
        self._names.clear()
        self._stem = f"{self._folder}/{host}{self._pid}-{os.urandom(4).hex()}-"
        for start in (host, unfinished_prefix()):
            for path in self._folder.glob(f"{start}*"):
                pid = path.name.removeprefix(start).partition("-")[0]
                if pid.isdigit() and not _is_alive(int(pid)):
                    _unlink_quietly(str(path))


def unfinished_prefix(pid: int | None = None) -> str:
    """How the name of a file begins that this machine (this process of it) is writing: a kill leaves it behind."""
    return f"put-{socket.gethostname()}-" + ("" if pid is None else f"{pid}-")


def _free_size(name: str) -> int | None:
    """Its size if this is its only name."""
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_size if found.st_nlink == 1 else None


def _unlink_quietly(name: str) -> None:
    with suppress(OSError):
        os.unlink(name)


def _drop_mine(names: list[str], pid: int) -> None:
    if pid == os.getpid():
        for name in names:
            _unlink_quietly(name)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
