"""Where replicas run.  Knows jobs, exit codes and prices; has never heard of a loss or a bucket key."""

from executors.base import Handle, LaunchPlan, ReplicaSpec, Result, ServerlessExecutor, State, Status
from executors.local import LocalProcessExecutor

__all__ = [
    "Handle",
    "LaunchPlan",
    "LocalProcessExecutor",
    "ReplicaSpec",
    "Result",
    "ServerlessExecutor",
    "State",
    "Status",
]
