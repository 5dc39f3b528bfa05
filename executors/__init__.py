"""Where replicas run.  Knows jobs, exit codes and prices; has never heard of a loss or a bucket key.

Importing `executors` imports no platform: a name is loaded when it is first asked for, its SDK when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.base import (
        ExecutorError,
        Handle,
        LaunchPlan,
        ReplicaSpec,
        Result,
        ServerlessExecutor,
        State,
        Status,
    )
    from executors.local import LocalProcessExecutor
    from executors.on_hf_jobs import HFJobsExecutor
    from executors.on_modal import ModalExecutor
    from executors.on_sky import SkyExecutor
    from executors.slurm import SlurmExecutor

__all__ = [
    "ExecutorError",
    "HFJobsExecutor",
    "Handle",
    "LaunchPlan",
    "LocalProcessExecutor",
    "ModalExecutor",
    "ReplicaSpec",
    "Result",
    "ServerlessExecutor",
    "SkyExecutor",
    "SlurmExecutor",
    "State",
    "Status",
]

_HOME = {
    "HFJobsExecutor": "executors.on_hf_jobs",
    "LocalProcessExecutor": "executors.local",
    "ModalExecutor": "executors.on_modal",
    "SkyExecutor": "executors.on_sky",
    "SlurmExecutor": "executors.slurm",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "executors.base")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
