"""Safe output of a process: text cannot control the terminal; a closed pipe (`| head`) or full disk ends no process.

    print, warnings, logging, tracebacks ──▶ PlainOutput ──▶ sys.stdout, sys.stderr ──▶ fd 1, 2 ──▶ a file, a terminal
                                              └ inner/printable.py                        └ no space, no reader: lost

A command prints texts that other users wrote into a bucket, so all its output passes through `print_plainly`.

Without this, Python raises ENOSPC or EPIPE in `print`, keeps the text, and fails again at each flush, also at the end.
So a replica or a supervisor would end because it prints.  This file drops text that cannot be written.

A closed stream (`>&-`) becomes /dev/null, and a character that stdout's encoding lacks becomes `?`.

Not promised: to keep text that could not be written.
"""

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast

from inner.printable import printable

FULL = (errno.ENOSPC, errno.EDQUOT)
GONE = (errno.EPIPE, errno.EIO)  # EPIPE: the reader of a pipe has ended; EIO: the terminal was closed


class _LossyFile(io.FileIO):
    """A file that accepts every byte, and drops the bytes that it cannot write."""

    def write(self, data: "bytes | bytearray | memoryview", /) -> int:  # type: ignore[override]
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in FULL + GONE:
                raise
            return memoryview(data).nbytes


class PlainOutput:
    """A stream without terminal escapes in its text; its errors name it.   raw: for the program's own escapes."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        return self._try(self.raw.write, printable(text, keep="\n\t"))

    def flush(self) -> None:
        self._try(self.raw.flush)

    def _try(self, act: Callable[..., Any], *words: str) -> Any:
        try:
            return act(*words)
        except OSError as error:
            error.filename = getattr(self.raw, "name", None)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def open_streams() -> None:
    """Open closed standard streams on /dev/null, so that no file gets their numbers; let stdout print any text."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - lives as we do
    own = ("strict", "surrogateescape")  # Python's own choices; PYTHONIOENCODING has set any other
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in own:
        sys.stdout.reconfigure(errors="replace")


def print_plainly() -> None:
    """Make this process print plain text from now on, also in its last traceback."""
    for name in ("stdout", "stderr"):
        here = getattr(sys, name)
        if here is not None and not isinstance(here, PlainOutput):
            setattr(sys, name, PlainOutput(here))


def raw_output(out: TextIO) -> TextIO:
    """Return the underlying stream, for the program's own escapes."""
    return out.raw if isinstance(out, PlainOutput) else out


def survive_lost_output(*names: str) -> None:
    """Make this process's prints succeed from now on, even with a full disk or a closed pipe.   names: default both."""
    for name in names or ("stdout", "stderr"):
        fd = 1 if name == "stdout" else 2
        here = getattr(sys, name)
        if here is not None and raw_output(here) is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(cast("Any", _LossyFile(fd, "w", closefd=False)))
            coding = raw_output(here).encoding
            lossy: Any = io.TextIOWrapper(raw, encoding=coding, errors="backslashreplace", line_buffering=True)
            lossy.close = lossy.flush  # the user's code may close the stream; that must not end the session
            setattr(sys, name, PlainOutput(lossy) if isinstance(here, PlainOutput) else lossy)
