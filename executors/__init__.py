"""Where replicas run.  Knows jobs, exit codes and prices; has never heard of a loss or a bucket key.

    base         the protocol, in plain data                      mixed   several places as one
    the places   local (child forkserver processes logfile) · on_modal (modal_*) · on_hf_jobs (hf_recipe hub wheel) ·
                 slurm (slurm_job) · on_sky                       container   what runs inside a rented one
    supervisor   plan fleet track lease stop launches             money purse   what it costs, and may
    cli          parser intent address change look watch foreground completion doctor demo

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
