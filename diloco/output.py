"""The output of a process whose reader may go: a full disk, `| head`, a terminal that was closed.

    print, warnings, logging, the user's own code ──▶ sys.stdout, sys.stderr ──▶ fd 1, 2 ──▶ a file, a pipe, a terminal
                                                                                 └ no space, no reader: it is lost

Python raises ENOSPC or EPIPE out of `print`, keeps the text, and fails again at each flush, also at the end of the
process.  A replica, or the supervisor of a fleet, would end because it prints.  So text that does not arrive is
dropped, and nothing but its absence shows that.

    SIGHUP    sent when a terminal is closed: like a SIGTERM, unless it is ignored already (`nohup`)

Not promised: that text.
"""

import errno
import io
import signal
import sys
from typing import Any, cast

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.EPIPE, errno.EIO)  # whoever read a pipe has ended; the terminal was closed


class _LossyFile(io.FileIO):
    """A file that takes every byte, and passes on those that it can."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL + GONE:
                raise
            return memoryview(data).nbytes


def survive_lost_output() -> None:
    """From now on what this process prints never fails for want of space or of a reader."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        here = getattr(sys, name)
        if here is not None and here is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lossy_stream(fd, here))


def asking_signals() -> list[signal.Signals]:
    """The signals by which a person, a platform or a closed terminal asks a process to end."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * hangs_up]


def _lossy_stream(fd: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(cast("Any", _LossyFile(fd, "w", closefd=False)))
    return io.TextIOWrapper(buffered, encoding=like.encoding, errors="backslashreplace", line_buffering=True)
