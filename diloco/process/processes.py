"""Name processes so that no reused pid matches, and find the runs that they work for and the place where they run.

    pid 4711 started 123456 ticks after boot  ──▶  "4711:123456"
    mark_run(url)        ─▶ an anonymous file of this process, with one digest for each run
    works_for(pid, url)  ◀─ /proc/PID/fd/…, which only the process's own user (and root) can read
                            True; False: it works for other runs; None: it has no mark
    laptop~5f0c3a9d1e27      this machine since it booted, and its PID namespace (rendezvous/machine.py)
    modal/r01.3              inside a rented container: its launch

A claim, a card or a log names a process, but another writer may have forged them, or copied them with the whole run.
So a process is signalled only if its own mark, which no other process can write, names this run: its URL, on the
server that the environment names.

Not promised: anything about processes of other machines; a mark without memfd_create (macOS), so no process is killed
there; the same place after a reboot.
"""

import hashlib
import os
import signal
import threading
from contextlib import suppress
from importlib import metadata

from diloco.process import exitcodes
from rendezvous.machine import is_alive, machine_name, start_ticks
from rendezvous.stores.open import folder_of

PLACE_ENV = "DILOCO_PLACE"
DEVICE_ENV = "DILOCO_DEVICE"
COMPUTING = ("serverless-diloco", "torch", "transformers", "trl", "peft")
MARKS = "diloco-runs"
SERVERS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT",
           "HF_S3_ENDPOINT", "MODAL_ENVIRONMENT")  # fmt: skip

_lock = threading.Lock()
_held: dict[int, tuple[int, set[bytes]]] = {}  # this process's pid -> its file, and the marks in it


def host_name() -> str:
    """Return the place of this process: the launch of a rented container, or this machine."""
    return os.environ.get(PLACE_ENV) or machine_name()


def host_words(host: str) -> str:
    """Return a host's name for display, without the boot's digits."""
    return host.partition("~")[0]


def device_name() -> str:
    """Return the name of this process's device, "" if the launcher did not set it (platforms/machine/gpu.py)."""
    return os.environ.get(DEVICE_ENV, "")


def library_versions() -> str:
    """Return the versions of the libraries that compute a pseudogradient, as "torch 2.13.0, trl 1.16.0, …"."""
    found = {name: _version_of(name) for name in COMPUTING}
    return ", ".join(f"{name} {version.partition('+')[0]}" for name, version in found.items() if version)


def _version_of(name: str) -> str:
    for there in metadata.Distribution.discover(name=name):  # the first is imported
        with suppress(Exception):  # pip may leave a folder without METADATA
            if version := there.version:
                return version
    return ""


def process_name(pid: int) -> str:
    """Return "PID:START", the form of a replica's --parent."""
    return f"{pid}:{start_ticks(pid) or 0}"


def is_named_alive(name: str) -> bool:
    """Whether the process "PID:START" is alive.  Without a known start, any process with that pid counts."""
    pid, _, started = name.partition(":")
    ticks = int(started or 0)
    return is_alive(int(pid), ticks) if ticks else start_ticks(int(pid)) is not None


def send_signal(pid: int, started: int, sig: int, *, run: str | None, group: bool = False) -> bool:
    """Signal a process (or the group that it leads). Return False if it has ended, or if its run is not proved.

    run: the URL that the process's mark must name; None for a child of this process, which needs no proof.
    """
    if not is_alive(pid, started) or not (run is None or works_for(pid, run)):
        return False
    with suppress(ProcessLookupError):
        leads = group and pid > 1 and os.getpgid(pid) == pid != os.getpgrp()  # kill(-1) would signal every process
        (os.killpg if leads else os.kill)(pid, sig)
        return True
    return False


def describe_exit(exit_code: int | None, ours: bool = True) -> str:
    """Describe -9 as "killed by SIGKILL", 3 as "exit code 3 (fenced)".   ours: a replica's code; these have names."""
    if exit_code is None:
        return "gone; its exit code was not seen"
    if exit_code >= 0:
        word = exitcodes.NAMES.get(exit_code) if ours or not exit_code else None
        return f"exit code {exit_code}" + (f" ({word})" if word else "")
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def mark_run(url: str) -> None:
    """Mark that this process works for the run at `url`, until it ends."""
    if not hasattr(os, "memfd_create"):
        return
    with _lock, suppress(OSError):  # too many open files: without a mark, this process is never killed
        pid = os.getpid()
        if pid not in _held:  # after a fork, the file here is the parent's
            _held.clear()
            _held[pid] = os.memfd_create(MARKS), set()
        file, marks = _held[pid]
        if (digest := _digest_of(url)) not in marks:
            os.write(file, digest + b"\n")
            marks.add(digest)


def works_for(pid: int, url: str) -> bool | None:
    """Whether the process's marks name the run at `url`.   None: no marks, or reading is not allowed."""
    marks = _marks_of(pid)
    return _digest_of(url) in marks if marks else None


def _marks_of(pid: int) -> set[bytes]:
    found = set[bytes]()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{MARKS} "):
                    with open(path, "rb") as file:
                        found.update(file.read().split())
    return found


def _digest_of(url: str) -> bytes:
    folder = folder_of(url)
    elsewhere = [url.rstrip("/"), *(os.environ.get(name, "") for name in SERVERS)]
    where = elsewhere if folder is None else [os.path.realpath(folder)]
    return hashlib.sha256("\0".join(where).encode(errors="surrogateescape")).hexdigest()[:32].encode()
