"""Makes the inner optimizer, and its learning rate as a function of the committed outer step.

    rate = lr · factor(t, n) · min(1, (s + 1) / warmup_steps)

    t   the committed outer step: [inner.schedule] defines factor; so a replacement has the same rate as other replicas
    n   number of replicas whose pseudogradients the newest outer step averaged
    s   inner steps of this session; a session that joins without Adam's moments warms up

    adamw            torch's, in the parameters' own dtype; no extra fp32 copy exists
    muon, adamw8bit  other_optimizers.py

Not promised: that moments survive a session. An adapter's moments survive if its replica leaves with notice
(diloco/outer/moments.py).
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from inner.settings.inner import InnerConfig, lr_factor


def make_optimizer(config: InnerConfig, model: nn.Module) -> Optimizer:
    """Make the config's optimizer.   Raise InnerError if it cannot run here."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adam: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "adamw":
        return AdamW([p for _, p in trained], **adam)
    from inner.models.other_optimizers import adamw_8bit, muon_and_adamw

    return (muon_and_adamw if config.optimizer == "muon" else adamw_8bit)(trained, adam)


class RunSchedule(LambdaLR):
    """The learning rate's schedule. Without a run, the committed step is the number of inner steps.

    warmup_steps: for an optimizer without moments; ignored if it has moments when it joins a run, or begins the run."""

    def __init__(self, optimizer: Optimizer, config: InnerConfig, start: int, warmup_steps: int) -> None:
        self._warmup = max(1, warmup_steps)
        run: list[tuple[Callable[[], int], Callable[[], int]]] = []
        self._run = run

        def factor(s: int) -> float:
            t, n = (run[0][0](), run[0][1]()) if run else (start + s, 1)
            return lr_factor(config, t, n) * min(1.0, (s + 1) / self._warmup)

        super().__init__(optimizer, factor)

    def follow(self, step: Callable[[], int], replicas: Callable[[], int]) -> None:
        """Follow the run from now on: `step()` returns the committed outer step, and `replicas()` how many replicas
        that step averaged."""
        self._run[:] = [(step, replicas)]
        if self.optimizer.state or step() == 0:  # Adam has the last session's moments, or the run begins
            self._warmup = 1
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
