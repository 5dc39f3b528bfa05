"""[inner.lora]: an adapter is trained, synchronised and snapshotted, and the base model stays as it is.

    W x  +  alpha / r · B A x      A: r × in, drawn at random      B: out × r, zero at first

Averaging A and B apart is not averaging B A (decision 036): with `freeze_a` A stays as it was drawn, and
the mean of the products is the product of the means.

Not promised: quantised bases, or other adapters than LoRA.  No torch here.
"""

from dataclasses import dataclass
from math import isfinite

from inner.errors import InnerError

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings:
    """targets: "all-linear" (every linear layer but the head), or names of layers, such as ["q_proj", "v_proj"].

    freeze_a: train B alone.   dropout: of the adapter's input, while training.
    """

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str | list = ALL_LINEAR
    freeze_a: bool = False

    def __post_init__(self) -> None:
        if self.r < 1:
            raise InnerError(
                f"lora.r = {self.r}: an adapter of that rank has no parameters, so nothing would be trained. Set "
                "inner.lora.r to 16, or leave the table [inner.lora] out to train the whole model."
            )
        if not (isfinite(self.alpha) and self.alpha > 0):
            raise InnerError(f"lora.alpha = {self.alpha} must be greater than 0. Set inner.lora.alpha to 2 · r.")
        if not 0 <= self.dropout < 1:
            raise InnerError(f"lora.dropout = {self.dropout} must be at least 0 and below 1. Set inner.lora.dropout.")
        self._check_targets()

    def _check_targets(self) -> None:
        if self.targets == ALL_LINEAR:
            return
        names = self.targets
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise InnerError(
                f'lora.targets = {names!r} is neither "{ALL_LINEAR}" nor a list of names. Set inner.lora.targets to '
                '["q_proj", "v_proj"], say.'
            )

    @property
    def names(self) -> list[str]:
        """The layers that are named; [] for all of them."""
        return [] if isinstance(self.targets, str) else list(self.targets)
