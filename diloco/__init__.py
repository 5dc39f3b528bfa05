"""The outer loop: θ, Δ, outer steps and fragments, by torchft's DiLoCo on a bucket.

With α > 0 or a lighthouse, torchft's class runs unmodified. Otherwise in_place.py replaces five of its methods.

    manager = StoreManager("s3://bucket/run", slot="r00")
    with make_diloco(model, optimizer, manager, sync_every=50):
        for batch in loader: ...        # unchanged

Importing `diloco` does not import torch: a name is loaded at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.model.export import export
    from diloco.outer.make import make_diloco
    from diloco.outer.managers.manager import MockManager, StoreManager
    from diloco.outer.optimizer import Nesterov
    from diloco.run.config import OuterConfig, OuterError, RunConfig, load_config
    from diloco.run.founding import open_run
    from diloco.run.record import Run, read_run
    from diloco.run.sections import ConfigError, FleetConfig
    from diloco.script.callback import DiLoCoCallback

__all__ = [
    "ConfigError",
    "DiLoCoCallback",
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
    "ConfigError": "diloco.run.sections",
    "DiLoCoCallback": "diloco.script.callback",
    "FleetConfig": "diloco.run.sections",
    "MockManager": "diloco.outer.managers.manager",
    "Nesterov": "diloco.outer.optimizer",
    "OuterConfig": "diloco.run.config",
    "OuterError": "diloco.run.config",
    "Run": "diloco.run.record",
    "RunConfig": "diloco.run.config",
    "StoreManager": "diloco.outer.managers.manager",
    "export": "diloco.model.export",
    "load_config": "diloco.run.config",
    "make_diloco": "diloco.outer.make",
    "open_run": "diloco.run.founding",
    "read_run": "diloco.run.record",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value
