"""Keeps the namespaces of a local box between its commands, so that a process in the background lives on.

    sh ── bwrap … ── sh ── sleep     ends when our end of a pipe closes (`close`, or the death of this process), or by
                     ▲               end_processes in any process; every process of the box ends with it
    nsenter ─────────┘── command     each command enters the namespaces of the box's first process, and writes BEGUN

bwrap makes two user namespaces. The outer one owns the mount, pid and other namespaces. In the inner one processes have
their uid. So a command enters the outer user namespace first, then the other namespaces, and the inner one last.

Not promised: an entry where the kernel forbids it, as with a setuid bwrap; then each command has namespaces of its own.
"""

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path

# bwrap ends with the thread that started it; a shell's thread does not end before the box
HOLD = '"$@" </dev/null & exec >&-; read -r _; kill -9 $!'
READY = b"the box is ready\n"
BEGUN = b"\n"  # an entered command writes this to its standard input; if the box's processes end, it never comes
FIRST = ("sh", "-c", f"echo {READY.decode().strip()}; sleep infinity; exit")  # dash would exec a last command
OTHERS = {"mnt": "--mount", "pid": "--pid", "uts": "--uts", "ipc": "--ipc", "net": "--net", "cgroup": "--cgroup"}
NS_GET_USERNS = 0xB701  # an ioctl of namespaces, ioctl_ns(2): the user namespace that owns this one


class KeptNamespaces:
    """The namespaces of one box.   words: in front of a command, they run it in new namespaces."""

    def __init__(self, words: Sequence[str]) -> None:
        self._owner: FileIO | None = None
        self._process = subprocess.Popen(
            ["sh", "-c", HOLD, "_", *words, *FIRST],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
            env=bare_environ(),
        )  # fmt: skip
        assert self._process.stdout is not None
        with self._process.stdout as told:
            is_ready = told.readline() == READY
        self._pid = next(filter(_is_first, _descendants(self._process.pid)), 0) if is_ready else 0

    def write_note(self, note: Path) -> None:
        """Write the file that end_processes reads.   Raises OSError."""
        note.write_text(str(self._process.pid))

    @property
    def is_alive(self) -> bool:
        """Whether the box's first process runs. An episode can end it: `kill -9 -1`."""
        return _is_first(self._pid)

    def words(self) -> list[str]:
        """Return the words in front of a command that runs in these namespaces, in /.   Raises OSError.

        The command has to get a standard input to which it can write BEGUN."""
        there = f"/proc/{self._pid}"
        if self._owner is None:  # it stays open, because nsenter opens it later
            with open(f"{there}/ns/mnt", "rb") as mounts:
                self._owner = FileIO(fcntl.ioctl(mounts, NS_GET_USERNS))
        new = [name for name in OTHERS if not os.path.samefile(f"{there}/ns/{name}", f"/proc/self/ns/{name}")]
        words = ["nsenter", f"--user=/proc/{os.getpid()}/fd/{self._owner.fileno()}", "-t", str(self._pid)]
        words += [*(OTHERS[name] for name in new), "--root", "--wd", "--preserve-credentials", "--"]
        if not os.path.samestat(os.fstat(self._owner.fileno()), os.stat(f"{there}/ns/user")):
            pid = Path(f"{there}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1]
            words += ["nsenter", "-t", pid, "--user", "--preserve-credentials", "--"]
        environ = Path(f"{there}/environ").read_text(errors="surrogateescape").split("\0")
        words += ["setpriv", "--no-new-privs", "env", "-i", *(pair for pair in environ if pair)]
        return [*words, "sh", "-c", 'echo >&0; exec "$@" </dev/null', "_"]

    def close(self) -> None:
        """End every process of the box."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def bare_environ() -> dict[str, str]:
    """Return the variables of the programs that make a box, without keys: the episode can read /proc/1/environ."""
    return {"PATH": os.environ.get("PATH", os.defpath)}


def kept_namespaces(words: Sequence[str], note: Path) -> KeptNamespaces | None:
    """Return namespaces that commands can enter; None if there can be none.   note: a file for end_processes."""
    kept = KeptNamespaces(words)
    with suppress(OSError):  # also of a full disk, or of a box that another process removes
        kept.write_note(note)
        if kept.is_alive:
            words = [*kept.words(), "true"]
            if subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=bare_environ()).returncode == 0:
                return kept
    kept.close()
    return None


def end_processes(note: Path) -> None:
    """End every process of a box that this process or another one keeps."""
    with suppress(OSError, ValueError):
        pid = int(note.read_text())
        if HOLD.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():  # else the number is another process's by now
            for one in (*_descendants(pid), pid):
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def _descendants(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from _descendants(child)


def _is_first(pid: int) -> bool:
    """Whether this is the first process of a box. A zombie is not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes() == "\0".join((*FIRST, "")).encode()
    return False
