"""The outer learning rate "auto": the more successive means agree, the smaller the rate is.

    η = TARGET / (1 + μ/(1 − μρ̂))        ρ̂: an average of ρ (safety.py), the cosine of successive means

η has the same bits on all replicas, because η depends only on committed means, whose bytes are agreed on. `dot` of
safety.py has the same bits, too; the rest is single IEEE operations of Python, and η is rounded to fp32.  AutoLR's
memory is part of the outer state, its digest and its snapshots.

Not promised: that a run's means are AR(1), which the formula of η_eff takes for granted.
"""

import math

import numpy as np

from diloco.outer.safety import Memory

TARGET = 1.0  # the η_eff that "auto" aims at, as with plain averaging (decision 016)
_MEMORY = 8  # ρ̂ is an average over about this number of means


class AutoLR:
    """The rule lr = "auto" for one fragment: η = target/(1 + μ/(1 − μρ̂)), so that η_eff stays near `target`.

    ρ̂ begins at 1 (the smallest η), and is an average of this 1 and about the last 8 values of ρ. A negative
    ρ counts as 0, so η is in [target·(1−μ), target/(1+μ)].  A zero mean does not change ρ̂.
    """

    def __init__(self, size: int, *, mu: float, target: float = TARGET) -> None:
        if not (math.isfinite(target) and target > 0 and 0 <= mu < 1):
            raise ValueError(f"outer lr = auto needs a target above 0 and a momentum in [0, 1), got {target}, {mu}")
        self.target = target
        self.mu = mu
        self.memory = Memory(size)
        self.learned = np.array([1.0, 1.0])  # ρ̂, and the number of values in this average

    @property
    def rho_hat(self) -> float:
        return float(self.learned[0])

    @property
    def lr(self) -> float:
        """The current η, an fp32 number."""
        return float(np.float32(self.target / (1.0 + self.mu / (1.0 - self.mu * self.rho_hat))))

    def step(self, mean: np.ndarray) -> float:
        """Update ρ̂ from a committed mean. Return the η for the step with this mean."""
        rho = self.memory.rho(mean)
        if rho is not None:
            observed = max(0.0, rho)
            count = min(float(self.learned[1]) + 1.0, float(_MEMORY))
            self.learned[:] = self.rho_hat + (observed - self.rho_hat) / count, count
        return self.lr

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays for snapshots and digests, in this order: views, not copies."""
        return {"last_mean": self.memory.mean, "rho": self.learned}
