"""The outer loop: θ, Δ, outer steps and fragments, by torchft's DiLoCo on a bucket.

With α > 0 or a lighthouse, torchft's class runs unmodified. Otherwise in_place.py replaces five of its methods.

    manager = StoreManager("s3://bucket/run", slot="r00")
    with make_diloco(model, optimizer, manager, sync_every=50):
        for batch in loader: ...        # unchanged

Importing `diloco` does not import torch: a name is loaded at its first use.
"""

from typing import TYPE_CHECKING

from rendezvous import name_loader

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
    "ConfigError", "DiLoCoCallback", "FleetConfig", "MockManager", "Nesterov", "OuterConfig", "OuterError", "Run",
    "RunConfig", "StoreManager", "export", "load_config", "make_diloco", "open_run", "read_run",
]  # fmt: skip

_NAMES = {
    "diloco.model.export": ["export"],
    "diloco.outer.make": ["make_diloco"],
    "diloco.outer.managers.manager": ["MockManager", "StoreManager"],
    "diloco.outer.optimizer": ["Nesterov"],
    "diloco.run.config": ["OuterConfig", "OuterError", "RunConfig", "load_config"],
    "diloco.run.founding": ["open_run"],
    "diloco.run.record": ["Run", "read_run"],
    "diloco.run.sections": ["ConfigError", "FleetConfig"],
    "diloco.script.callback": ["DiLoCoCallback"],
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__getattr__ = name_loader(__name__, _HOME)
