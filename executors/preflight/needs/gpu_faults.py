"""Finds mistakes in the GPUs of a place, before they are rented.

    unequal_devices    --gpu H100:8 --gpu A100:4: a replica would not know how many processes to start
    idle_devices       --actors modal:2:H100:8, where an actor uses one device
    ranks_fault        --gpu H100:8 or --option devices=2, with a setting that needs one process (rank_faults.py)
    notes_about_memory  needs   weights, gradients, Adam of each device (diloco/run/footprint.py) ┐
                        has     GIGABYTES of the kind's name, or the number in it (A100-40GB)     ┴▶ needs > has

The first three return a sentence about a mistake, or "".  Too little memory is a warning and no refusal, because a
platform may give a larger GPU than was asked for.

Not promised: kinds that are not in the table; activations and generation, which need further memory; memory for several
processes of one machine.
"""

import re
from collections.abc import Iterator, Sequence

from diloco.replica.rank_faults import rank_fault
from diloco.run.config import RunConfig
from diloco.units import byte_size
from executors.platforms.machine.gpu import devices_of
from executors.platforms.places import Place
from executors.preflight.outlook import device_bytes

GIGABYTES = {  # the larger one, where a name means two
    "T4": 16, "V100": 32, "L4": 24, "A10": 24, "A10G": 24, "RTX4090": 24, "L40": 48, "L40S": 48, "A6000": 48,
    "A100": 80, "H100": 80, "RTX-PRO-6000": 96, "H200": 141, "B200": 192, "B300": 288,
}  # fmt: skip


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


def ranks_fault(config: RunConfig, place: Place, *, has_actors: bool) -> str:
    if place.devices == 1 or place.actors:
        return ""
    if has_actors and config.inner.lora is None:
        return (
            f"each replica is to have {place.devices} devices, each with a shard of the weights (there is no "
            "[inner.lora]), and such a replica trains on its own rollouts only. Start no actors, add [inner.lora], or "
            "use one device"
        )
    return rank_fault(config, place.devices)


def gigabytes_of(kind: str) -> int | None:
    """Return the memory of one GPU, in GB; None if it is not known.   kind: as a platform names it (L4, a100-large)."""
    name = kind.partition(":")[0].upper()
    if told := re.search(r"(\d+)GB", name):
        return int(told[1])
    return next((size for key, size in GIGABYTES.items() if re.match(rf"{key}(X\d+)?(?![A-Z0-9])", name)), None)


def notes_about_memory(config: RunConfig, places: Sequence[Place]) -> Iterator[str]:
    """Yield a warning for each kind of GPU that has less memory than a replica needs."""
    if config.script is not None:  # its model is not known
        return
    known = {(p.devices, kind): has for p in places if not p.actors for kind in p.gpu if (has := gigabytes_of(kind))}
    needed = {devices: device_bytes(config, devices) or 0 for devices in {devices for devices, _ in known}}
    for (devices, kind), has in known.items():
        if (needs := needed[devices]) > has * 10**9:
            yield (
                f"warning: a replica needs {byte_size(needs)} on each GPU (weights, gradients, Adam; activations and "
                f"generation come on top), and {kind} has {has} GB. Name a larger kind{_or_less(config, devices)}"
            )


def _or_less(config: RunConfig, devices: int) -> str:
    """Return the setting with which the replica needs less."""
    if (lora := config.inner.lora) is None:
        return ", or train an adapter (inner.lora)"
    return ', or keep the base in 4 bits (inner.lora.base = "nf4")' if lora.base is None and devices == 1 else ""
