"""`make_diloco`: any PyTorch training loop becomes one replica of a run.

    manager = StoreManager("s3://bucket/run", slot="r00")
    with make_diloco(model, optimizer, manager, sync_every=50) as run:
        for batch in loader: ...        # as before; the block ends when the run is done, or this replica should leave

Not promised: replicas with different numbers of steps in a loop; the outer step counts optimizer steps.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco.outer.loop import OuterLoop
from diloco.run.config import OuterConfig, OuterConfigError

if TYPE_CHECKING:
    from torchft import Manager

    from diloco.outer.managers.protocol import OuterManager


def make_diloco(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    manager: "OuterManager | Manager",
    outer: OuterConfig | None = None,
    *,
    boundary: int = 1,
    **settings: Any,
) -> OuterLoop:
    """Make any PyTorch loop elastic:

        with make_diloco(model, optimizer, manager, sync_every=50) as run:
            for batch in loader: ...        # unchanged; run.log(loss=loss) shows it in `diloco status`

    optimizer: the inner one; its `step` starts each sync.   manager: a StoreManager, or a torchft.Manager
    (use_async_quorum=False) if replicas can reach each other.
    outer: H, F, the outer step, …; or pass these settings by name (outer_lr and outer_momentum for lr and momentum).
    boundary: inner steps that no sync may interrupt (a generation batch); sync_every/fragments is a multiple of it.
    At entry the replica heals: the model gets the run's θ.  Raises OuterError for a wrong model or wrong settings
    (the latter are a ConfigError too), and WrongRun if the URL holds another run. The block swallows
    `Leaving` (see `manager.left`).
    """
    if outer is not None and settings:
        raise OuterConfigError(f"make_diloco got outer=… and {', '.join(sorted(settings))}; put them into outer")
    is_wrapped = type(optimizer).__module__.startswith("accelerate.")  # it has no hooks, and skips some steps
    inner = optimizer.optimizer if is_wrapped else optimizer  # pyright: ignore[reportAttributeAccessIssue]
    return OuterLoop(model, inner, as_outer_manager(manager), outer or outer_config(settings), boundary)


def as_outer_manager(manager: Any) -> Any:
    """Return a manager that OuterLoop can use: a torchft.Manager is wrapped, another manager is returned as it is."""
    if hasattr(manager, "rounds"):
        return manager
    from diloco.outer.managers.lighthouse import LighthouseManager

    return LighthouseManager(manager)


_KEYWORDS = {"outer_lr": "lr", "outer_momentum": "momentum"}  # the inner optimizer has an lr of its own


def outer_config(settings: dict[str, Any]) -> OuterConfig:
    """Make an OuterConfig from make_diloco's keywords.   Raises OuterConfigError."""
    for keyword, name in _KEYWORDS.items():
        if name in settings:
            raise OuterConfigError(
                f"make_diloco has no argument {name}: use {keyword} for the outer step; the inner optimizer has its own"
            )
    return OuterConfig.of({_KEYWORDS.get(keyword, keyword): value for keyword, value in settings.items()})
