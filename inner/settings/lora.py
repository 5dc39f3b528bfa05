"""[inner.lora]: the run trains, synchronises and snapshots an adapter. The base model stays unchanged.

    W x  +  alpha / r · B A x      A: r × in, drawn at random      B: out × r, zero at first

The average of B A is not the product of the averages of A and B (decision 036). With `freeze_a`, A keeps its random
start values, and then the two are equal.

Not promised: quantised base models, or adapters other than LoRA.  No torch here.
"""

from dataclasses import dataclass
from typing import ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, setting

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings(Table):
    """Train an adapter, and leave the model as it is."""

    path: ClassVar[str] = "inner.lora"

    r: int = setting(16, "Rank of the adapter.")
    alpha: float = setting(32.0, "The adapter's product is multiplied by alpha / r.", above=0)
    dropout: float = setting(0.0, "Dropout of the adapter's input, while training.", least=0, below=1)
    targets: str | list = setting(
        ALL_LINEAR, 'Every linear layer but the head, or names of layers, such as ["q_proj", "v_proj"].'
    )
    freeze_a: bool = setting(False, "Train B alone: then the mean of the products is the product of the means.")

    def check(self) -> None:
        if self.r < 1:
            raise InnerError(
                f"inner.lora.r = {self.r}: an adapter of that rank has no parameters, so nothing would be trained. Set "
                "inner.lora.r to 16, or leave the table [inner.lora] out to train the whole model."
            )
        self._check_targets()

    def _check_targets(self) -> None:
        if self.targets == ALL_LINEAR:
            return
        names = self.targets
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise InnerError(
                f'inner.lora.targets = {names!r} is neither "{ALL_LINEAR}" nor a list of names. Set inner.lora.targets '
                'to ["q_proj", "v_proj"], say.'
            )

    @property
    def names(self) -> list[str]:
        """The names of the adapted layers; [] means all linear layers."""
        return [] if isinstance(self.targets, str) else list(self.targets)
