"""Where this process is, in the words of claims and heartbeats.

    laptop~5f0c3a9d1e27      this machine since it booted, and its PID namespace: containers and clones differ
    modal/r01.3              inside a rented container: the launch that it serves

Not promised: a name that outlives a boot.
"""

import hashlib
import os
import socket
import subprocess
import sys
import uuid
from functools import cache
from pathlib import Path

PLACE_ENV = "DILOCO_PLACE"
DEVICE_ENV = "DILOCO_DEVICE"


def host_name() -> str:
    """For whoever looks for this process: the launch that a rented container serves, or this machine."""
    return os.environ.get(PLACE_ENV) or machine_name()


def machine_name() -> str:
    """A name that no other machine has, nor another container of this one: with it a pid means one process."""
    return f"{socket.gethostname()}~{_boot_digest()}"


def host_words(host: str) -> str:
    """A host's name as people know it."""
    return host.partition("~")[0]


def device_name() -> str:
    """The name of what this process trains on, "" if whoever started it did not look (executors/platforms/gpu.py)."""
    return os.environ.get(DEVICE_ENV, "")


@cache
def _boot_digest() -> str:
    """Where nothing tells one boot from another, a name for this process alone: it recognizes nobody."""
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
