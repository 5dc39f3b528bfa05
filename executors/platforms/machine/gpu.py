"""Checks, before the slot is claimed and without importing torch, that the GPU that was asked for is there.

    asked: ("H100:2",) ──▶ torch's build      made for the CPU only         USER_ERROR: every start would fail
                      ──▶ libcuda, cuInit     no driver, no device           CRASHED: another machine may have it
                      ──▶ cuDriverGetVersion  older than torch's CUDA        USER_ERROR
                      ──▶ cuDeviceGetName     "NVIDIA H100 80GB HBM3"        into the journal, by DEVICE_ENV

Without this check torch would train on the CPU without a warning, at the price of the GPU.

Not promised: that the GPU is of the kind that was asked for; platforms may give a better GPU for the same price.
"""

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.process import exitcodes

CPU = "cpu"
NAME_BYTES = 100


@dataclass(frozen=True)
class Missing:
    """The reason why a replica must not start without its requested GPU.   code: the exit code of its process."""

    code: int
    text: str


@dataclass(frozen=True)
class Driver:
    """The state of NVIDIA's driver.   devices: the names of the visible GPUs.   error: why no device is known.

    version: the newest CUDA that the driver supports, as 1000 · major + 10 · minor; 0 without a driver.
    """

    version: int = 0
    devices: tuple[str, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch.   version: "" if torch is not installed.   cuda, hip: versions it was built for; "": none."""

    version: str = ""
    cuda: str = ""
    hip: str = ""


def devices_of(kind: str) -> int:
    """Return the number of devices in a platform's name: "H100:8" -> 8, "a10g-largex4" -> 4, "h200" -> 1."""
    found = re.search(r"(?::|[a-z\d]x)(\d{1,2})$", kind)
    return int(found[1]) if found else 1


def asked_for(kinds: Sequence[str]) -> int:
    """Return the fewest GPUs that one of these kinds has: ("H100:8", "A100") -> 1; ("cpu-basic",) -> 0."""
    none = any(kind.lower().startswith(CPU) for kind in kinds)
    return 0 if none else min(map(devices_of, kinds), default=0)


def missing_gpu(kinds: Sequence[str], build: TorchBuild, driver: Driver) -> Missing | None:
    """Return the reason why the GPU that was asked for cannot be used; None if it can."""
    count = asked_for(kinds)
    said = " or ".join(kinds)
    if not count or not build.version or build.hip:  # without torch, its import fails later; ROCm is not checked here
        return None
    if not build.cuda:
        return Missing(
            exitcodes.USER_ERROR,
            f"a GPU was asked for ({said}), and torch {build.version} is a build for the CPU alone: it would train on "
            "the CPU at the GPU's price. Nothing was trained; install torch with CUDA there, or ask for no GPU",
        )
    if len(driver.devices) < count:
        there = ", ".join(driver.devices) or "none"
        why = driver.error or f"the driver shows {len(driver.devices)} ({there})"
        return Missing(
            exitcodes.CRASHED,
            f"a GPU was asked for ({said}), and this machine does not have it: {why}. Nothing was trained; another "
            "machine may have it",
        )
    if driver.version // 1000 < int(build.cuda.partition(".")[0]):
        have = f"{driver.version // 1000}.{driver.version % 1000 // 10}"
        return Missing(
            exitcodes.USER_ERROR,
            f"the driver here supports CUDA {have}, and torch {build.version} needs {build.cuda}: it would train on "
            f"the CPU. Nothing was trained; use a torch for CUDA {have.partition('.')[0]}, or machines with a newer "
            "driver",
        )
    return None


def device_name(build: TorchBuild, driver: Driver) -> str:
    """Return the name of the device on which a replica will train."""
    return driver.devices[0] if build.cuda and driver.devices else CPU


def torch_build() -> TorchBuild:
    """Read the build of torch from the text of torch/version.py, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return TorchBuild()
    text = (Path(spec.origin).parent / "version.py").read_text()

    def value(name: str) -> str:
        found = re.search(rf"^{name}\b[^=]*= *'([^']*)'", text, re.MULTILINE)
        return found.group(1) if found else ""

    return TorchBuild(value("__version__") or "unknown", value("cuda"), value("hip"))


def driver_here() -> Driver:
    """Return the devices that NVIDIA's driver shows to this process, without a context, which would use GPU memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Driver(error="there is no NVIDIA driver (libcuda.so.1)")
    if code := cuda.cuInit(0):
        return Driver(error=f"NVIDIA's driver cannot be started (cuInit: error {code})")
    version = ctypes.c_int()
    count = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return Driver(version.value, tuple(_nth_device_name(cuda, i) for i in range(count.value)))


def _nth_device_name(cuda: Any, index: int) -> str:
    device = ctypes.c_int()
    name = ctypes.create_string_buffer(NAME_BYTES)
    with suppress(OSError):
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, NAME_BYTES, device)
    return name.value.decode(errors="replace")
