"""Spare files: files of deleted blobs, whose memory pages are used again.

    put ─▶ .tmp/… ──link──▶ steps/7/delta/…     and a second name, .tmp/spare-…
                                 ✗ collected    the second name is now the only one: no other process opens it
    put ─▶ the same file, overwritten ──link──▶ steps/8/delta/…

New pages are two thirds of the cost of a large write to a folder in memory, and a run writes blobs of the same size
again and again.  So a process keeps a second name for each file that it wrote, and overwrites files whose keys were
deleted.  A reader that still has such a file open reads bytes with a wrong digest, as if the blob were deleted.

Not promised: free space immediately.  Deleted blobs of a process stay allocated until its next large write, and `FREE`
of them until the process ends, the disk is full, or (after a kill) another process of this machine writes a large blob.
Files from before the last boot stay; no process needs these files, and you may delete them from `.tmp/`.
"""

import glob
import os
import re
import threading
import weakref
from contextlib import suppress
from pathlib import Path

from rendezvous.machine import is_alive, machine_name, name_in_files

NAMES = 64
FREE = 2
_OWNER = re.compile(r"(\d+)\.([1-9]\d*)-")


class Spares:
    """The second names that this process keeps in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._pid, self._stem, self._count, self._names = 0, "", 0, list[str]()
        weakref.finalize(self, _drop_mine, self._names, os.getpid())

    def reuse_file(self, size: int, name: str) -> bool:
        """Give `name` to a spare file of exactly `size` bytes without another name.   Return whether this worked."""
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
        """Rename the temporary file `name` to a spare name.  By now a key is the second name of this file."""
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
        """Delete all spare names, which frees their space."""
        with self._lock:
            _drop_mine(self._names, self._pid)
            self._names.clear()

    def _begin_in_process(self) -> None:
        """In a new process, also after a fork: start without names, and delete the files of ended processes."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._names.clear()
        self._stem = f"{self._folder}/spare-{name_in_files(self._pid)}-{os.urandom(4).hex()}-"
        for start in (f"spare-{machine_name()}-", f"put-{machine_name()}-"):
            for path in self._folder.glob(f"{glob.escape(start)}*"):
                if (owner := _OWNER.match(path.name, len(start))) and not is_alive(int(owner[1]), int(owner[2])):
                    _unlink_quietly(str(path))


def _free_size(name: str) -> int | None:
    """Return the size of the file if `name` is its only name, else None."""
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
