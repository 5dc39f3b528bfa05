"""The inner optimizer, and its learning rate as a function of the committed outer step.

    rate = lr · factor(t, n) · min(1, (s + 1) / warmup_steps)

    t   the committed outer step: [inner.schedule] defines factor; so a replacement has the others' rate
    n   number of replicas whose pseudogradients the newest outer step averaged
    s   inner steps of this session: its Adam moments begin at 0, so it warms up over `warmup_steps`

    adamw       torch's, in the parameters' own dtype; no extra fp32 copy exists
    muon        matrices: torch.optim.Muon, its steps scaled to AdamW's size; all else: AdamW
    adamw8bit   bitsandbytes'

Not promised: that moments survive a session. An adapter's moments do if its replica leaves with notice
(diloco/outer/moments.py).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from inner.errors import InnerError
from inner.settings.inner import InnerConfig, lr_factor

NOT_HIDDEN = ("embed", "lm_head", "wte", "wpe", "score")  # in names of matrices that Muon must not train


def make_optimizer(config: InnerConfig, model: nn.Module) -> Optimizer:
    """Make the config's optimizer.   Raises InnerError if it cannot run here."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    adam: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "weight_decay": config.weight_decay,
    }
    if config.optimizer == "muon":
        matrices = [p for name, p in trained if p.ndim == 2 and not any(word in name for word in NOT_HIDDEN)]
        held = {id(p) for p in matrices}
        return MuonAndAdamW(matrices, [p for _, p in trained if id(p) not in held], adam)
    if config.optimizer == "adamw8bit":
        return _adamw_8bit([p for _, p in trained], adam)
    return AdamW([p for _, p in trained], **adam)


class MuonAndAdamW(Optimizer):
    """Muon and AdamW as one optimizer for hooks and schedule. It shares its groups and state with its parts."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], adam: dict[str, Any]) -> None:
        super().__init__([*matrices, *others], {"lr": adam["lr"]})
        parts: list[Optimizer] = []
        if matrices:
            from torch.optim import Muon

            muon = {"lr": adam["lr"], "weight_decay": adam["weight_decay"], "adjust_lr_fn": "match_rms_adamw"}
            parts.append(Muon(matrices, **muon))
        if others:
            parts.append(AdamW(others, **adam))
        self.parts = parts
        self.param_groups = [group for part in parts for group in part.param_groups]
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss


def _adamw_8bit(parameters: Iterable[Tensor], adam: dict[str, Any]) -> Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise InnerError(
            f'inner.optimizer = "adamw8bit" needs bitsandbytes, which is not installed here ({missing}). Next: '
            "`pip install bitsandbytes`"
            ' on this machine, `--pip bitsandbytes` for replicas elsewhere, or inner.optimizer = "adamw".'
        ) from missing
    if not torch.cuda.is_available():
        raise InnerError(
            'inner.optimizer = "adamw8bit" needs a CUDA device, and there is none here. Set inner.optimizer = "adamw".'
        )
    return AdamW8bit(parameters, **adam)


class RunSchedule(LambdaLR):
    """The learning rate's schedule. Without a run, the committed step is the number of inner steps.

    warmup_steps: for an optimizer without moments; ignored if it has moments when it joins a run."""

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
        if self.optimizer.state:  # moments from the last session
            self._warmup = 1
        for group, base, factor in zip(self.optimizer.param_groups, self.base_lrs, self.lr_lambdas, strict=True):
            group["lr"] = base * factor(self.last_epoch)
