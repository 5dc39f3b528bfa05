"""Chooses the cores and the GPU of this machine that each slot may use.

    cores = 2    r00 ─▶ 0, 1    r01 ─▶ 2, 3    …  after the last core, from core 0 again
    gpus = 0, 1  r00 ─▶ 0       r01 ─▶ 1       r02 ─▶ 0         devices = 2: r00 ─▶ 0, 1     a00 ─▶ 1

Not promised: that no other process uses these cores and GPUs.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from executors.platforms.base import ExecutorError, ReplicaSpec
from rendezvous import layout

ANY = "any"  # --gpu any: no particular GPU
MOST_DEVICES = 64


def check_cores(cores: int) -> None:
    """Raise ExecutorError if this machine cannot pin a replica to so many cores."""
    if cores and not hasattr(os, "sched_setaffinity"):
        raise ExecutorError(f"cores = {cores}: this system cannot pin processes to cores; leave it out")
    if not 0 <= cores <= (os.cpu_count() or 1):
        raise ExecutorError(f"cores = {cores}: this machine has {os.cpu_count()}. Set at most this, or 0 for all")


def cores_of(slot: str, cores: int) -> list[int]:
    """Return the numbers of the cores for a slot; []: all cores.   cores: cores per replica (0: all)."""
    if not cores:
        return []
    there = sorted(os.sched_getaffinity(0))
    return sorted({there[(_place_in_line(slot) * cores + i) % len(there)] for i in range(cores)})


def check_devices(devices: int) -> None:
    """Raise ExecutorError for a number of processes that no replica can have."""
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MOST_DEVICES:
        raise ExecutorError(
            f"devices must be 1 to {MOST_DEVICES}, the processes that train a replica's model together; got {devices!r}"
        )


def gpu_of(spec: ReplicaSpec, gpus: Sequence[str | int] | str | int | None, devices: int = 1) -> str:
    """Return the CUDA devices of a replica, or the one device of an actor; "" if the spec asks for no GPU.

    gpus: device numbers to choose from, also as a text "0,1"; None: all visible ones.   devices: GPUs per replica."""
    if not spec.gpu:
        return ""
    if layout.is_actor(spec.slot):
        devices = 1
    numbers = str(gpus).split(",") if isinstance(gpus, str | int) else gpus
    there = visible_gpus() if numbers is None else [str(gpu).strip() for gpu in numbers]
    named = [g for g in there if g in spec.gpu or ANY in spec.gpu]
    if not named:
        listed = f"{', '.join(there)}, or {ANY!r} for any of them" if there else "none"
        raise ExecutorError(f"this machine has no GPU {' or '.join(spec.gpu)}; there are: {listed}")
    if devices > len(named):
        raise ExecutorError(f"devices = {devices}: this machine has {len(named)} such GPUs, and each process needs one")
    return ",".join(named[(_place_in_line(spec.slot) * devices + i) % len(named)] for i in range(devices))


def visible_gpus() -> list[str]:
    """Return the CUDA device numbers that this process may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [g.strip() for g in visible.split(",") if g.strip()]
    numbers = (p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((n for n in numbers if n.isdigit()), key=int)


def _place_in_line(slot: str) -> int:
    """Return the slot's index.  An actor's index is negative, so it takes the last GPU first; other names get 0."""
    if layout.is_actor(slot):
        return -1 - int(slot[1:])
    return layout.slot_index(slot) if layout.is_slot(slot) else 0
