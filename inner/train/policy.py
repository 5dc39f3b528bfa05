"""Train with GRPO only: TRL's policy loss and its metrics.

    rollouts (inner/rollouts/generation.py) ──▶ total = grpo ──▶ "loss/total", "loss/grpo", "loss/router"

    PolicyTrainer ◀── ComposerReplicationTrainer (trainer.py), which adds the terms of [inner.sdpo] and [inner.replay]
                      and the scores of [inner.process]

Loss and gradients are TRL's, bit for bit. There is no forward beyond TRL's.

Not promised: more than one process per model.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from inner.models.precision import check_precision
from inner.rollouts.generation import GenerationTrainer
from inner.settings.inner import Theta

if TYPE_CHECKING:
    from inner.host import Host


class PolicyTrainer(GenerationTrainer):
    """A GenerationTrainer that learns only from rewards."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_precision(self.accelerator.unwrap_model(self.model))
        self._step_of_run: Callable[[], int] | None = None
        self._theta: Theta | None = None

    def follow(self, step: Callable[[], int], theta: Theta) -> None:
        """Join a run.   step: returns the committed outer step.   theta: θ of that step by parameter name.

        Without a run, the committed step is the trainer's global_step, and θ stays the start weights."""
        self._step_of_run = step
        self._theta = theta

    def report_to(self, host: "Host") -> None:
        """Ignore the host: the only user code here is rewards, whose errors RewardCalls reports."""

    def _committed_step(self) -> int:
        return self.state.global_step if self._step_of_run is None else self._step_of_run()

    # the loss

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        grpo = self._policy_loss(model, inputs)
        self._note_losses(grpo, grpo)
        return grpo

    def _loss_divisor(self) -> int:
        """Return the number by which TRL divides its own loss in train mode (Trainer does not divide again)."""
        return self.current_gradient_accumulation_steps if self._mode() == "train" else 1

    def _note_losses(self, grpo: Tensor, total: Tensor, alpha: float = 0.0, beta: float = 0.0) -> None:
        divisor = self._loss_divisor()  # undone below, because the mean over micro-batches is the step's loss
        router = self._take_router_loss()  # TRL's policy loss includes the router's
        self._record_metric("loss/grpo", grpo.item() * divisor - (router or 0.0))
        if router is not None:
            self._record_metric("loss/router", router)
        self._record_metric("loss/total", total.item() * divisor)
        self._record_metric("loss/alpha_sdpo", alpha)
        self._record_metric("loss/beta_replay", beta)

    def _take_router_loss(self) -> float | None:
        """Take this micro-batch's router loss (mixture of experts), times TRL's weight; None if there is none."""
        noted = self._metrics[self._mode()].pop("aux_loss", None)
        return noted[-1] * self.router_aux_loss_coef if noted else None
