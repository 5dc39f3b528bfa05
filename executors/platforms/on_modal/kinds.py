"""Kinds of containers that Modal rents, and their price.

    usd_per_hour = Σ (price of the GPU × how many) + cores × 0.047 + GiB × 0.008        at the hard limits

Modal bills what is reserved, or what is used where that is more; without a limit the latter may be any amount.

A table with a date: `modal billing rates` tells today's, but under names that Modal does not document, so that a
person has to read them.  `ModalExecutor(prices={…})` corrects the table.

Not promised: that the table is today's.  A chosen region costs 1.5 to 1.75 times as much: counted 1.75.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from diloco.units import dollars
from executors.platforms.base import Plain
from executors.platforms.on_modal.client import sdk

AS_OF = "2026-06"
USD_PER_HOUR = {  # of one GPU, beside CPU and memory
    "T4": 0.59,
    "L4": 0.80,
    "A10": 1.10,
    "L40S": 1.95,
    "A100": 2.10,
    "A100-40GB": 2.10,
    "A100-80GB": 2.50,
    "RTX-PRO-6000": 3.03,
    "H100": 3.95,
    "H100!": 3.95,  # never upgraded to an H200
    "H200": 4.54,
    "B200": 6.25,
    "B200+": 6.25,  # or a B300
}
MOST = {"A10": 4}  # per container; 8 of the others
CORE = 0.0472
GIB = 0.0080
REGION = 1.75
DAY_S = 24 * 3600
STARTUP_S = 1800
HUB_VOLUME, HUB_CACHE = "diloco-hub-cache", "/hub-cache"  # its name, and where it is in a container
BASE_MIB = 6 * 1024  # Python, torch, CUDA's context, the data
LOAD_BYTES = 4  # per parameter, to bring it to the device
HOST_BYTES = 28 + LOAD_BYTES  # θ, μ, Δ, a body and a residual in fp32, 8 while a snapshot is written


@dataclass(frozen=True)
class Kind(Plain):
    """One kind of container.   gpu: in order of preference; Modal takes a free one.

    region: "" for any.   cores, memory_mib: reserved, and paid for in any case.
    max_cores, max_memory_mib: hard limits of the use, which is paid for too; 0: the same.
    hub_cache: the Volume that keeps downloads from the Hugging Face Hub; "" for none.
    """

    gpu: tuple[str, ...]
    timeout_s: float
    secrets: tuple[str, ...]
    region: str
    cores: float
    memory_mib: int
    max_cores: float = 0.0
    max_memory_mib: int = 0
    hub_cache: str = ""

    @property
    def most(self) -> tuple[float, int]:
        """The (cores, MiB) that may be used at all."""
        return max(self.cores, self.max_cores), max(self.memory_mib, self.max_memory_mib)

    @property
    def function(self) -> str:
        """The name of its function in the app."""
        return "replica-" + hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:8]

    @property
    def fault(self) -> str:
        """Why Modal cannot give this kind, or ""."""
        for gpu in self.gpu:
            if why := gpu_fault(gpu):
                return why
        if 1 <= self.timeout_s <= DAY_S:
            return ""
        return (
            f"timeout_s={self.timeout_s:g}: Modal's limit for a call is 1 s to 24 h ({DAY_S} s). Replicas leave before "
            "that by themselves and are started again, so that a run may be longer"
        )

    @property
    def small(self) -> "Kind":
        """The kind of a supervisor's container."""
        size = {"cores": 0.5, "memory_mib": 1024, "max_cores": 0.5, "max_memory_mib": 2048}
        return replace(self, gpu=(), timeout_s=DAY_S, hub_cache="", **size)

    def usd_per_hour(self, prices: Mapping[str, float]) -> float | None:
        """The price; of a list of GPUs the dearest counts, as any of them may come.  None if one has no known price."""
        known = {**USD_PER_HOUR, **{name.upper(): price for name, price in prices.items()}}
        kinds = [_split_gpu(g) for g in self.gpu]
        if any(kind not in known for kind, _ in kinds):
            return None
        dearest = max((known[kind] * count for kind, count in kinds), default=0.0)
        cores, mib = self.most
        sum_ = dearest + cores * CORE + mib / 1024 * GIB
        return round(sum_ * (REGION if self.region else 1.0), 4)

    def words(self, price: float | None) -> str:
        cost = "its price is unknown" if price is None else f"up to {dollars(price)} per hour"
        cores, mib = self.most
        size = f"{' or '.join(self.gpu) or 'no GPU'}, at most {cores:g} cores, {mib / 1024:g} GiB and"
        return f"a container on Modal, {size} {self.timeout_s / 3600:g} h, {cost}"

    def options(self) -> dict[str, Any]:
        """Options of app.function.  No retries: our function does not raise, and the register bounds its crashes."""
        gpu: Any = list(self.gpu) if len(self.gpu) > 1 else self.gpu[0] if self.gpu else None
        return {
            "gpu": gpu,
            "timeout": math.ceil(self.timeout_s),
            "startup_timeout": STARTUP_S,
            "secrets": [sdk().Secret.from_name(name) for name in self.secrets],
            "region": self.region or None,
            "cpu": (self.cores, self.most[0]),
            "memory": (self.memory_mib, self.most[1]),
            "single_use_containers": True,
            "include_source": False,
            **self._hub_cache_options(),
        }

    def _hub_cache_options(self) -> dict[str, Any]:
        """Mount the cache alone, and not HF_HOME: a token that is saved there is not for every container to read.

        Writers cannot hurt each other: a file is downloaded under a name of its own and renamed (huggingface_hub 2),
        and what two of them bring is the same.  Version 2, since version 1 is for five writers.
        """
        if not self.hub_cache:
            return {}
        volume = sdk().Volume.from_name(self.hub_cache, create_if_missing=True, version=2)
        return {"volumes": {HUB_CACHE: volume}, "env": {"HF_HUB_CACHE": HUB_CACHE}}


def memory_limit_mib(parameters: int, trained: int | None = None) -> int:
    """The limit in MiB, whole GiB, of a replica with so many parameters.   trained: those of an adapter, if the rest is
    only loaded."""
    held = HOST_BYTES * parameters if trained is None else LOAD_BYTES * parameters + HOST_BYTES * trained
    return 1024 * math.ceil((BASE_MIB + held / 2**20) / 1024)


def gpu_fault(gpu: str) -> str:
    """Why Modal cannot give that GPU, or ""."""
    kind, count = _split_gpu(gpu)
    if kind not in USD_PER_HOUR:
        return f"Modal has no GPU called {gpu!r}. It has {', '.join(USD_PER_HOUR)}; several of one kind: H100:8"
    most = MOST.get(kind, 8)
    return "" if 1 <= count <= most else f"gpu {gpu!r}: Modal gives one container 1 to {most} of {kind}"


def _split_gpu(gpu: str) -> tuple[str, int]:
    """ "h100:8" -> ("H100", 8)"""
    kind, colon, count = gpu.upper().partition(":")
    return kind, 1 if not colon else int(count) if count.isdecimal() else 0
