"""Package versions for a rented machine: the versions installed here, if an index has them, or the versions for vLLM.

    torch 2.13.0+cu126         ─▶ torch==2.13.0     a package index has no local build
    transformers 5.24.0.dev0   ─▶ transformers      an index has no dev version: it chooses the version
    nvidia-cublas-cu12, cuda-bindings, triton, …    no pin: torch's wheel requires the versions for its own CUDA

CUDA packages get no pin: a laptop's torch for CUDA 12.6 and the index's torch for CUDA 13 need different packages.

    constraints-vllm.txt ──▶ Modal         its image has exactly these versions ┐
                         ──▶ HF Jobs, sky  constraints of the installation      ├─▶ python -c CHECK ─▶ the replica
                                                                                ┘   the last line of an image's build,
                                                                                    else the job's first line

With vLLM, the launching machine's versions cannot be used: transformers 5.23 and vLLM 0.31 exclude each other.

Not promised: that an index has the version (if not, the build fails); that vLLM finds a GPU (if not, a replica reports
this when it starts).
"""

import shlex
from pathlib import Path

from packaging.version import InvalidVersion, Version

OF_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")  # torch's wheel chooses their versions
VLLM_PINS = Path(__file__).with_name("constraints-vllm.txt")
VLLM_EXTRAS = "train,diloco,replay"  # this project's extras, without `serverless`, which needs another huggingface_hub
VLLM_NEEDS = ("fsspec", "obstore", "vllm")  # packages in addition to the extras
CHECK = "import vllm, trl; from trl.import_utils import is_vllm_available; assert is_vllm_available()"


def portable_requirement(name: str, version: str) -> str:
    """Return a requirement: "torch", "2.13.0+cu126" -> "torch==2.13.0"; "" for OF_TORCH packages.   name: PyPI's."""
    if name.startswith(OF_TORCH):
        return ""
    try:
        found = Version(version)
    except InvalidVersion:
        return name
    return name if found.is_devrelease else f"{name}=={found.public}"


def vllm_requirements() -> list[str]:
    """Return name==version of every package, except those whose versions torch's wheel chooses."""
    lines = VLLM_PINS.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def pinned_version(name: str) -> str:
    """Return the pin of a package: "vllm" -> "vllm==0.31.0"."""
    return next(line for line in vllm_requirements() if line.startswith(f"{name}=="))


def check_command() -> str:
    """Return a shell command that fails if vLLM and TRL cannot be imported together."""
    return f"python -c {shlex.quote(CHECK)}"
