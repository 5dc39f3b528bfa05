"""The output of a process, into a file on a disk that may be full.

    print, warnings, logging, the user's own code ──▶ sys.stdout, sys.stderr ──▶ fd 1, 2 ──▶ a log file
                                                                                   └ no space: that text is lost

Python raises ENOSPC out of `print`, keeps the text, and fails again at each flush, also at the end of the process. A
replica would end because it prints. So text that does not fit is dropped, and nothing but its absence shows that.

Not promised: that text, nor anything about pipes and terminals, which stay as they are.
"""

import errno
import io
import os
import stat
import sys
from typing import Any, cast

FULL = (errno.ENOSPC, errno.EDQUOT)


class _LossyFile(io.FileIO):
    """A file that takes every byte, and keeps those that fit."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL:
                raise
            return memoryview(data).nbytes


def survive_full_disk() -> None:
    """From now on what this process prints into log files never fails for want of space."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        here = getattr(sys, name)
        if here is getattr(sys, f"__{name}__") and _is_file(fd):
            setattr(sys, name, _lossy_stream(fd, here))


def _is_file(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode)
    except OSError:
        return False


def _lossy_stream(fd: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(cast("Any", _LossyFile(fd, "w", closefd=False)))
    return io.TextIOWrapper(buffered, encoding=like.encoding, errors="backslashreplace", line_buffering=True)
