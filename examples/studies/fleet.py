"""A fleet in one process, for studies: real inner loops, the outer step's arithmetic, no bucket and no clock.

    θ_t ─┬─▶ replica 0: H inner steps ─▶ Δ₀ ─┐
         ├─▶ replica 1: H inner steps ─▶ Δ₁ ─┼─▶ ḡ = (Σ Δ) / N ─▶ m ← μ·m + ḡ,  θ ← θ − lr·(ḡ + μ·m) ─▶ θ_t+1
         └─▶ …                                                                      (diloco/optimizer.py)

Replicas take turns, each in a thread of its own, because `InnerLoop.train` returns once; only one runs at a time.  With
the seeds of a real fleet it takes that fleet's steps, bit for bit (tests/test_house_studies.py).

Not promised: sampling noise of real fleets: replicas here draw from one generator, in turns.
"""

import threading
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from diloco.flat import trainable_parameters
from diloco.optimizer import nesterov
from inner import InnerLoop

OuterRate = Callable[[Tensor, Sequence[Tensor]], float]  # (ḡ, [Δ₀ …]) -> this outer step's learning rate


class Replica:
    """loop: with a model of its own.   every: inner steps between two outer steps (H)."""

    def __init__(self, loop: InnerLoop, every: int) -> None:
        self.loop, self._every = loop, every
        self._steps, self._ended, self._over = 0, False, False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def inner_steps(self, theta: Tensor) -> Tensor:
        """H inner steps from θ; -> Δ = θ − what they made of it."""
        put(self.loop, theta)
        self._hand_over()
        return theta - flat(self.loop)

    def end(self) -> None:
        self._ended = True
        if not self._over:
            self._hand_over()
        self._thread.join()

    def _hand_over(self) -> None:
        self._mine.release()
        self._theirs.acquire()
        if self._error is not None:
            raise self._error

    def _train(self) -> None:
        self._mine.acquire()
        try:
            if not self._ended:
                self.loop.train(self._stop)
        except BaseException as error:
            self._error = error
        self._over = True
        self._theirs.release()

    def _stop(self) -> bool:
        self._steps += 1
        if self._steps % self._every == 0:
            self._theirs.release()
            self._mine.acquire()
        return self._ended


def outer_steps(loops: Sequence[InnerLoop], *, every: int, rate: OuterRate, mu: float) -> Generator[Tensor]:
    """θ after each outer step, without end.   The first loop's weights are θ₀."""
    theta = flat(loops[0])
    momentum = torch.zeros_like(theta)
    replicas = [Replica(loop, every) for loop in loops]
    try:
        while True:
            deltas = [replica.inner_steps(theta) for replica in replicas]
            mean = sum(deltas[1:], deltas[0].clone()) / torch.tensor(float(len(deltas)))
            nesterov(theta, momentum, mean, lr=rate(mean, deltas), mu=mu)
            yield theta
    finally:
        for replica in replicas:
            replica.end()


@torch.no_grad()
def flat(loop: InnerLoop) -> Tensor:
    """The trainable parameters as one fp32 vector, in the model's order."""
    return torch.cat([p.detach().reshape(-1).float() for _, p in trainable_parameters(loop.model)])


@torch.no_grad()
def put(loop: InnerLoop, theta: Tensor) -> None:
    at = 0
    for _, p in trainable_parameters(loop.model):
        p.copy_(theta[at : at + p.numel()].view(p.shape))
        at += p.numel()
