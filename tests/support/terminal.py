"""A command in a pty: what it draws, the keys that are pressed, how it ends.

    t = Terminal([sys.executable, …], env)    t.wait_for("outer step 6")    t.press("m")    t.end() ─▶ (code, seconds)

Not promised: what stands on the screen; `drawn` is every byte that was written, with its escapes.
"""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


class Terminal:
    """The command in a pty, and what it has drawn so far."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], columns: int = 160, lines: int = 50) -> None:
        self.began = time.monotonic()
        self.drawn = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(argv[0], argv, env)
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read(self, seconds: float) -> None:
        """Collect the terminal's output for `seconds`."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.fd], [], [], left)[0]:
                try:
                    self.drawn += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:  # the process has ended
                    return

    def wait_for(self, pattern: str, limit_s: float = 120.0) -> float:
        """-> seconds since the start of the process."""
        while not re.search(pattern, self.drawn):
            assert time.monotonic() - self.began < limit_s, self.drawn[-2000:]
            self.read(0.02)
        return time.monotonic() - self.began

    @property
    def rss_mb(self) -> float:
        found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def press(self, key: str) -> None:
        os.write(self.fd, key.encode())

    def end(self, key: str = "q") -> tuple[int, float]:
        """-> exit code, and seconds from the key to the end of the process."""
        began = time.monotonic()
        self.press(key)
        return self.wait_until_gone(), time.monotonic() - began

    def wait_until_gone(self) -> int:
        """-> its exit code."""
        while (gone := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            self.read(0.01)
        self.read(0.05)
        return os.waitstatus_to_exitcode(gone[1])
