"""One simulated life: the engine unchanged, a θ of a few numbers, and the loop that a trainer would write.

claim ─ beat (a greenlet of its own) ─ boot ─ join ─▶ h inner steps ─ offer ─ settle ─ mean ─ apply ─ advance ─▶ …
                                            │          └── τ > 0: in a greenlet of its own, ──┘
                                            │                while τ inner steps go on
                                            └─ behind or leaving: offer what there is, catch up or go

Not promised: that these inner steps learn anything; they are noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet
from xxhash import xxh3_128_hexdigest as xxh3

from rendezvous import layout
from rendezvous.background import in_turn
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import ChainBroken, Corrupt, Forged, Leaving, RecordsLost, RendezvousError, Terminal
from rendezvous.keeping.garbage import Collected
from rendezvous.records.records import Commit, WireError
from tests.sim.codecs import Kept, Sent
from tests.support.fakes import Foreign
from tests.support.ticking import tick_until

if TYPE_CHECKING:
    from tests.sim.simulate import World

LOUD = (Corrupt, RendezvousError, WireError, ChainBroken, Forged, RecordsLost)  # and then the operator acts
LR, MU = np.float32(0.7), np.float32(0.9)
FLIPS = 0  # the fragment that bad memory hits; work on the others is not derived from it, and may be offered


@dataclass(eq=False)
class Process:
    """One life: a main greenlet, its heartbeat, and what the observer knows about it."""

    id: int
    slot: str
    born: float
    speed: float = 1.0
    skew: float = 0.0
    drift: float = 1.0  # its seconds per second
    dead: bool = False  # no store call of it has any effect any more
    asleep_until: float = 0.0
    hangs_until: float = 0.0  # a request of its work, not of its heartbeat, is slow
    trainer_hangs: bool = False  # its inner step never ends; its beat and what is in flight go on
    ended: str = ""  # why it ended by itself
    strays: bool = False  # it has asked a store that is not the run's (tests/sim/places.py)
    tainted: bool = False  # a bit of its θ or momentum was flipped
    work: bytes = b""  # its newest pseudogradient, and the θ that it started from
    theta: bytes = b""
    tainted_work: bool = False  # made when θ was tainted
    inherited: dict[int, Kept] = field(default_factory=dict)  # fragment -> what the codec of the life before kept
    sent: dict[int, Sent] = field(default_factory=dict)  # fragment -> its newest body
    scan: float = 0.0  # when it last began to look for offers
    deciding: int = -1  # the step whose commit it writes next, for all it has seen
    rv: Rendezvous | None = None
    tasks: list[greenlet] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return self.dead or bool(self.ended)


class SimState:
    """θ and momentum of a few numbers; Nesterov in separately rounded operations; a zero mean moves nothing."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world, self._process = world, process
        sizes = world.plan.sizes[: world.plan.rules.fragments]
        # a fresh replica comes with its own θ: only what the bucket says may survive the join
        self.theta = [np.full(n, 1 + process.id, np.float32) for n in sizes]
        self.momentum = [np.zeros(n, np.float32) for n in sizes]

    def digest(self) -> str:
        """For the observer; the engine takes its own."""
        return digest_of(self.theta, self.momentum)

    def size(self, fragment: int) -> int:
        return len(self.theta[fragment])

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        self._world.observer.averaged(self._process, mean)
        if mean.any():
            m, look = self.momentum[fragment], np.empty_like(mean)
            np.multiply(m, MU, out=m)
            np.add(m, mean, out=m)
            np.multiply(m, MU, out=look)
            np.add(mean, look, out=look)
            np.multiply(look, LR, out=look)
            np.subtract(self.theta[fragment], look, out=self.theta[fragment])
        else:
            self._world.fired["empty round"] += 1
        poison(self._world, mean)
        self.maybe_flip()

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        f = fragment
        return {f"theta.{f}": self.theta[f], f"momentum.{f}": self.momentum[f]}

    def load(self, arrays: Any) -> None:
        for i in range(len(self.theta)):
            self.theta[i], self.momentum[i] = arrays[f"theta.{i}"].copy(), arrays[f"momentum.{i}"].copy()
        self._process.tainted = False

    def maybe_flip(self) -> None:
        """Bad memory: another pattern every time, so that no two replicas agree on it."""
        w, p = self._world, self._process
        if w.plan.flip and not p.tainted and w.now < w.plan.calm and w.rng.random() < w.plan.flip:
            w.rng.choice((self.theta, self.momentum))[FLIPS].view(np.int32)[0] ^= w.rng.randrange(1, 1 << 22)
            p.tainted = True
            w.fired["bit flip in memory"] += 1


def poison(world: "World", buffer: np.ndarray) -> None:
    """The trainer writes other things here before any reader looks: a reader that needs the values has copied them."""
    if world.plan.poison:
        world.fired["buffer poisoned"] += 1
        buffer.fill(np.nan)


def digest_of(theta: list[np.ndarray], momentum: list[np.ndarray]) -> str:
    """`base`, in our own words: the digest of the fragments' digests, each of which is of its arrays' digests."""
    each = [of_text(*(xxh3(array.tobytes()) for array in pair)) for pair in zip(theta, momentum, strict=True)]
    return of_text(*each)


def of_text(*digests: str) -> str:
    return xxh3("".join(digests).encode())


def observed(rv: Rendezvous, world: "World", process: Process) -> Rendezvous:
    """The engine unchanged; the observer is told when a look for offers begins, and the last one before a commit."""
    closer: Any = rv._committer
    chain: Any = rv.chain
    look, attempt, refuse_gap = closer._fresh_offers, closer.try_to_commit, chain.refuse_gap

    def seen(wishes: Any) -> Any:
        process.scan = world.now
        return look(wishes)

    def attempting(*args: Any) -> str:
        try:
            return attempt(*args)
        finally:
            process.deciding = -1

    def last_look(step: int) -> None:
        process.deciding = step
        refuse_gap(step)

    closer._fresh_offers, closer.try_to_commit, chain.refuse_gap = seen, attempting, last_look
    return rv


class Flight:
    """Work of a process in a greenlet of its own; who needs its result waits for it to land."""

    def __init__(self, world: "World", process: Process, work: Callable[[], Any]) -> None:
        self._world, self._process, self._work = world, process, work
        self.done, self._error, self._waiter = False, None, None
        world.spawn(process, self._run)

    def _run(self) -> None:
        try:
            self._result = self._work()
        except (RendezvousError, Foreign) as error:
            self._error = error
        self.done = True
        if self._waiter is not None:
            self._world.at(self._world.now, self._waiter, self._process)

    def land(self) -> Any:
        if not self.done:
            self._world.fired["waits for a greenlet"] += 1
            self._waiter = getcurrent()
            self._world.park()
        if self._error is not None:
            raise self._error
        return self._result


def together(world: "World", process: Process) -> Callable[..., None]:
    """`rendezvous.background.at_once`, with greenlets for threads."""

    def at_once(*jobs: Callable[[], None]) -> None:
        errors: list[Exception] = []
        for flight in [Flight(world, process, job) for job in jobs]:
            try:
                flight.land()
            except (RendezvousError, Foreign) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return at_once


class SimBackground:
    """`rendezvous.background.Worker` as a greenlet: jobs in order, one at a time."""

    def __init__(self, world: "World", process: Process) -> None:
        self._world, self._process = world, process
        self._last: Flight | None = None

    def submit(self, job: Callable[[], None]) -> None:
        before = self._last
        if before is not None:
            self._world.fired["background job waits"] += not before.done
            before.land()
        self._world.fired["background job"] += 1
        self._last = Flight(self._world, self._process, partial(self._do, job))

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Foreign:
            self._world.fired["told: a background job failed"] += 1

    def drain(self) -> None:
        if self._last is not None:
            self._last.land()


class Replica:
    """The loop of a life, as a trainer would write it."""

    def __init__(self, world: "World", process: Process) -> None:
        self.w, self.p, self.rules, self.tau = world, process, world.plan.rules, world.plan.tau
        store, self.clock = world.store(process), world.clock(process)
        rv = Rendezvous(
            store, self.clock, process.slot, self.rules, world.plan.timing, emit=self._tell, pid=process.id,
            keep=world.plan.keep, background=SimBackground(world, process),
            uploads=SimBackground(world, process),
            together=together(world, process) if world.plan.far else in_turn,
        )  # fmt: skip
        self.rv = process.rv = observed(rv, world, process)

    def _tell(self, event: str, **fields: object) -> None:
        self.w.fired[f"told: {event}"] += 1
        if event == "inherited":
            self.w.observer.inherits(self.p, self.rv.generation - 1)
        elif event == "bad_blob":
            self.w.fleet.complaint(str(fields["trouble"]).split()[0])

    def live(self) -> None:
        """A whole life: from the claim to the goodbye, or to any other end."""
        try:
            self._until_asked_to_go()
        except Terminal as error:
            self.p.ended = type(error).__name__
            if isinstance(error, Collected):
                self.w.fleet.loud(self.p, error)
        except RendezvousError as error:
            if type(error) not in LOUD:
                raise
            self.p.ended = type(error).__name__
            self.w.fleet.loud(self.p, error)
        except Foreign:
            self.p.ended = "of a foreign exception"

    def _until_asked_to_go(self) -> None:
        try:
            self._live()
        except Leaving:
            self.rv.finish("leaving")
            self.p.ended = "left"

    def _live(self) -> None:
        if self._finds_no_run():
            return
        self.rv.claim()
        if self._finds_no_run():
            return
        self.w.spawn(self.p, lambda: tick_until(self.rv.members, lambda: self.p.gone))
        self.clock.sleep(self.w.rng.choice((0.5, 3.0)))
        self._train()
        self.rv.finish("done" if self.rv.is_done else "leaving")
        if self.rv.is_done and self.w.places is not None:
            self.w.places.refuse_done(self.p)
        self.p.ended = "finished"

    def _finds_no_run(self) -> bool:
        """A real replica reads run.json before it claims, and the start model's manifest after."""
        away = self.w.places is not None and self.w.places.befalls(self.p)
        self.p.ended = "finds no run" if away else ""
        return away

    def _train(self) -> None:
        self.state = SimState(self.w, self.p)
        self.rv.join(self.state)
        self.local = [x.copy() for x in self.state.theta]
        self.deltas = [np.empty_like(x) for x in self.state.theta]  # used again in every step, for Δ and the mean
        self.h = [0] * self.rules.fragments
        self.generations = self._recorded()
        while not self.rv.is_done and not self.rv.is_leaving:
            self._outer_step()

    def _recorded(self) -> Any:
        """Return this life's recorded rollouts; None: it has none."""
        if self.w.plan.acting is None:
            return None
        from tests.sim.acting import Generations

        return Generations(self.w, self)

    def _outer_step(self) -> None:
        rv, f = self.rv, self.rv.fragment
        self.w.observer.trains(self.p, self.state)
        self._inner_steps(max(1, min(rv.h_cap, self.rules.sync_every) // self.rules.fragments - self.tau))
        if rv.is_behind:
            self._catch_up()
            return
        landed = self._round(f, self._delta(f), self.h[f])
        if landed is not None:
            commit, mean = landed
            self.state.apply(f, mean)
            rv.advance(commit)
            self._restart(f)
            self._catch_up()  # as the product does, before it goes on

    def _round(self, f: int, delta: np.ndarray, h: int) -> tuple[Commit, np.ndarray] | None:
        """Offer, settle, mean; with τ beside inner steps that nothing interrupts."""
        if self.tau == 0 or self.rv.is_leaving:
            return self._exchange(f, delta, h)
        self.w.fired["round in flight"] += 1
        flight = Flight(self.w, self.p, lambda: self._exchange(f, delta, h))
        self._inner_steps(self.tau, free=False)
        return flight.land()

    def _exchange(self, f: int, delta: np.ndarray, h: int) -> tuple[Commit, np.ndarray] | None:
        if h:
            self._offer(f, delta, h)
        if self.rv.is_leaving:
            return None
        commit = self.rv.settle()
        self.rv.mean(commit, delta)  # in the memory that the pseudogradient was in
        return commit, delta

    def _offer(self, f: int, delta: np.ndarray, h: int) -> None:
        self.rv.offer(delta, h, theta=self.state.theta[f])
        poison(self.w, delta)

    def _inner_steps(self, count: int, free: bool = True) -> None:
        """free: may stop for a commit that was made without us, or to leave."""
        rv, status, rate = self.rv, self.rv.members.status, self.p.speed
        learns = np.float32(self.w.rng.random() >= self.w.plan.zeros)
        for _ in range(count):
            if free and (rv.is_behind or rv.is_leaving):
                return
            while layout.slot_index(self.p.slot) in self.w.plan.hung and self.w.now > 15:
                self.w.fired["hung trainer"] += 1
                self.p.trainer_hangs = True
                self.clock.sleep(5.0)
            if self.generations is not None:
                self.generations.before_inner_step()
            self.clock.sleep(rate)
            self.state.maybe_flip()
            for i, x in enumerate(self.local):
                np.subtract(x, self.w.noise.standard_normal(len(x)).astype(np.float32) * learns, out=x)
                self.h[i] += 1
            status.inner, status.rate = status.inner + 1, rate
            if self.generations is not None:
                self.generations.after_inner_step()

    def _catch_up(self) -> None:
        self._caught: set[int] = set()
        self.rv.catch_up(late=self._offer_late)
        for f in sorted(self._caught):
            self._restart(f)

    def _offer_late(self, step: int) -> None:
        f = step % self.rules.fragments
        if self.h[f]:
            self._offer(f, self._delta(f), self.h[f])
        self.h[f] = 0
        self._caught.add(f)

    def _delta(self, f: int) -> np.ndarray:
        delta = np.subtract(self.state.theta[f], self.local[f], out=self.deltas[f])
        self.p.tainted = self.p.tainted and not self.w.observer.agrees(self.rv.step, self.state)
        self.p.work, self.p.tainted_work = delta.tobytes(), self.p.tainted and f == FLIPS
        self.p.theta = self.state.theta[f].tobytes()
        return delta

    def _restart(self, f: int) -> None:
        self.local[f][:] = self.state.theta[f]
        self.h[f] = 0
