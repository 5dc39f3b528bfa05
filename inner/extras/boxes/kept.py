"""Keeps the namespaces of a local box between its commands, so that a process in the background lives on.

    sh ── bwrap … ── sh ── sleep         ends when our end of a pipe closes (`close`, or the death of this process),
                     ▲                   and every process of the box with it
    nsenter -a ──────┘── command         each command enters the namespaces of the box's first process

Not promised: an entry where the kernel forbids it, as with a setuid bwrap; then each command has namespaces of its own.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

# bwrap ends with the thread that started it; a shell's thread does not end before the box
HOLD = 'exec 3<&0; "$@" </dev/null 3<&- & box=$!; { read -r _ <&3; kill -9 $box; } >/dev/null 2>&1 & wait $box'
READY = b"the box is ready\n"
FIRST = ("sh", "-c", f"echo {READY.decode().strip()}; sleep infinity; exit")  # dash would exec a last command


class KeptNamespaces:
    """The namespaces of one box.   words: in front of a command, they run it in new namespaces."""

    def __init__(self, words: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            ["sh", "-c", HOLD, "_", *words, *FIRST],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        with self._process.stdout as told:
            is_ready = told.readline() == READY
        self._pid = self._find_first() if is_ready else 0

    @property
    def is_alive(self) -> bool:
        """Whether the box's first process runs. An episode can end it: `kill -9 -1`."""
        return self._process.poll() is None and self._pid > 0 and Path(f"/proc/{self._pid}").exists()

    def words(self, folder: str) -> list[str]:
        """Return the words in front of a command that runs in these namespaces and in `folder`."""
        environ = Path(f"/proc/{self._pid}/environ").read_text(errors="surrogateescape").split("\0")
        enter = ["nsenter", "-a", "-t", str(self._pid), "--root", "--wd", "--preserve-credentials", "--", "setpriv"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', folder]
        return [*enter, "--no-new-privs", "env", "-i", *(pair for pair in environ if pair), *there]

    def close(self) -> None:
        """End every process of the box."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _find_first(self) -> int:
        """Return the number of the box's first process, as this machine counts; 0 if there is none."""
        wanted = "\0".join((*FIRST, "")).encode()
        for pid in _descendants(self._process.pid):
            with suppress(OSError):
                if Path(f"/proc/{pid}/cmdline").read_bytes() == wanted:
                    return pid
        return 0


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from _descendants(child)


def kept_namespaces(words: Sequence[str], folder: str) -> KeptNamespaces | None:
    """Return namespaces that commands can enter; None if the machine has no such thing."""
    kept = KeptNamespaces(words)
    with suppress(OSError):
        if kept.is_alive and subprocess.run([*kept.words(folder), "true"], capture_output=True).returncode == 0:
            return kept
    kept.close()
    return None
