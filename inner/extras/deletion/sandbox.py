"""Run one Python process in bubblewrap: read-only files, no network, no second process, limits on everything.

    files (path → text) ──▶ /work, read-only    /tmp: 8 MiB, 1,024 files, deleted at the end; nothing else is writable
    this Python, its standard library, the C library  no site-packages, no home, no /etc, nothing of the run
    packages of the task, if it has some (read-only)  a suite's files are written to /tmp/suite (Surroundings)
    no capabilities, uid 65534, its own namespaces        the calls in CALLS: EPERM (seccomp)
    memory, CPU seconds: limits that inside.py sets first                       wall time, output: killed by this file

There is only one process, so its memory limit is the sandbox's limit, and a fork bomb cannot start.  (bwrap's own
process 1 would have no limits and be writable through /proc/1/mem; so Python is process 1.)  The process cannot create
memory outside the limit (System V's segments and queues, memfd), or a socket: a vsock to the machine's host would pass
every network namespace.  The process can create a socketpair, for asyncio, with a default buffer, but send no
descriptor through it.  Sockets and other allowed objects take less than 40 MiB of kernel memory (decision 073).
If bwrap is missing or may not make namespaces, `require_sandbox` raises: nothing runs without a sandbox.

Not promised: a writable /tmp if no outer namespace can be made (`unshare`); protection against a bug of
the kernel, or against time measurements. x86-64 and arm64 Linux only.
"""

import json
import os
import platform
import selectors
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from inner.errors import SandboxMissing

INSIDE = (Path(__file__).parent / "inside.py").read_text()
WORK, PACKAGES = "/work", "/packages"
# AUDIT_ARCH, then the numbers of: clone, clone3, unshare, mount, ptrace, setns, (x86-64 only) fork, vfork; socket,
# io_uring_setup; shmget, semget, msgget, memfd_create; bpf, userfaultfd, perf_event_open; add_key, request_key,
# keyctl; sendmsg, sendmmsg, setsockopt; (x86-64 only) inotify_init; inotify_init1, fanotify_init; timer_create,
# mq_open, io_setup, vmsplice, memfd_secret
CALLS = {
    "x86_64": (
        0xC000003E,
        (56, 435, 272, 165, 101, 308, 57, 58, 41, 425, 29, 64, 68, 319, 321, 323, 298, 248, 249, 250,
         46, 307, 54, 253, 294, 300, 222, 240, 206, 278, 447),
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435, 97, 40, 117, 268, 198, 425, 194, 190, 186, 279, 280, 282, 241, 217, 218, 219,
         211, 269, 208, 26, 262, 107, 180, 0, 75, 447),
    ),
}  # fmt: skip
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
TURNS = BoundedSemaphore(CORES)  # the limit of sandboxes that run at once, because their limits are wall-clock times
MOST_PATH = 200  # bytes; Linux allows 255 in a file's name
# bwrap's own tmpfs allows inodes for half of the machine's pages: a gigabyte of kernel memory without a limit
TMPFS = 'mount -t tmpfs -o "size=$1,nr_inodes=$2,nosuid,nodev" tmpfs "$0" && shift 2 && exec "$@"'
EPERM, ALLOW, KILL = 0x00050001, 0x7FFF0000, 0x80000000


@dataclass(frozen=True)
class SandboxLimits:
    """Limits.   seconds (wall clock), output (bytes): the sandbox is killed above them.   memory, file, tmp: bytes."""

    seconds: float = 5.0
    memory: int = 256 << 20
    output: int = 16 << 10
    file: int = 1 << 20
    tmp: int = 8 << 20
    tmp_files: int = 1024


@dataclass(frozen=True)
class Ended:
    """The end of a run.   output: at most limits.output bytes.   why: "" (by itself), "time limit", "output limit"."""

    output: bytes
    code: int | None
    why: str = ""


@dataclass(frozen=True)
class Surroundings:
    """The files and packages around a task's own files.   roots: folders of the repository that Python imports from.

    packages: a folder of packages on this machine, or "", with the requirements that fill it.   beside: the suite's own
    files."""

    roots: Sequence[str] = ("",)
    packages: str = ""
    requires: Sequence[str] = ()
    beside: Mapping[str, str] = field(default_factory=dict[str, str])

    def asked(self, work: str, room: str) -> dict[str, Any]:
        """Return the part of inside.py's input that describes these surroundings."""
        paths = [f"{work}/{root}".rstrip("/") for root in self.roots]
        packages = [PACKAGES] if self.packages else []
        return {"paths": paths, "packages": packages, "room": room, "beside": dict(self.beside)}


ALONE = Surroundings()


def run_sandboxed(
    files: Mapping[str, str],
    program: str,
    limits: SandboxLimits,
    *,
    value: bool = False,
    around: Surroundings = ALONE,
) -> Ended:
    """Run `program` beside `files`, when one of TURNS is free.

    value: return its variable `result` (inside.py) instead of its output."""
    require_sandbox()
    _require_packages(around)
    asked = {
        "run": program,
        "value": value,
        "limits": {"memory": limits.memory, "cpu": int(limits.seconds) + 1, "file": limits.file},
        **around.asked(WORK, "/tmp/suite"),
    }
    with _two_folders() as (folder, room):
        write_files(Path(folder), files)
        with TURNS:  # the wait for a place does not count as time of the program
            return _watch(_command(folder, room, limits, around.packages), json.dumps(asked).encode(), limits)


def _require_packages(around: Surroundings) -> None:
    if around.packages and not Path(around.packages).is_dir():
        raise SandboxMissing(
            f"the task's packages are not here: there is no folder {around.packages}. "
            f"`pip install --no-deps --target {around.packages} {' '.join(around.requires)}`."
        )
    if around.beside and not _outer_namespace():
        raise SandboxMissing(
            "a task made from a repository needs a writable /tmp in its sandbox, and this machine allows none: "
            "`unshare` (util-linux) is missing, or may not make a namespace around that of bwrap. Install util-linux, "
            "or allow nested user namespaces."
        )


@contextmanager
def _two_folders() -> Iterator[tuple[str, str]]:
    """Make a folder for the files, and a folder that becomes /tmp."""
    with tempfile.TemporaryDirectory(prefix="deletion-") as folder, tempfile.TemporaryDirectory(prefix="tmp-") as room:
        yield folder, room


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Write each file below `folder`.   Raises ValueError for a path that `checked_path` refuses."""
    for name, text in files.items():
        path = folder / checked_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def checked_path(name: str) -> str:
    """Return the same relative path.   Raises ValueError if it leaves the folder or is not a plain name."""
    parts = name.split("/")
    if not name.isprintable() or any(p in ("", ".", "..") or p.startswith(".git") for p in parts):
        raise ValueError(f"{name!r} is not a path inside the repository. Give one like `package/module.py`.")
    if len(name.encode()) > MOST_PATH:
        raise ValueError(f"{name[:40]!r}… has more than {MOST_PATH} bytes. Give a path like `package/module.py`.")
    return name


@cache
def require_sandbox() -> None:
    """Raise SandboxMissing if no sandbox can be made here."""
    where = f"feature deletion runs a model's code only in bubblewrap, which does not work here ({platform.system()})"
    if platform.machine() not in CALLS:
        raise SandboxMissing(f"{where}: no system calls are listed for {platform.machine()}. Use x86-64 or arm64.")
    if shutil.which("bwrap") is None:
        raise SandboxMissing(f"{where}: `bwrap` is not on the PATH. `apt-get install bubblewrap`.")
    with _two_folders() as (folder, room):
        asked = {"run": "print('inside')", "value": False, **ALONE.asked(WORK, "/tmp/suite")}
        asked["limits"] = {"memory": 256 << 20, "cpu": 5, "file": 1 << 20}
        ended = _watch(_command(folder, room, SandboxLimits()), json.dumps(asked).encode(), SandboxLimits(seconds=20))
    if ended.output != b"inside\n":
        said = ended.output.decode(errors="replace").strip()[-300:]
        raise SandboxMissing(
            f"{where}: bwrap cannot make a sandbox ({ended.why or f'exit code {ended.code}'}: {said}). Allow user "
            "namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone), or run where they are."
        )


@cache
def _outer_namespace() -> tuple[str, ...]:
    """Return the command that makes a mount namespace for tmpfs and bwrap; () if that does not work here."""
    made = (shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount", "--")
    with tempfile.TemporaryDirectory(prefix="deletion-") as folder:
        try:
            inner = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"]
            tried = subprocess.run([*made, "sh", "-c", TMPFS, folder, "4096", "9", *inner], capture_output=True, env={})
        except OSError:
            return ()
    return made if tried.returncode == 0 else ()


def _command(folder: str, room: str, limits: SandboxLimits, packages: str = "") -> list[str]:
    """Return the command; `{fd}` is the descriptor of the seccomp program (see _watch).   room: becomes /tmp."""
    bwrap = [shutil.which("bwrap") or "bwrap", *_bwrap_words(folder)]
    bwrap += ["--ro-bind", packages, PACKAGES] if packages else []
    python = [os.path.realpath(sys.executable), "-s", "-P", "-S", "-B", "-c", INSIDE]
    tmp = ["--bind", room, "/tmp"] if _outer_namespace() else ["--tmpfs", "/tmp", "--remount-ro", "/tmp"]
    words = [*bwrap, *tmp, "--chdir", WORK, "--remount-ro", "/", "--seccomp", "{fd}", "--", *python]
    outer = [*_outer_namespace(), "sh", "-c", TMPFS, room, str(limits.tmp), str(limits.tmp_files)]
    return [*outer, *words] if _outer_namespace() else words


def _bwrap_words(folder: str) -> list[str]:
    python = os.path.realpath(sys.executable)
    words = ["--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--cap-drop", "ALL", "--setenv", "PYTHONHASHSEED", "0"]  # sets have the same order each time
    words += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox", "--dev", "/dev", "--proc", "/proc"]
    words += ["--ro-bind", "/usr/lib", "/usr/lib", "--symlink", "usr/lib", "/lib"]
    if Path("/usr/lib64").exists():
        words += ["--ro-bind", "/usr/lib64", "/usr/lib64", "--symlink", "usr/lib64", "/lib64"]
    for hidden in ("/usr/lib/python3", "/usr/lib/debug"):
        words += ["--tmpfs", hidden, "--remount-ro", hidden] if Path(hidden).is_dir() else []
    for path in _python_paths(python):
        words += ["--ro-bind", path, path]
    for hidden in _site_folders():
        words += ["--tmpfs", hidden, "--remount-ro", hidden]
    words += ["--tmpfs", "/dev/shm", "--remount-ro", "/dev/shm", "--remount-ro", "/dev"]
    return [*words, "--ro-bind", folder, WORK]


def _python_paths(python: str) -> list[str]:
    """Return the interpreter, its standard library, and its shared library if it has one."""
    stdlib = sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix})
    shared = sorted(Path(sys.base_prefix, "lib").glob("libpython*.so*"))
    found = [python, stdlib, *(str(path) for path in shared)]
    return [path for path in found if not path.startswith("/usr/lib/")]


def _site_folders() -> list[str]:
    stdlib = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    hidden = ("site-packages", "dist-packages", "test", "ensurepip")  # pip's wheel has copies of packages in it
    return [str(stdlib / n) for n in hidden if (stdlib / n).is_dir()]


def _watch(command: list[str], stdin: bytes, limits: SandboxLimits) -> Ended:
    """Send the process its input, read its output, and kill it at the first limit that it exceeds."""
    with tempfile.TemporaryFile() as rules, tempfile.TemporaryFile() as asked:
        for file, content in ((rules, _seccomp_program()), (asked, stdin)):
            file.write(content)
            file.seek(0)
        child = subprocess.Popen(
            [str(rules.fileno()) if word == "{fd}" else word for word in command],
            stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[rules.fileno()], env={},
        )  # fmt: skip
    try:
        output, why = _read(child, limits)
    finally:
        child.kill()  # also ends all processes of its pid namespace
        code = child.wait()
        assert child.stdout is not None
        child.stdout.close()
    return Ended(output, code, why)


def _read(child: subprocess.Popen[bytes], limits: SandboxLimits) -> tuple[bytes, str]:
    assert child.stdout is not None
    output, end = b"", time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while True:
            if not ready.select(max(0.0, end - time.monotonic())):
                return output, "time limit"
            block = os.read(child.stdout.fileno(), 1 << 16)
            if not block:
                return _wait(child, output, end)
            output += block
            if len(output) > limits.output:
                return output[: limits.output], "output limit"


def _wait(child: subprocess.Popen[bytes], output: bytes, end: float) -> tuple[bytes, str]:
    """Wait for the end: a process that has closed its output may still run."""
    try:
        child.wait(max(0.01, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return output, "time limit"
    return output, ""


def _seccomp_program() -> bytes:
    """Return a classic BPF program: kill calls of another architecture (or x32), EPERM for CALLS, allow all others."""
    arch, calls = CALLS[platform.machine()]
    rules = [(0x20, 0, 0, 4), (0x15, 1, 0, arch), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    rules += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, KILL)]
    for number in calls:
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, EPERM)]
    rules.append((0x06, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *rule) for rule in rules)
