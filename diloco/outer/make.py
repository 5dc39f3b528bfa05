"""`make_diloco`: any PyTorch training loop becomes one replica of a run.

    manager = StoreManager("s3://bucket/run", slot="r00")
    with make_diloco(model, optimizer, manager, sync_every=50) as run:
        for batch in loader: ...        # as before; leaves the block when the run is done, or this replica should go

Not promised: a loop whose steps differ between replicas in number; the outer step counts optimizer steps.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco.outer.loop import OuterLoop, OuterManager
from diloco.run.config import OuterConfig, OuterConfigError

if TYPE_CHECKING:
    from torchft import Manager


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

    optimizer: the inner one; its `step` drives everything.   manager: a StoreManager, or a torchft.Manager
    (use_async_quorum=False) where replicas can reach each other.
    outer: H, F, the outer step, …; or these settings by name, with outer_lr and outer_momentum for its lr and momentum.
    boundary: inner steps that no sync may interrupt (a generation batch); sync_every/fragments is a multiple of it.
    Entering heals: the model holds the run's θ before the first inner step.  Raises OuterError for a model or settings
    that do not fit (the latter are a ConfigError too), WrongRun if the URL holds another run; the block swallows
    `Leaving` (see `manager.left`).
    """
    if outer is not None and settings:
        raise OuterConfigError(f"make_diloco got outer=… and {', '.join(sorted(settings))}; put them into the former")
    return OuterLoop(model, optimizer, as_outer_manager(manager), outer or outer_config(settings), boundary)


def as_outer_manager(manager: Any) -> Any:
    """Return a manager that OuterLoop can use: a torchft.Manager is wrapped, others are returned as they are."""
    if hasattr(manager, "rounds"):
        return manager
    from diloco.outer.managers.lighthouse import LighthouseManager

    return LighthouseManager(manager)


_KEYWORDS = {"outer_lr": "lr", "outer_momentum": "momentum"}  # beside an inner optimizer that has its own


def outer_config(settings: dict[str, Any]) -> OuterConfig:
    """Make it from make_diloco's keywords.   Raises OuterConfigError."""
    for keyword, name in _KEYWORDS.items():
        if name in settings:
            raise OuterConfigError(
                f"make_diloco has no {name}: the outer step's is {keyword}, the inner optimizer has its own"
            )
    return OuterConfig.of({_KEYWORDS.get(keyword, keyword): value for keyword, value in settings.items()})
