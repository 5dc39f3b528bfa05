"""Compares the memory that a replica needs with that of its GPUs, before they are rented.

    needs   weights, gradients, Adam of each device (diloco/run/footprint.py) ┐
    has     GIGABYTES of the kind's name, or the number in it (A100-40GB)     ┴▶ needs > has: a warning

A warning and no refusal, because a platform may give a larger GPU than was asked for.

Not promised: kinds that are not in the table; activations and generation, which come on top.
"""

import re
from collections.abc import Iterator, Sequence

from diloco.run.config import RunConfig
from diloco.units import byte_size
from executors.platforms.places import Place
from executors.preflight.outlook import device_bytes

GIGABYTES = {  # the larger one, where a name means two
    "T4": 16, "V100": 32, "L4": 24, "A10": 24, "A10G": 24, "RTX4090": 24, "L40": 48, "L40S": 48, "A6000": 48,
    "A100": 80, "H100": 80, "RTX-PRO-6000": 96, "H200": 141, "B200": 192, "B300": 288,
}  # fmt: skip


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
