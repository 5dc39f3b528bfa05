"""Finds mistakes about several devices for each replica.

    idle_devices    --gpu H100:8 on a rented machine, where a replica uses one device
    ranks_fault     --option devices=2 with a setting that needs one process (diloco/replica/rank_faults.py)

Each returns a sentence about a mistake, or "".

Not promised: that this machine has memory for so many processes.
"""

import re

from diloco.replica.rank_faults import rank_fault
from diloco.run.config import RunConfig
from executors.platforms.places import Place


def idle_devices(place: Place) -> str:
    for gpu in place.gpu:
        if (count := device_count(place.executor, gpu)) > 1:
            one = re.sub(r"x\d+$", "x1", gpu) if place.executor == "hf-jobs" else re.sub(r":\d+$", "", gpu)
            return (
                f"--gpu {gpu} rents {count} GPUs for each replica on {place.executor}, and a replica uses one device: "
                f"{count - 1} would be billed and idle. Use --gpu {one} and more --replicas"
            )
    return ""


def device_count(executor: str, gpu: str) -> int:
    """Return the number of devices in a platform's name; 1 if it has no number.   "H100:8" -> 8, "a10g-largex4" -> 4"""
    found = re.search(r"x(\d+)$" if executor == "hf-jobs" else r":(\d+)$", gpu)
    return int(found[1]) if found else 1


def ranks_fault(config: RunConfig, place: Place) -> str:
    return rank_fault(config, place.devices) if place.devices > 1 else ""
