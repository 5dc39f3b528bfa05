"""The outer loop: θ, Δ, outer steps, fragments; torchft's DiLoCo on a bucket.

torchft's class runs as it is only where α > 0 or over a lighthouse; else in_place.py replaces five methods of it.

    manager = StoreManager("s3://bucket/run", slot="r00")
    with make_diloco(model, optimizer, manager, sync_every=50):
        for batch in loader: ...        # unchanged

Importing `diloco` imports no torch: a name is loaded when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.config import ConfigError, FleetConfig, OuterConfig, OuterError, RunConfig, load_config
    from diloco.history import export
    from diloco.launch import Run, open_run, read_run
    from diloco.make import make_diloco
    from diloco.manager import MockManager, StoreManager
    from diloco.optimizer import Nesterov

__all__ = [
    "ConfigError",
    "FleetConfig",
    "MockManager",
    "Nesterov",
    "OuterConfig",
    "OuterError",
    "Run",
    "RunConfig",
    "StoreManager",
    "export",
    "load_config",
    "make_diloco",
    "open_run",
    "read_run",
]

_HOME = {
    "ConfigError": "diloco.config",
    "FleetConfig": "diloco.config",
    "MockManager": "diloco.manager",
    "Nesterov": "diloco.optimizer",
    "OuterConfig": "diloco.config",
    "OuterError": "diloco.config",
    "Run": "diloco.launch",
    "RunConfig": "diloco.config",
    "StoreManager": "diloco.manager",
    "export": "diloco.history",
    "load_config": "diloco.config",
    "make_diloco": "diloco.make",
    "open_run": "diloco.launch",
    "read_run": "diloco.launch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
