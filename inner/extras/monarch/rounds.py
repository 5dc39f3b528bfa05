"""A round of H inner steps, as a function of state that survives the death of the process that computes it.

    (t, θ_t, carried, n) ── H inner steps ──▶ Round(θ, carried, numbers)

    inner step s = t·H + i    its prompts       a function of (seeds, s)                           inner/data/order.py
                              its random state  seeded from (seeds.noise, s) before the first random number
                              its optimizer     moments from `carried` of the last round
                              its rate          inner.schedule at t, with n replicas in the newest outer step

So another process with the same inputs ends the round with the same bits.  A process that has just ended round
t − 1 needs only θ_t and n, because it still has the carried state.

    run ─order─▶ │ loop.train(stop) in a thread: step … step, stop() ─▶ waits │ ─Round─▶

Not promised: equal bits on another kind of CPU; state in the user's own code (an environment with a memory).
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import TrainerCallback, set_seed

from inner.channels.teacher import trained_parameters
from inner.errors import InnerError
from inner.settings.inner import Files, InnerConfig, InnerLoop, Seeds
from inner.train.build import build_inner

Weights = dict[str, Tensor]  # the trained parameters by name, on the CPU


@dataclass(frozen=True)
class Carried:
    """State that goes from one round to the next, besides θ.

    moments: the optimizer's state, one dict per trained parameter, in the model's order.
    """

    moments: list[dict[str, Any]]


@dataclass(frozen=True)
class Round:
    """Result of round `t`."""

    t: int
    weights: Weights
    carried: Carried
    numbers: dict[str, float]


@dataclass(frozen=True)
class _Order:
    t: int
    weights: Weights
    carried: Carried | None
    replicas: int


@dataclass(eq=False)
class RoundTrainer:
    """Computes rounds, one after the other: run(t, θ_t, replicas=n) -> Round.

    steps: H.   fit: called with each new loop before it trains, to replace parts of it.
    Raises InnerError for a config whose rounds depend on more than their inputs."""

    config: InnerConfig
    model_dir: Path
    files: Files
    seeds: Seeds
    steps: int
    fit: Callable[[InnerLoop], None] = lambda loop: None

    def __post_init__(self) -> None:
        refuse_unrepeatable(self.config, self.steps)
        self._session: _Session | None = None
        self._ended: Round | None = None

    def run(self, t: int, weights: Weights, carried: Carried | None = None, *, replicas: int = 1) -> Round:
        """Take H inner steps from θ_t.

        weights: θ_t of every trained parameter.   carried: state of round t − 1; None: this trainer's own state, empty
        before its first round.   replicas: how many pseudogradients the newest outer step averaged; the learning rate
        depends on it (inner.schedule.lr_replicas).   Errors of the loop are raised as they are."""
        if self._session is None or self._ended is None or t != self._ended.t + 1:
            carried = carried or (self._ended.carried if self._ended else None)
            self._open(t)
        assert self._session is not None
        try:
            self._ended = self._session.run(_Order(t, weights, carried, replicas=replicas))
        except BaseException:
            self._session, self._ended = None, None
            raise
        return self._ended

    def close(self) -> None:
        """End the loop."""
        if self._session is not None:
            self._session.close()
        self._session = None

    def _open(self, t: int) -> None:
        """Open a loop that begins at round t, on a new model: a second trainer on one model would wrap its forward
        again."""
        self.close()
        seeds = replace(self.seeds, start=t * self.steps)
        loop = build_inner(self.config, self.model_dir, self.files, seeds)
        self.fit(loop)
        self._session = _Session(loop, self.seeds.noise, self.steps)


class _Session:
    """One loop in a thread, which waits between two rounds."""

    def __init__(self, loop: InnerLoop, noise: int, steps: int) -> None:
        self._loop: Any = loop
        self._noise = noise
        self._steps = steps
        self._done = 0  # inner steps of this round
        self._t = 0
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._answers: SimpleQueue[Round | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._train, name="rounds", daemon=True)
        self._thread.start()

    def run(self, order: _Order) -> Round:
        self._orders.put(order)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self._orders.put(None)
        self._thread.join()

    # methods that the thread runs

    def _train(self) -> None:
        try:
            if self._begin_round():
                if (trainer := getattr(self._loop, "trainer", None)) is not None:
                    trainer.add_callback(_BeforeEachStep(self._seed_step))
                self._loop.train(self._stop)
        except BaseException as error:
            self._answers.put(error)

    def _stop(self) -> bool:
        """Seed the next inner step, or end the round; return whether the loop stops. Called after every inner step."""
        self._done += 1
        if self._done < self._steps:
            self._seed_step()
            return False
        model, optimizer = self._loop.model, self._loop.optimizer
        carried = Carried([_copied(optimizer.state.get(p, {})) for p in trained_parameters(model).values()])
        self._answers.put(Round(self._t, read_weights(model), carried, self._loop.pop_metrics()))
        return not self._begin_round()

    def _begin_round(self) -> bool:
        """Wait for the next order, and set weights, moments and step from it.  False: the loop should end."""
        order = self._orders.get()
        if order is None:
            return False
        self._t = order.t
        self._done = 0
        write_weights(self._loop.model, order.weights)
        if order.carried is not None:
            write_moments(self._loop.optimizer, self._loop.model, order.carried.moments)
        self._loop.follow(lambda: order.t, order.weights.items, lambda: order.replicas)
        self._seed_step()
        return True

    def _seed_step(self) -> None:
        step = self._t * self._steps + self._done
        set_seed(int(np.random.SeedSequence([self._noise, step]).generate_state(1)[0]))


class _BeforeEachStep(TrainerCallback):
    """Seed each step again, because a new trainer draws random numbers before its first step (a data loader's seed)."""

    def __init__(self, seed_step: Callable[[], None]) -> None:
        self._seed_step = seed_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._seed_step()


def refuse_unrepeatable(config: InnerConfig, steps: int) -> None:
    """Raise InnerError if a round of `steps` inner steps is not a function of (t, θ_t, carried)."""
    if steps < 1 or steps % config.boundary:
        raise InnerError(
            f"a round of {steps} inner steps would end inside a generation, and each generation serves "
            f"{config.boundary} inner steps. Make H a multiple of {config.boundary}."
        )
    if config.sdpo.is_used and config.sdpo.teacher == "ema":
        raise InnerError(
            'inner.sdpo.teacher = "ema" is an average over a whole session, which a new process does not have. Use '
            '"round", which follows the outer step.'
        )


# ---------------------------------------------------------------- trained parameters and their moments


def read_weights(model: nn.Module) -> Weights:
    """Return a copy of the trained parameters, on the CPU."""
    return {name: p.detach().to("cpu", copy=True) for name, p in trained_parameters(model).items()}


@torch.no_grad()
def write_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights into the model.   Raises InnerError if they do not belong to this model."""
    mine = trained_parameters(model)
    if wrong := sorted(set(mine) ^ set(weights)):
        raise InnerError(
            f"these weights are not of this model: {wrong[0]!r} is in only one of the two. Give the weights of every "
            "trained parameter, of the model that the run began with."
        )
    for name, p in mine.items():
        p.copy_(weights[name])


def write_moments(optimizer: Optimizer, model: nn.Module, moments: list[dict[str, Any]]) -> None:
    """Give each trained parameter the optimizer state at its position in the list."""
    parameters = list(trained_parameters(model).values())
    if len(parameters) != len(moments):
        raise InnerError(
            f"the optimizer state has {len(moments)} parameters, and this model trains {len(parameters)}. Give the "
            "state that belongs to this model."
        )
    for p, state in zip(parameters, moments, strict=True):
        if state:
            optimizer.state[p] = {kind: _placed(value, p) for kind, value in state.items()}


def _placed(value: Any, like: Tensor) -> Any:
    """Copy a moment to its parameter's device; a count of steps (a scalar) stays on the CPU."""
    if not isinstance(value, Tensor):
        return value
    return value.to(like.device, copy=True) if value.ndim else value.clone()


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {kind: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for kind, v in state.items()}
