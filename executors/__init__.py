"""The room that runs replicas.  It knows jobs, exit codes and prices; it has never heard of a loss or a bucket key.

    cli          a command as it is typed: train status logs costs scale drain stop resume export doctor demo setup
     │
    preflight    what is asked for, its price, and every mistake that is visible before anything is launched
     │
    supervision  one run, wherever its replicas are: look ─▶ plan ─▶ launch, replace, fence, drain; leases and budget
     │
    platforms    base: the protocol, in plain data · multi: several places as one · container: inside a rented one
                 on_host · on_modal · on_hf_jobs · on_slurm · on_sky

Each floor imports the floors below it alone (import-linter keeps it so).  Importing `executors` imports no platform: a
name is loaded when it is first asked for, its SDK when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from executors.platforms import EXECUTORS

if TYPE_CHECKING:
    from executors.platforms.base import (
        ExecutorError,
        FleetExecutor,
        Handle,
        LaunchPlan,
        ReplicaSpec,
        Result,
        ServerlessExecutor,
        State,
        Status,
    )
    from executors.platforms.on_hf_jobs.executor import HFJobsExecutor
    from executors.platforms.on_host.executor import LocalProcessExecutor
    from executors.platforms.on_modal.executor import ModalExecutor
    from executors.platforms.on_sky import SkyExecutor
    from executors.platforms.on_slurm.executor import SlurmExecutor
    from executors.platforms.short_form import rank_specs

__all__ = [
    "ExecutorError",
    "FleetExecutor",
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
    "rank_specs",
]

_HOME = {name: module for module, _, name in (path.partition(":") for path in EXECUTORS.values())}
_HOME["rank_specs"] = "executors.platforms.short_form"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "executors.platforms.base")), name)


def __dir__() -> list[str]:
    return sorted(__all__)
