"""The runs that a process works for, as this machine's kernel tells it: no other process can write that down.

    mark(url)            ─▶ an anonymous file of this process, with one digest for each run
    works_for(pid, url)  ◀─ /proc/PID/fd/…, which the process's own user alone (and root) can read
                            True, False (it works for other runs), None: it does not say

A claim, a card or a log names a process; another writer may have forged those, or copied them with the whole run.  So a
process is signalled only if its own mark says that it works for this run: its URL, on the server that the environment
names.

Not promised: a mark where there is no memfd_create (macOS); nothing is proved there, and so nothing is killed.
"""

import hashlib
import os
import threading
from contextlib import suppress

NAME = "diloco-runs"
SERVERS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
           "HF_S3_ENDPOINT", "MODAL_ENVIRONMENT")  # fmt: skip

_lock = threading.Lock()
_held: dict[int, tuple[int, set[bytes]]] = {}  # this process's pid -> its file, and what stands there


def mark(url: str) -> None:
    """Say that this process works for the run at `url`, as long as it lives."""
    if not hasattr(os, "memfd_create"):
        return
    with _lock, suppress(OSError):  # too many open files: then it is not proved, and not killed
        pid = os.getpid()
        if pid not in _held:  # after a fork the parent's file is still here, and is the parent's
            _held.clear()
            _held[pid] = os.memfd_create(NAME), set()
        file, marks = _held[pid]
        if (digest := _digest_of(url)) not in marks:
            os.write(file, digest + b"\n")
            marks.add(digest)


def works_for(pid: int, url: str) -> bool | None:
    """Whether the process says that it works for the run at `url`.   None: it says nothing, or we may not look."""
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
