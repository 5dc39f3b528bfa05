"""The output of a process: no text steers the terminal, and no lost reader (`| head`) or full disk ends the process.

    print, warnings, logging, tracebacks ──▶ PlainOutput ──▶ sys.stdout, sys.stderr ──▶ fd 1, 2 ──▶ a file, a terminal
                                              └ inner/printable.py                        └ no space, no reader: lost

A command shows texts that other people wrote into a bucket: `print_plainly` stands at its one way out.

Python raises ENOSPC or EPIPE out of `print`, keeps the text, and fails again at each flush, also at the end of the
process.  A replica, or the supervisor of a fleet, would end because it prints.  So text that does not arrive is
dropped, and nothing but its absence shows that.

    SIGHUP    sent when a terminal is closed: like a SIGTERM, unless it is ignored already (`nohup`)

Not promised: text that did not arrive.
"""

import errno
import io
import signal
import sys
from typing import Any, TextIO, cast

from inner.printable import printable

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.EPIPE, errno.EIO)  # the reader of a pipe has ended; the terminal was closed


class _LossyFile(io.FileIO):
    """A file that takes every byte, and passes on those that it can."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL + GONE:
                raise
            return memoryview(data).nbytes


class PlainOutput:
    """A stream of texts that steer no terminal.   raw: for the program's own escapes."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self.raw.write(printable(text, keep="\n\t"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def print_plainly() -> None:
    """Make this process print plain text from now on, in its last traceback as well."""
    for name in ("stdout", "stderr"):
        here = getattr(sys, name)
        if here is not None and not isinstance(here, PlainOutput):
            setattr(sys, name, PlainOutput(here))


def raw_output(out: TextIO) -> TextIO:
    """The stream below, for escapes that the program writes itself."""
    return out.raw if isinstance(out, PlainOutput) else out


def survive_lost_output() -> None:
    """Make this process's printing succeed from now on, also without space on the disk or a reader of the pipe."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        here = getattr(sys, name)
        if here is not None and raw_output(here) is getattr(sys, f"__{name}__"):
            lossy = _lossy_stream(fd, raw_output(here))
            setattr(sys, name, PlainOutput(lossy) if isinstance(here, PlainOutput) else lossy)


def asking_signals() -> list[signal.Signals]:
    """The signals by which a person, a platform or a closed terminal asks a process to end."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * hangs_up]


def _lossy_stream(fd: int, like: TextIO) -> io.TextIOWrapper:
    buffered = io.BufferedWriter(cast("Any", _LossyFile(fd, "w", closefd=False)))
    return io.TextIOWrapper(buffered, encoding=like.encoding, errors="backslashreplace", line_buffering=True)
