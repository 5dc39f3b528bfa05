"""Finds mistakes in the number of devices per replica.

    unequal_devices    --gpu H100:8 --gpu A100:4: a replica would not know how many processes to start
    idle_devices       --actors modal:2:H100:8, where an actor uses one device
    ranks_fault        --gpu H100:8 or --option devices=2, with a setting that needs one process (rank_faults.py)

Each function returns a sentence about a mistake, or "".

Not promised: that a machine has enough memory for that many processes.
"""

from diloco.replica.rank_faults import rank_fault
from diloco.run.config import RunConfig
from executors.platforms.machine.gpu import devices_of
from executors.platforms.places import Place


def unequal_devices(place: Place) -> str:
    counts = {gpu: devices_of(gpu) for gpu in place.gpu}
    if len(set(counts.values())) < 2:
        return ""
    told = ", ".join(f"{gpu} has {count}" for gpu, count in counts.items())
    return (
        f"the GPUs of {place.executor} have different numbers of devices ({told}), and a replica starts one process "
        "for each device. Give each number a place of its own: --place "
        f"{place.executor}:N:{place.gpu[0]} --place {place.executor}:N:{place.gpu[-1]}"
    )


def idle_devices(place: Place) -> str:
    if not place.actors or place.executor == "local" or place.devices == 1:
        return ""
    gpu = place.gpu[0]
    return (
        f"{gpu} rents {place.devices} GPUs for each actor on {place.executor}, and an actor uses one device: "
        f"{place.devices - 1} would be billed and idle. Name a kind with one GPU, and more actors"
    )


def ranks_fault(config: RunConfig, place: Place) -> str:
    return rank_fault(config, place.devices) if place.devices > 1 and not place.actors else ""
