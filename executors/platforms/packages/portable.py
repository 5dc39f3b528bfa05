"""Package versions of this machine that another one can install.

    torch 2.13.0+cu126         ─▶ torch==2.13.0     a local build is on no index
    transformers 5.24.0.dev0   ─▶ transformers      nor is a dev version: the index has the say
    nvidia-cublas-cu12, cuda-bindings, triton, …    nothing: torch's wheel there names those of its own CUDA

A laptop's torch for CUDA 12.6 and the index's for CUDA 13 need different ones: pinned, nothing could be installed.

Not promised: that an index has the version at all; the build says so.
"""

from packaging.version import InvalidVersion, Version

OF_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")  # what torch's own wheel chooses


def portable_requirement(name: str, version: str) -> str:
    """ "torch", "2.13.0+cu126" -> "torch==2.13.0"; "" for one that must not be named.   name: as PyPI writes it."""
    if name.startswith(OF_TORCH):
        return ""
    try:
        found = Version(version)
    except InvalidVersion:
        return name
    return name if found.is_devrelease else f"{name}=={found.public}"
