"""Marks of the runs that a process works for. The kernel shows them, and no other process can write them.

    mark(url)            ─▶ an anonymous file of this process, with one digest for each run
    works_for(pid, url)  ◀─ /proc/PID/fd/…, which only the process's own user (and root) can read
                            True, False (it works for other runs), None: it has no mark

A claim, a card or a log names a process, but another writer may have forged them, or copied them with the whole run.
So a process is signalled only if its own mark names this run: its URL, on the server that the environment
names.

Not promised: a mark without memfd_create (macOS). Nothing is proved there, so no process is killed.
"""

import hashlib
import os
import threading
from contextlib import suppress

NAME = "diloco-runs"
SERVERS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
           "HF_S3_ENDPOINT", "MODAL_ENVIRONMENT")  # fmt: skip

_lock = threading.Lock()
_held: dict[int, tuple[int, set[bytes]]] = {}  # this process's pid -> its file, and the marks in it


def mark(url: str) -> None:
    """Mark that this process works for the run at `url`, until it ends."""
    if not hasattr(os, "memfd_create"):
        return
    with _lock, suppress(OSError):  # too many open files: no mark, so it is never killed
        pid = os.getpid()
        if pid not in _held:  # after a fork, the file here is the parent's
            _held.clear()
            _held[pid] = os.memfd_create(NAME), set()
        file, marks = _held[pid]
        if (digest := _digest_of(url)) not in marks:
            os.write(file, digest + b"\n")
            marks.add(digest)


def works_for(pid: int, url: str) -> bool | None:
    """Whether the process's marks name the run at `url`.   None: no marks, or reading is not allowed."""
    marks = _marks_of(pid)
    return _digest_of(url) in marks if marks else None


def _marks_of(pid: int) -> set[bytes]:
    found = set[bytes]()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{NAME} "):
                    with open(path, "rb") as file:
                        found.update(file.read().split())
    return found


def _digest_of(url: str) -> bytes:
    scheme, colon, rest = url.partition("://")
    if not colon or scheme == "file":
        where = [os.path.realpath(rest if colon else url)]
    else:
        where = [url.rstrip("/"), *(os.environ.get(name, "") for name in SERVERS)]
    return hashlib.sha256("\0".join(where).encode(errors="surrogateescape")).hexdigest()[:32].encode()
