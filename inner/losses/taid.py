"""TAID: distillation with a target that moves from the student to the teacher (arXiv 2501.16937).

    p_t = softmax((1 - t) sg(S) + t T_)          in logit space; sg = no gradient
    L   = - Σ_tok mask Σ_v p_t log softmax(S) / Σ mask          eq. (4), as in SakanaAI/TAID

t = 0: the student's own entropy, without gradient. t = 1: forward KL plus the teacher's entropy; the gradient is
forward KL's. L is a cross-entropy: if both distributions are equal, L is their entropy, not 0.

Not promised: that the scheduler adapts. With the defaults, the scheduler's own step (≤ 1.5e-4) is smaller than the
slope .6/N of the line from t_start to t_end, unless N is above ~4000 steps. Raise `alpha` for short runs.
"""

from dataclasses import dataclass
from math import exp, isfinite

import torch
from torch import Tensor

from inner.losses.divergence import floor_log_zero, log_probs, mean_by_position


def taid_loss(student_logits: Tensor, teacher_logits: Tensor, mask: Tensor, t: float) -> Tensor:
    """Return the loss, a mean over the mask. Logits (..., V), 0/1 mask (...) of positions (already shifted).

    An empty mask gives 0, on the graph."""
    if not 0 <= t <= 1:
        raise ValueError(f"t = {t} is outside [0, 1].")

    def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
        target = _blend_logits(student.detach(), teacher, t).softmax(-1)
        return -(target * torch.where(target == 0, 0.0, floor_log_zero(log_probs(student)))).sum(-1)

    return mean_by_position(cross_entropy, student_logits, teacher_logits, mask)


def _blend_logits(student: Tensor, teacher: Tensor, t: float) -> Tensor:
    """Return (1 - t) · student + t · teacher. Leave out a side with weight 0, even its -inf."""
    student = student if student.dtype == torch.float64 else student.float()
    if t == 0:
        return student
    return teacher.to(student.dtype) if t == 1 else (1 - t) * student + t * teacher.to(student.dtype)


@dataclass(eq=False)
class TAIDScheduler:
    """t over training: at least the line from t_start to t_end, and above it while the loss falls fast.

    r = (previous - loss) / (previous + 1e-15);  m ← β m + (1 - β) r;  t ← min(t_end, max(line, t + α σ(m) (1 - t)))

    as in SakanaAI/TAID, update_t. For a loss that is not used (see `update_t`), t ← max(t, min(t_end, line)). So t
    never falls, is never below the line, and never exceeds t_end.
    """

    num_train_steps: int
    t_start: float = 0.4
    t_end: float = 1.0
    alpha: float = 5e-4
    beta: float = 0.99
    disable_adaptive: bool = False

    def __post_init__(self) -> None:
        if self.num_train_steps < 1:
            raise ValueError(f"num_train_steps = {self.num_train_steps} must be 1 or more.")
        if not 0 <= self.t_start <= self.t_end <= 1:
            raise ValueError(f"0 <= t_start = {self.t_start} <= t_end = {self.t_end} <= 1 does not hold.")
        self.t = self.t_start
        self.momentum = 0.0
        self.previous: float | None = None

    def update_t(self, loss: Tensor | float, global_step: int) -> float:
        """Update t after a step, and return it. Three losses are not used: the first (it only becomes `previous`), an
        exact 0 (an empty batch), and a loss that is not finite. For these, t follows the line."""
        value = float(loss)
        line = self.t_start + (self.t_end - self.t_start) * global_step / self.num_train_steps
        ahead = self.t
        if value != 0 and isfinite(value):
            ahead = self._adaptive_t(value)
        self.t = max(self.t, min(self.t_end, max(line, ahead)))
        return self.t

    def _adaptive_t(self, loss: float) -> float:
        """Return the new t that this loss alone would give, without the line."""
        previous = self.previous
        self.previous = loss
        if previous is None or self.disable_adaptive:
            return self.t
        self.momentum = self.beta * self.momentum + (1 - self.beta) * (previous - loss) / (previous + 1e-15)
        return self.t + self.alpha * _sigmoid(self.momentum) * (1 - self.t)


def _sigmoid(x: float) -> float:
    """Return 1 / (1 + e^-x) without overflow: a loss that jumps from 1e-5 to 1 makes a momentum of -1000."""
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))
