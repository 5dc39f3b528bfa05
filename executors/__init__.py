"""The package that runs replicas. This room handles jobs, exit codes and prices, but no losses and no bucket keys.

    cli          a command as it is typed: train status logs costs scale drain stop resume export doctor demo setup
     │
    preflight    the request, its price, and every mistake that is visible before the launch
     │
    supervision  one run on any platforms: look ─▶ plan ─▶ launch, replace, fence, drain; leases and budget
     │
    platforms    base: the protocol · places: several platforms as one executor · container: the process on a rented GPU
                 on_host · on_modal · on_hf_jobs · on_slurm · on_sky

Each layer imports only the layers below it (import-linter checks this).  `import executors` imports no platform: the
first access to a name imports its module, and the first use of a platform imports its SDK.
"""

from functools import partial
from typing import TYPE_CHECKING

from executors.platforms import EXECUTORS
from rendezvous import name_loader

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
    "ExecutorError", "FleetExecutor", "HFJobsExecutor", "Handle", "LaunchPlan", "LocalProcessExecutor", "ModalExecutor",
    "ReplicaSpec", "Result", "ServerlessExecutor", "SkyExecutor", "SlurmExecutor", "State", "Status", "rank_specs",
]  # fmt: skip

_HOMES = dict.fromkeys(__all__, "executors.platforms.base") | {"rank_specs": "executors.platforms.short_form"}
_HOMES |= {name: module for module, _, name in (path.partition(":") for path in EXECUTORS.values())}

__getattr__ = name_loader(__name__, _HOMES)
__dir__ = partial(sorted, __all__)
