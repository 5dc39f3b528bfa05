"""Is the disk full that a run's folder, or the files of its processes, lie on?

    status ──▶ full_words(run) ──▶ "the run's disk is full …"   no heartbeat can say it: there is no room for one
    launch ──▶ room_for(folder) ──▶ Unavailable                  a process without room would only die; asked again

Not promised: quotas of a user or a bucket. Those are met by who writes, and told by the replicas.
"""

import os
import tempfile
from pathlib import Path

from diloco.output import FULL
from executors.base import Unavailable

LEAST = 64 << 10  # bytes; fewer, and not even heartbeats and logs are written reliably
CARD = b" " * 4096  # a process's name card and the first lines of its log


def full_words(url: str) -> str:
    """What to say of a full disk under a run that is a folder of this machine; "" if there is room."""
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


def room_for(folder: Path) -> None:
    """Raises Unavailable if `folder` has no room for the files of a process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(CARD)
    except OSError as error:
        if error.errno in FULL:
            raise Unavailable(
                f"no space left on this machine's disk for the processes' files ({folder}). Free some; nothing is "
                "started until then, and what runs goes on"
            ) from error
