"""Checks whether the disk of a run's folder, or of the files of its processes, is full.

    status ──▶ full_words(run) ──▶ "the run's disk is full …"   a heartbeat cannot say it: there is no room for one
    launch ──▶ room_for(folder) ──▶ Unavailable                  a process without room would die; launch it later
           └─▶ launches_wait("…")  ──▶ the same                  for the launch's own files
    a replica's event that its own disk is full ──▶ found_room   the event is hidden once the replica has joined

Not promised: quotas of a user or a bucket.  Replicas report them when a write fails.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diloco.process.disk import full_disk_words, is_full
from diloco.process.output import FULL
from diloco.runlog.reader import Report
from executors.platforms.base import Unavailable

LEAST = 64 << 10  # bytes; with fewer, not even heartbeats and logs can be written reliably
CARD = b" " * 4096  # a process file and the first lines of its log


def full_words(url: str) -> str:
    """Return a warning if the run is a folder of this machine and its disk is full; else ""."""
    scheme, colon, rest = url.partition("://")
    if colon and scheme != "file":
        return ""
    try:
        disk = os.statvfs(rest if colon else url)
    except OSError:
        return ""
    free = disk.f_bavail * disk.f_frsize
    if free >= LEAST or disk.f_blocks == 0:
        return ""
    size = disk.f_blocks * disk.f_frsize
    return f"the run's disk is full ({free} bytes left of {size / 1e6:.0f} MB): all wait; free some, they go on"


def found_room(event: Mapping[str, Any], report: Report) -> bool:
    """Whether the event says that a replica's own disk was full, and that replica has joined or ended since."""
    if event["event"] != "disk_full":
        return False
    return any(x.name == event["who"] and (x.joined is not None or x.how != "running") for x in report.sessions)


def room_for(folder: Path) -> None:
    """Raise Unavailable if `folder` has no room for the files of a process."""
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(CARD)
    except OSError as error:
        if error.errno in FULL:
            raise no_launch(error, "the processes' files", str(folder)) from error


@contextmanager
def launches_wait(what: str) -> Iterator[None]:
    """Raise Unavailable if a launch finds no space for `what`.  It is launched later, and no replica is blamed."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise no_launch(error, what) from error
        raise


def no_launch(error: OSError, what: str, folder: str = "") -> Unavailable:
    """Return the error that says why nothing is launched now.   folder: the full one, if `error` names no file."""
    words = f"no space left on this machine's disk for {what} ({folder})" if folder else full_disk_words(error, what)
    return Unavailable(f"{words}. Free some; nothing is started until then, and what runs goes on")
