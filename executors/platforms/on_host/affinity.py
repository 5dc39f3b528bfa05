"""The cores and the GPU of this machine that each slot may use.

    cores = 2    r00 ─▶ 0, 1    r01 ─▶ 2, 3    …  after the last core, from core 0 again
    gpus = 0, 1  r00 ─▶ 0       r01 ─▶ 1       r02 ─▶ 0

Not promised: that no other process uses them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from executors.platforms.base import ExecutorError, ReplicaSpec
from rendezvous import layout

ANY = "any"  # any GPU


class Affinity:
    """Cores and GPUs.   cores: number for each replica (0: all).   gpus: CUDA device numbers (None: all visible)."""

    def __init__(self, cores: int = 0, gpus: Sequence[str] | None = None) -> None:
        if cores and not hasattr(os, "sched_setaffinity"):
            raise ExecutorError(f"cores = {cores}: this system cannot pin processes to cores; leave it out")
        if not 0 <= cores <= (os.cpu_count() or 1):
            raise ExecutorError(f"cores = {cores}: this machine has {os.cpu_count()}; 0 lets a replica use all")
        self._cores = cores
        self._gpus = tuple(visible_gpus() if gpus is None else map(str, gpus))

    def cores(self, spec: ReplicaSpec) -> list[int]:
        """Return the cores of a replica; []: all of them."""
        if not self._cores:
            return []
        there = sorted(os.sched_getaffinity(0))
        first = _place_in_line(spec.slot) * self._cores
        return sorted({there[(first + i) % len(there)] for i in range(self._cores)})

    def gpu(self, spec: ReplicaSpec) -> str:
        """Return the replica's CUDA device; "" if its spec asks for no GPU."""
        if not spec.gpu:
            return ""
        named = [g for g in self._gpus if g in spec.gpu or ANY in spec.gpu]
        if not named:
            there = f"{', '.join(self._gpus)}, or {ANY!r} for all of them" if self._gpus else "none"
            raise ExecutorError(f"this machine has no GPU {' or '.join(spec.gpu)}; there are: {there}")
        return named[_place_in_line(spec.slot) % len(named)]

    def text(self, spec: ReplicaSpec) -> str:
        gpu = self.gpu(spec)
        cores = self.cores(spec)
        return (f" on GPU {gpu}" if gpu else "") + (f" on cores {', '.join(map(str, cores))}" if cores else "")


def visible_gpus() -> list[str]:
    """Return the CUDA device numbers that this process may use."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [g.strip() for g in visible.split(",") if g.strip()]
    numbers = (p.name.removeprefix("nvidia") for p in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((n for n in numbers if n.isdigit()), key=int)


def _place_in_line(slot: str) -> int:
    """Return the slot's index; 0 for a name that is not a replica's slot."""
    try:
        return layout.slot_index(slot)
    except ValueError:
        return 0
