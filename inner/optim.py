"""The inner optimizer: AdamW at a constant rate, with a linear warm-up.

    rate(s) = lr · min(1, (s + 1) / warmup_steps, (start + s + 1) / lr_warmup_steps)      s = steps of this session

`lr_warmup_steps` belongs to the data order (a later session is past it), `warmup_steps` to this session (fresh Adam
state).
No decay: a schedule over a session would anneal once per session.
"""

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from inner.base import InnerConfig


def make_optimizer(config: InnerConfig, model: nn.Module) -> AdamW:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return AdamW(
        trainable,
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
    )


def warm_up(optimizer: Optimizer, config: InnerConfig, start: int, warmup_steps: int) -> LambdaLR:
    session = max(1, warmup_steps)
    run = max(1, config.lr_warmup_steps)
    return LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / session, (start + s + 1) / run))
