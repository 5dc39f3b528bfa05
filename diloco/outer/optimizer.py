"""The outer optimizer: DiLoCo's Nesterov step on flat fp32 vectors, and the state that all replicas share.

    m ← μ·m + ḡ        θ ← θ − lr·(ḡ + μ·m)        ḡ = 0: θ and m stay

The optimizers hold m. `OuterState` gives the rendezvous θ, m and the state of "auto" of each fragment.

Not promised: the bits of torch.optim.SGD(nesterov=True), which rounds once less (≤ 2 ulp).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from diloco.outer.safety import is_zero
from diloco.run.config import OuterError
from rendezvous.records.state import all_arrays, base_of

if TYPE_CHECKING:
    from diloco.outer.auto_lr import AutoLR

_CACHED = 1 << 17  # elements; three pieces of this size fit into the CPU's cache


@torch.no_grad()
def nesterov(theta: Tensor, momentum: Tensor, mean: Tensor, *, lr: float, mu: float) -> None:
    """DiLoCo's outer step (arXiv 2311.08105, Alg. 1 with Nesterov), in place on flat fp32 vectors:

        m ← μ·m + ḡ        θ ← θ − lr·(ḡ + μ·m)

    Every operation is rounded separately, because fused multiply-adds would give other bits on other CPUs.
    """
    size = _CACHED * torch.get_num_threads()  # torch divides a piece into equal parts, one for each of its threads
    for t, m, g in zip(*(x.split(size) for x in (theta, momentum, mean)), strict=True):
        m.mul_(mu).add_(g)
        t.sub_(m.mul(mu).add_(g).mul_(lr))


class Nesterov(torch.optim.Optimizer):
    """The optimizer of one flat parameter by `nesterov`: SGD(nesterov=True) without fused rounding (≤ 2 ulp).

    A zero mean changes nothing: θ, the momentum and the state of "auto" stay the same.
    lr: a number, or "auto" (auto_lr.py), which chooses lr for every mean.
    """

    def __init__(self, flat: nn.Parameter, *, lr: float | str, momentum: float) -> None:
        self.auto = _auto_lr(flat.numel(), momentum) if lr == "auto" else None
        super().__init__([flat], {"lr": self.auto.lr if self.auto else float(lr), "momentum": momentum})
        self.flat = flat
        self.stood = False  # whether the last mean was zero
        self.state[flat]["momentum"] = torch.zeros_like(flat)

    @property
    def momentum(self) -> Tensor:
        return self.state[self.flat]["momentum"]

    def apply(self, theta: Tensor, mean: Tensor) -> None:
        """Take one step on `theta` with `mean` as the gradient. A zero mean changes nothing (decision 015)."""
        self.stood = is_zero(mean.numpy())
        if self.stood:
            return
        group = self.param_groups[0]
        if self.auto is not None:
            group["lr"] = self.auto.step(mean.numpy())
        nesterov(theta, self.momentum, mean, lr=group["lr"], mu=group["momentum"])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.flat.grad is not None, "torchft sets the mean as the gradient before it steps"
        self.apply(self.flat.data, self.flat.grad)


def _auto_lr(size: int, mu: float) -> "AutoLR":
    from diloco.outer.auto_lr import AutoLR

    return AutoLR(size, mu=mu)


class OuterState:
    """θ, outer momentum and the state of "auto", for every fragment. torchft and our optimizers step the same tensors.

    This is the `ReplicatedState` (rendezvous/records/state.py) that the rendezvous digests, snapshots and heals.
    """

    def __init__(self, thetas: Sequence[Tensor], optimizers: Sequence[Nesterov]) -> None:
        self.thetas, self.optimizers = list(thetas), list(optimizers)

    def digest(self) -> str:
        """Return the digest of all fragments, computed like a commit's `base`."""
        return base_of(self, len(self.thetas))

    def size(self, fragment: int) -> int:
        return self.thetas[fragment].numel()

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        self.optimizers[fragment].apply(self.thetas[fragment], torch.from_numpy(mean))

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        optimizer = self.optimizers[fragment]
        theta = self.thetas[fragment].numpy()
        momentum = optimizer.momentum.numpy()
        learned = {} if optimizer.auto is None else optimizer.auto.arrays()
        named = {"theta": theta, "momentum": momentum, **learned}
        return {f"{name}.{fragment}": array for name, array in named.items()}

    def all_arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of every fragment."""
        return all_arrays(self, len(self.thetas))

    def load(self, arrays: Any) -> None:
        for name, target in self.all_arrays().items():
            if name not in arrays or arrays[name].shape != target.shape:
                raise OuterError(
                    f"the snapshot has no {name} of {target.size} elements: this URL holds a run of another model or "
                    "with other fragments. Use another URL, or the model and settings of that run"
                )
            target[:] = arrays[name]
