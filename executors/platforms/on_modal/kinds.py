"""Kinds of Modal's containers, and their prices.

    usd_per_hour = price of the dearest listed GPU × number + cores × 0.047 + GiB × 0.008        at the hard limits

Modal bills the larger of the reserved and the used amount.  So we set hard limits; else the price has no bound.

The table has a date.  `modal billing rates` shows the present prices, but under names that Modal does not document,
so no code can read them.  `ModalExecutor(prices={…})` corrects the table.

Not promised: that the table is up to date.  A chosen region costs 1.5 to 1.75 times as much; we count 1.75.
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
USD_PER_HOUR = {  # price of one GPU, without CPU cores and memory
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
    "B200+": 6.25,  # a B200 or a B300
}
MOST = {"A10": 4}  # most GPUs per container; 8 for all other kinds
CORE = 0.0472
GIB = 0.0080
REGION = 1.75
DAY_S = 24 * 3600
STARTUP_S = 1800
HUB_VOLUME, HUB_CACHE = "diloco-hub-cache", "/hub-cache"  # the Volume's name, and its path in a container
CORES = 2.0  # CPU cores reserved for each GPU
MEMORY_MIB = 16 * 1024  # a container's default limit for each process, for a model of unknown size
BASE_MIB = 6 * 1024  # host memory of Python, torch, CUDA's context and the data
LOAD_BYTES = 4  # host bytes per parameter, while the model is loaded to the GPU
HOST_BYTES = 28 + LOAD_BYTES  # per parameter: θ, momentum, Δ, upload and residual in fp32; 8 while writing a snapshot


@dataclass(frozen=True)
class Kind(Plain):
    """One kind of container.   gpu: kinds in order of preference; Modal takes a free one.

    region: "" for any.   cores, memory_mib: reserved amounts, which are always billed.
    max_cores, max_memory_mib: hard limits.  Use above the reserved amount is billed, too.  0: the reserved amount.
    hub_cache: the Volume that keeps downloads from the Hugging Face Hub; "" for no Volume.
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
        """The hard limits (cores, MiB)."""
        return max(self.cores, self.max_cores), max(self.memory_mib, self.max_memory_mib)

    @property
    def function(self) -> str:
        """The name of this kind's function in the app."""
        return "replica-" + hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()[:8]

    @property
    def fault(self) -> str:
        """The reason why Modal cannot provide this kind, or ""."""
        for gpu in self.gpu:
            if why := gpu_fault(gpu):
                return why
        if self.cores <= 0 or self.memory_mib <= 0:
            return f"cores={self.cores:g}, memory_mib={self.memory_mib}: a container needs more than 0 of both"
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
        """Return the price, with the most expensive of the listed GPUs; None if the price of any GPU is unknown."""
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
        """Return options of app.function.  No retries: replicas never raise; the register limits crashes."""
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
        """Return options that mount the cache, but not HF_HOME, which may hold a token.

        Parallel writers are safe: each downloads a file under its own temporary name and renames it (huggingface_hub
        2), and the contents are equal.  The Volume has version 2, because version 1 allows only five writers.
        """
        if not self.hub_cache:
            return {}
        volume = sdk().Volume.from_name(self.hub_cache, create_if_missing=True, version=2)
        return {"volumes": {HUB_CACHE: volume}, "env": {"HF_HUB_CACHE": HUB_CACHE}}


def memory_limit_mib(parameters: int, trained: int | None = None, devices: int = 1) -> int:
    """Return a replica's memory limit in MiB: whole GiB, rounded up.   parameters: the model's number of parameters.
    trained: the adapter's parameters, if only they are trained.   devices: processes that each load the model."""
    held = HOST_BYTES * parameters if trained is None else LOAD_BYTES * parameters + HOST_BYTES * trained
    others = (devices - 1) * (BASE_MIB + LOAD_BYTES * parameters / 2**20)
    return 1024 * math.ceil((BASE_MIB + held / 2**20 + others) / 1024)


def gpu_fault(gpu: str) -> str:
    """Return the reason why Modal cannot provide that GPU, or ""."""
    kind, count = _split_gpu(gpu)
    if kind not in USD_PER_HOUR:
        return f"Modal has no GPU called {gpu!r}. It has {', '.join(USD_PER_HOUR)}; several of one kind: H100:8"
    most = MOST.get(kind, 8)
    return "" if 1 <= count <= most else f"gpu {gpu!r}: Modal gives one container 1 to {most} of {kind}"


def price_fault(prices: Mapping[str, float]) -> str:
    """Return the reason why these cannot be prices of Modal's GPUs, or "".   A name without a GPU corrects no price."""
    if unknown := [name for name in prices if name.upper() not in USD_PER_HOUR]:
        return f"prices: Modal has no GPU called {unknown[0]!r}. It has {', '.join(USD_PER_HOUR)}"
    return ""


def _split_gpu(gpu: str) -> tuple[str, int]:
    """Split "h100:8" into ("H100", 8)."""
    kind, colon, count = gpu.upper().partition(":")
    return kind, 1 if not colon else int(count) if count.isascii() and count.isdecimal() else 0
