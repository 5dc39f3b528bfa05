"""The place of this process, in the words of claims and heartbeats.

    laptop~5f0c3a9d1e27      this machine since it booted, and its PID namespace (rendezvous/machine.py)
    modal/r01.3              inside a rented container: the launch that it serves

Not promised: a name that outlives a boot.
"""

import os

from rendezvous.machine import machine_name

PLACE_ENV = "DILOCO_PLACE"
DEVICE_ENV = "DILOCO_DEVICE"


def host_name() -> str:
    """Return the place by which this process is found: the launch that a rented container serves, or this machine."""
    return os.environ.get(PLACE_ENV) or machine_name()


def host_words(host: str) -> str:
    """A host's name as people know it."""
    return host.partition("~")[0]


def device_name() -> str:
    """Return the name of this process's device, "" if the launcher did not set it (platforms/machine/gpu.py)."""
    return os.environ.get(DEVICE_ENV, "")
