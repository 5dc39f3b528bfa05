"""One simulated life: the engine unchanged, a θ of a few numbers, and the loop that a trainer would write.

claim ─ beat (a greenlet of its own) ─ boot ─ join ─▶ h inner steps ─ offer ─ settle ─ mean ─ apply ─ advance ─▶ …
                                                           └─ behind or leaving: offer what there is, catch up or go
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from greenlet import greenlet

from rendezvous import layout
from rendezvous.errors import Leaving, Terminal
from rendezvous.rendezvous import Rendezvous

if TYPE_CHECKING:
    from tests.sim import World

SIZES = (5, 3, 4)  # elements of fragment 0, 1, 2
LR, MU = np.float32(0.7), np.float32(0.9)


@dataclass(eq=False)
class Process:
    """One life: a main greenlet, its heartbeat, and what the observer knows about it."""

    id: int
    slot: str
    born: float
    speed: float = 1.0
    skew: float = 0.0
    dead: bool = False  # no store call of it has any effect any more
    asleep_until: float = 0.0
    ended: str = ""  # why it ended by itself
    tainted: bool = False  # a bit of its θ or momentum was flipped
    work: bytes = b""  # its newest pseudogradient
    scan: float = 0.0  # when it last began to look for offers
    rv: Rendezvous | None = None
    tasks: list[greenlet] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return self.dead or bool(self.ended)


class SimState:
    """θ and momentum of a few numbers; Nesterov in separately rounded operations."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world, self._process = world, process
        sizes = SIZES[: world.plan.rules.fragments]
        # a fresh replica comes with its own θ: only what the bucket says may survive the join
        self.theta = [np.full(n, 1 + process.id, np.float32) for n in sizes]
        self.momentum = [np.zeros(n, np.float32) for n in sizes]

    def digest(self) -> str:
        return digest_of(self.theta, self.momentum)

    def size(self, fragment: int) -> int:
        return len(self.theta[fragment])

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        m, look = self.momentum[fragment], np.empty_like(mean)
        np.multiply(m, MU, out=m)
        np.add(m, mean, out=m)
        np.multiply(m, MU, out=look)
        np.add(mean, look, out=look)
        np.multiply(look, LR, out=look)
        np.subtract(self.theta[fragment], look, out=self.theta[fragment])
        self.maybe_flip()

    def arrays(self) -> dict[str, np.ndarray]:
        named = {f"theta.{i}": x for i, x in enumerate(self.theta)}
        return named | {f"momentum.{i}": x for i, x in enumerate(self.momentum)}

    def load(self, arrays: Any) -> None:
        for i in range(len(self.theta)):
            self.theta[i], self.momentum[i] = arrays[f"theta.{i}"].copy(), arrays[f"momentum.{i}"].copy()
        self._process.tainted = False

    def maybe_flip(self) -> None:
        """Bad memory: another pattern every time, so that no two replicas agree on it."""
        w, p = self._world, self._process
        if w.plan.flip and not p.tainted and w.now < w.plan.calm and w.rng.random() < w.plan.flip:
            w.rng.choice((self.theta, self.momentum))[0].view(np.int32)[0] ^= w.rng.randrange(1, 1 << 22)
            p.tainted = True


def digest_of(theta: list[np.ndarray], momentum: list[np.ndarray]) -> str:
    h = xxhash.xxh3_128()
    for x in (*theta, *momentum):
        h.update(x.tobytes())
    return h.hexdigest()


def observed(rv: Rendezvous, world: "World", process: Process) -> Rendezvous:
    """The engine unchanged; the observer is told when a look for offers begins."""
    closer: Any = rv._closer
    look = closer._fresh

    def seen(wishes: Any) -> Any:
        process.scan = world.now
        return look(wishes)

    closer._fresh = seen
    return rv


class Replica:
    """The loop of a life, as a trainer would write it."""

    def __init__(self, world: "World", process: Process) -> None:
        self.w, self.p, self.rules = world, process, world.plan.rules
        store, self.clock = world.store(process), world.clock(process)
        rv = Rendezvous(store, self.clock, process.slot, self.rules, world.plan.timing, pid=process.id)
        self.rv = process.rv = observed(rv, world, process)

    def live(self) -> None:
        """A whole life: from the claim to the goodbye, or to whatever ends it."""
        try:
            self.rv.claim()
            self.w.spawn(self.p, lambda: self.rv.members.run(lambda: self.p.gone))
            self.clock.sleep(self.w.rng.choice((0.5, 3.0)))
            self._train()
            self.rv.finish("done" if self.rv.done else "leaving")
            self.p.ended = "finished"
        except Leaving:
            self.rv.finish("leaving")
            self.p.ended = "left"
        except Terminal as error:
            self.p.ended = type(error).__name__

    def _train(self) -> None:
        self.state = SimState(self.w, self.p)
        self.rv.join(self.state)
        self.local = [x.copy() for x in self.state.theta]
        self.h = [0] * self.rules.fragments
        while not self.rv.done and not self.rv.leaving:
            self._outer_step()

    def _outer_step(self) -> None:
        rv, f = self.rv, self.rv.fragment
        self.w.observer.trains(self.p, self.state)
        self._inner_steps()
        if rv.behind:
            self._catch_up()
            return
        if self.h[f]:
            rv.offer(self._delta(f), self.h[f])
        if rv.leaving:
            return
        commit = rv.settle()
        mean = np.empty(self.state.size(f), np.float32)
        rv.mean(commit, mean)
        self.state.apply(f, mean)
        rv.advance(commit)
        self._restart(f)

    def _inner_steps(self) -> None:
        rv, status, rate = self.rv, self.rv.members.status, self.p.speed
        learns = np.float32(self.w.rng.random() >= self.w.plan.zeros)
        for _ in range(max(1, min(rv.h_cap, self.rules.sync_every) // self.rules.fragments)):
            if rv.behind or rv.leaving:
                return
            while layout.slot_index(self.p.slot) in self.w.plan.hung and self.w.now > 15:
                self.clock.sleep(5.0)
            self.clock.sleep(rate)
            self.state.maybe_flip()
            for i, x in enumerate(self.local):
                np.subtract(x, self.w.noise.standard_normal(len(x)).astype(np.float32) * learns, out=x)
                self.h[i] += 1
            status.inner, status.rate = status.inner + 1, rate

    def _catch_up(self) -> None:
        self._caught: set[int] = set()
        self.rv.catch_up(late=self._offer_late)
        for f in sorted(self._caught):
            self._restart(f)

    def _offer_late(self, step: int) -> None:
        f = step % self.rules.fragments
        if self.h[f]:
            self.rv.offer(self._delta(f), self.h[f])
        self.h[f] = 0
        self._caught.add(f)

    def _delta(self, f: int) -> np.ndarray:
        delta = self.state.theta[f] - self.local[f]
        self.p.work = delta.tobytes()
        return delta

    def _restart(self, f: int) -> None:
        self.local[f] = self.state.theta[f].copy()
        self.h[f] = 0
