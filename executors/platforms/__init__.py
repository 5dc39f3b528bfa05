"""The platforms on which replicas run: a protocol (base), a base class (executor, platform), a module per platform.

A new platform needs a line in EXECUTORS, and one in FAR if the platform's machines cannot see this machine's files.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

EXECUTORS = {
    "local": "executors.platforms.on_host.executor:LocalProcessExecutor",
    "modal": "executors.platforms.on_modal.executor:ModalExecutor",
    "hf-jobs": "executors.platforms.on_hf_jobs.executor:HFJobsExecutor",
    "slurm": "executors.platforms.on_slurm.executor:SlurmExecutor",
    "sky": "executors.platforms.on_sky:SkyExecutor",
}
FAR = ("modal", "hf-jobs", "sky")


def name_loader(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package that imports its names when they are first used.   homes: name -> module."""

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return load
