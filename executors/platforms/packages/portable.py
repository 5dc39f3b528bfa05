"""Requirements from this machine's package versions that another machine can install.

    torch 2.13.0+cu126         ─▶ torch==2.13.0     a package index has no local build
    transformers 5.24.0.dev0   ─▶ transformers      an index has no dev version: it chooses the version
    nvidia-cublas-cu12, cuda-bindings, triton, …    nothing: torch's wheel names those of its own CUDA

A laptop's torch for CUDA 12.6 and the index's for CUDA 13 need different ones: pins would conflict.

Not promised: that an index has the version; if not, the build fails.
"""

from packaging.version import InvalidVersion, Version

OF_TORCH = ("nvidia-", "cuda-", "triton", "pytorch-triton")  # torch's wheel chooses their versions


def portable_requirement(name: str, version: str) -> str:
    """Return a requirement: "torch", "2.13.0+cu126" -> "torch==2.13.0"; "" for one of torch's.   name: as on PyPI."""
    if name.startswith(OF_TORCH):
        return ""
    try:
        found = Version(version)
    except InvalidVersion:
        return name
    return name if found.is_devrelease else f"{name}=={found.public}"
