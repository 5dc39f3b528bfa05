"""A fleet in one process, for studies: real inner loops, the outer step's arithmetic, no bucket and no clock.

    script(t) ─▶ turns at θ_t ─┬─▶ replica 0: h inner steps ─▶ Δ₀ ─┐
                               ├─▶ replica 1: h inner steps ─▶ Δ₁ ─┼─▶ ḡ = (Σ wΔ)/(Σ w) ─▶ m ← μ·m + ḡ
                               └─▶ …  lost, or counted later                              θ ← θ − lr·(ḡ + μ·m)

    w by h and age: rendezvous/agreement/rules.py      the step: diloco/outer/optimizer.py

Replicas take turns, each in a thread of its own, because `InnerLoop.train` returns once; only one runs at a time.  With
a real fleet's seeds it takes the same steps, bit for bit, with late work and replaced sessions
(tests/house/test_studies.py).

Not promised: sampling noise of real fleets: replicas here draw from one generator, in turns.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor

from diloco.outer.flat import trainable_parameters
from diloco.outer.optimizer import nesterov
from inner import InnerLoop
from rendezvous.agreement.rules import Rules, with_weights
from rendezvous.layout import slot_name
from rendezvous.means.bodies import total_weight
from rendezvous.means.sums import accumulate, divide_by_weight
from rendezvous.records.records import Listed

OuterRate = Callable[[Tensor, Sequence[Tensor]], float]  # (ḡ, [Δ₀ …]) -> this outer step's learning rate
Outer = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]  # (θ, ḡ, [Δ₀ …]): step θ in place -> the θ to be valued


@dataclass(frozen=True)
class Turn:
    """One machine takes h inner steps from θ_t.   counts: the outer step that lists them; None: they are lost.

    session: 1 for the machine's first; for each new number, a new loop with an empty Adam takes the turn.
    """

    machine: int
    h: int
    counts: int | None
    session: int = 1


Build = Callable[[int, int, int], InnerLoop]  # (machine, session, inner steps that are counted so far) -> its loop
Script = Callable[[int], Sequence[Turn]]  # outer step -> the turns that begin at its θ


class Replica:
    """One replica.   loop: has its own model."""

    def __init__(self, loop: InnerLoop) -> None:
        self.loop = loop
        self._left, self._ended, self._over = 0, False, False
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def inner_steps(self, theta: Tensor, h: int) -> Tensor:
        """Take h inner steps from θ. Return Δ = θ − the new weights."""
        put(self.loop, theta)
        self._left = h
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
        self._left -= 1
        if self._left == 0:
            self._theirs.release()
            self._mine.acquire()
        return self._ended


def outer_steps(loops: Sequence[InnerLoop], *, every: int, rate: OuterRate, mu: float) -> Generator[Tensor]:
    """θ after each outer step of equal machines that all take part, without end.   The first loop's weights are θ₀."""
    script = lambda t: [Turn(machine, every, t) for machine in range(len(loops))]  # noqa: E731
    build = lambda machine, session, start: loops[machine]  # noqa: E731
    return scripted_steps(flat(loops[0]), build, script, rules=Rules(sync_every=every), outer=with_nesterov(rate, mu))


def with_nesterov(rate: OuterRate, mu: float) -> Outer:
    """Return the product's outer step, which keeps its momentum."""
    kept: list[Tensor] = []

    def step(theta: Tensor, mean: Tensor, deltas: Sequence[Tensor]) -> Tensor:
        momentum = kept[0] if kept else torch.zeros_like(theta)
        kept[:] = [momentum]
        nesterov(theta, momentum, mean, lr=rate(mean, deltas), mu=mu)
        return theta

    return step


def scripted_steps(theta: Tensor, build: Build, script: Script, *, rules: Rules, outer: Outer) -> Generator[Tensor]:
    """Yield θ after each outer step of a fleet with a script of turns, for ever.   theta: θ₀, stepped in place."""
    valued = theta
    replicas: dict[int, tuple[int, Replica]] = {}
    counted: dict[int, int] = defaultdict(int)
    offers: dict[int, list[tuple[Listed, Tensor]]] = defaultdict(list)
    try:
        for t in count():
            for turn in script(t):
                if turn.counts is not None:
                    replica = _session(replicas, turn, build, counted[turn.machine])
                    delta = replica.inner_steps(theta, turn.h)
                    offers[turn.counts].append((_listed(turn, t), delta))
                    counted[turn.machine] += turn.h
            if listed := sorted(offers.pop(t, []), key=lambda one: (t - one[0].step, one[0].slot)):
                mean = weighted_mean(with_weights([o for o, _ in listed], t, rules), [d for _, d in listed])
                valued = outer(theta, mean, [d for _, d in listed])
            yield valued
    finally:
        for _, replica in replicas.values():
            replica.end()


def _session(replicas: dict[int, tuple[int, Replica]], turn: Turn, build: Build, start: int) -> Replica:
    """Return the machine's replica; a new replica for a new session."""
    known = replicas.get(turn.machine)
    if known is not None and known[0] == turn.session:
        return known[1]
    if known is not None:
        known[1].end()
    replicas[turn.machine] = turn.session, Replica(build(turn.machine, turn.session, start))
    return replicas[turn.machine][1]


def _listed(turn: Turn, t: int) -> Listed:
    slot = slot_name(turn.machine)
    return Listed(t, slot, turn.session, "n", f"{slot}.{t}", 0, "d", turn.h, 1.0)


def weighted_mean(offers: Sequence[Listed], deltas: Sequence[Tensor]) -> Tensor:
    """Return a commit's mean, by the arithmetic of its readers."""
    total = np.empty(deltas[0].numel(), np.float32)
    for offer, delta in zip(offers, deltas, strict=True):
        accumulate(total, delta.numpy(), offer.weight, first=offer is offers[0])
    divide_by_weight(total, total_weight(offers))
    return torch.from_numpy(total)


@torch.no_grad()
def flat(loop: InnerLoop) -> Tensor:
    """Return the trainable parameters as one fp32 vector on the host, in the model's order."""
    return torch.cat([p.detach().reshape(-1).float() for _, p in trainable_parameters(loop.model)]).cpu()


@torch.no_grad()
def put(loop: InnerLoop, theta: Tensor) -> None:
    at = 0
    for _, p in trainable_parameters(loop.model):
        p.copy_(theta[at : at + p.numel()].view(p.shape))
        at += p.numel()
