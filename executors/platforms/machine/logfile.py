"""Reads a log file while it grows; `follow` returns only complete lines, and each line once.

    LogFile(path).lines(tail=5)            the last five lines that are there
    LogFile(path).follow(None, ended, …)   also new lines, until `ended()`

Not promised: correct lines if the file is truncated while it is read.
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from diloco.process.own_files import ForeignFile, open_own
from executors.platforms.base import Unavailable, last_lines
from rendezvous.clock import Clock


@dataclass(frozen=True)
class LogFile:
    """A log file.   keep(line): a filter; True to return the line."""

    path: Path
    keep: Callable[[str], bool] = lambda line: True

    def lines(self, tail: int | None = None) -> list[str]:
        return last_lines(self.lines_from(0), tail)

    def lines_from(self, at: int) -> list[str]:
        """Return the lines after the first `at` bytes."""
        return [line for raw in self._read_from(at).splitlines() if self.keep(line := _decode_line(raw))]

    def follow(self, tail: int | None, ended: Callable[[], bool], clock: Clock, pause_s: float) -> Iterator[str]:
        at = self._start_of(tail)
        part = b""
        while True:
            over = ended()  # before the file is read, so that no line is missed
            news = self._read_from(at)
            at += len(news)
            *whole, part = (part + news).split(b"\n")
            yield from filter(self.keep, map(_decode_line, [*whole, part] if over and part else whole))
            if over:
                return
            clock.sleep(pause_s)

    def _start_of(self, tail: int | None) -> int:
        """Return the offset in bytes at which the last `tail` lines begin."""
        if tail is None:
            return 0
        lines = self._read_from(0).splitlines(keepends=True)
        ends = [
            end
            for end, raw in zip(accumulate(map(len, lines)), lines, strict=True)
            if self.keep(_decode_line(raw.rstrip(b"\n")))
        ]
        return 0 if len(ends) <= tail else ends[-tail - 1]

    def _read_from(self, at: int) -> bytes:
        try:
            with open(open_own(self.path), "rb") as log:
                log.seek(at)
                return log.read()
        except (FileNotFoundError, NotADirectoryError):
            return b""
        except OSError as error:
            if isinstance(error, ForeignFile) or error.errno == errno.ELOOP:  # a link or a FIFO: not our log
                return b""
            raise


def _decode_line(raw: bytes) -> str:
    return raw.decode(errors="replace")


def follow_stream(
    read: Callable[[], Iterable[str]], shown: int, ended: Callable[[], bool], pause: Callable[[], None]
) -> Iterator[str]:
    """Yield the lines of a log that a platform reads from its beginning each time, without the first `shown`."""
    while True:
        over = ended()  # before the log is read, so that no line is missed
        with suppress(Unavailable):
            for number, line in enumerate(read(), 1):
                if number > shown:
                    shown = number
                    yield line
            if over:
                return
        pause()
