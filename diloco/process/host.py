"""The name of this process's place, for claims and heartbeats.

    laptop~5f0c3a9d1e27      this machine since it booted, and its PID namespace (rendezvous/machine.py)
    modal/r01.3              inside a rented container: its launch

Not promised: the same name after a reboot.
"""

import os

from rendezvous.machine import machine_name

PLACE_ENV = "DILOCO_PLACE"
DEVICE_ENV = "DILOCO_DEVICE"


def host_name() -> str:
    """Return the place of this process: the launch of a rented container, or this machine."""
    return os.environ.get(PLACE_ENV) or machine_name()


def host_words(host: str) -> str:
    """Return a host's name for display, without the boot's digits."""
    return host.partition("~")[0]


def device_name() -> str:
    """Return the name of this process's device, "" if the launcher did not set it (platforms/machine/gpu.py)."""
    return os.environ.get(DEVICE_ENV, "")
