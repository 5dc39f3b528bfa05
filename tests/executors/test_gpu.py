"""The GPU that was asked for: looked up before a slot is claimed, on machines that a table describes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.process import exitcodes
from executors.platforms.machine.gpu import (
    Driver,
    TorchBuild,
    asked_for,
    device_name,
    driver_here,
    missing_gpu,
    torch_build,
)
from executors.platforms.packages.versions import portable_requirement
from tests.support.modal_venv import stub_driver

CUDA, CPU_ONLY = TorchBuild("2.13.0", cuda="12.6"), TorchBuild("2.13.0+cpu")
H100 = Driver(12080, ("NVIDIA H100 80GB HBM3",))


def test_how_many_gpus_are_asked_for_in_a_platforms_words() -> None:
    counts = {("H100",): 1, ("H100:8",): 8, ("H100:8", "A100"): 1, (): 0, ("cpu-basic",): 0, ("any",): 1, ("0",): 1}
    assert {kinds: asked_for(kinds) for kinds in counts} == counts


@pytest.mark.parametrize(
    ("build", "driver", "code", "words"),
    [
        (CPU_ONLY, H100, exitcodes.USER_ERROR, "a build for the CPU alone"),
        (CUDA, Driver(error="there is no NVIDIA driver (libcuda.so.1)"), exitcodes.CRASHED, "no NVIDIA driver"),
        (CUDA, Driver(12080, ()), exitcodes.CRASHED, "shows 0 (none)"),
        (CUDA, Driver(11080, ("Tesla T4",)), exitcodes.USER_ERROR, "supports CUDA 11.8, and torch 2.13.0 needs 12.6"),
    ],
)
def test_a_gpu_that_is_not_there(build: TorchBuild, driver: Driver, code: int, words: str) -> None:
    found = missing_gpu(("H100",), build, driver)
    assert found is not None and found.code == code and words in found.text and "Nothing was trained" in found.text
    assert missing_gpu((), build, driver) is None and missing_gpu(("cpu-upgrade",), build, driver) is None


def test_a_gpu_that_is_there_and_its_name() -> None:
    assert missing_gpu(("A100", "H100"), CUDA, H100) is None and device_name(CUDA, H100) == "NVIDIA H100 80GB HBM3"
    assert missing_gpu(("H100:2",), CUDA, H100) is not None, "one of two is not what was asked for"
    assert device_name(CPU_ONLY, H100) == device_name(CUDA, Driver()) == "cpu"
    assert missing_gpu(("H100",), TorchBuild("2.13.0", cuda="12.9"), H100) is None, "a newer minor version runs"
    assert missing_gpu(("mi300",), TorchBuild("2.13.0", hip="6.4"), Driver()) is None, "ROCm has another driver"


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    look = (
        "import sys; from executors.platforms.machine.gpu import torch_build as t; "
        "print(t().version, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    version, imported = done.stdout.split()
    assert version == torch_build().version and version.startswith("2.") and imported == "False"


def test_the_driver_is_asked_by_its_own_library(tmp_path: Path) -> None:
    look = "from executors.platforms.machine.gpu import driver_here; print(driver_here())"
    env = {**os.environ, "LD_LIBRARY_PATH": str(stub_driver(tmp_path))}
    done = subprocess.run([sys.executable, "-c", look], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Driver(13000, ("NVIDIA Stub 16GB",)))
    assert driver_here().devices or driver_here().error


def test_pins_name_nothing_that_another_machines_torch_would_contradict() -> None:
    """A laptop with torch for CUDA 12.6 made the image ResolutionImpossible."""
    assert (
        portable_requirement("torch", "2.13.0+cu126") == "torch==2.13.0"
        and portable_requirement("trl", "1.16.0") == "trl==1.16.0"
    )
    assert portable_requirement("transformers", "5.24.0.dev0") == "transformers", "no index has a dev version"
    for name in ("nvidia-cublas-cu12", "cuda-bindings", "triton", "pytorch-triton"):
        assert portable_requirement(name, "12.6.4.1") == ""
