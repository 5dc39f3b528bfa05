"""Unique names for processes.  No other machine, container, boot or later process has the same name.

    laptop~5f0c3a9d1e27      the hostname, and a digest of boot id and PID namespace: containers and clones differ
    4711, 123456             the pid, and its start in clock ticks since boot: a reused pid has another start

Not promised: information about processes of other machines; a name that stays the same after a reboot.
"""

import calendar
import hashlib
import os
import socket
import subprocess
import sys
import time
import uuid
from functools import cache
from pathlib import Path


def machine_name() -> str:
    """Return a name that no other machine, and no other container here, has: name and pid identify one process."""
    return f"{socket.gethostname()}~{_boot_digest()}"


@cache
def name_in_files(pid: int) -> str:
    """Return a name of this process that no other container or later process has.   pid: os.getpid()"""
    return f"{machine_name()}-{pid}.{start_ticks(pid) or 0}"


os.register_at_fork(after_in_child=name_in_files.cache_clear)


def start_ticks(pid: int) -> int | None:
    """Return the start of process or zombie `pid` in clock ticks since boot (macOS: Unix time); None without one."""
    found = _read_process(pid)
    return found[1] if found else None


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this pid and this start still runs; a zombie does not count."""
    return pid > 0 and _read_process(pid) == (True, started)


def _read_process(pid: int) -> tuple[bool, int] | None:
    """Return (whether it runs, its start); None if there is no such process."""
    if not sys.platform.startswith("linux"):
        return _look_by_ps(pid)
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0] not in (b"Z", b"X"), int(fields[19])


def _look_by_ps(pid: int) -> tuple[bool, int] | None:
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    plain = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}  # else the date is in the user's language and time zone
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    state, _, began = shown.stdout.strip().partition(" ")
    if not began:
        return None
    return not state.startswith("Z"), calendar.timegm(time.strptime(began.strip()))


@cache
def _boot_digest() -> str:
    """Return the digest of boot id and PID namespace; or random digits, which match no other, if unreadable."""
    try:
        about = _boot_id()
    except (OSError, subprocess.SubprocessError):
        about = uuid.uuid4().hex
    return hashlib.sha256(about.encode()).hexdigest()[:12]


def _boot_id() -> str:
    if sys.platform.startswith("linux"):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    command = ["sysctl", "-n", "kern.bootsessionuuid"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
