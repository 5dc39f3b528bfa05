"""Where this process is, in the words of claims and heartbeats.

Not promised: that two machines have different names.
"""

import os
import socket

PLACE_ENV = "DILOCO_PLACE"
DEVICE_ENV = "DILOCO_DEVICE"


def host_name() -> str:
    """For whoever looks for this process: the launch that a rented container serves, or this machine."""
    return os.environ.get(PLACE_ENV) or socket.gethostname()


def device_name() -> str:
    """The name of what this process trains on, "" if whoever started it did not look (executors/platforms/gpu.py)."""
    return os.environ.get(DEVICE_ENV, "")
