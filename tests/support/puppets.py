"""A run whose replicas are puppets: a real bucket, model and engine in one thread, with pseudogradients by the test.

    run = PuppetRun(tmp_path, replicas=3, fleet={"keep": "all"})
    run.round()                          all offer what `run.delta(slot, step)` says, and take the step
    run.round("r00", "r01"); run.catch_up("r02")    r02 is late; its work is credited in the next round

Milliseconds per outer step, and the same bits every time.  Time is that of a clock that the test turns.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diloco.model.export import empty_state, start_arrays
from diloco.outer.optimizer import OuterState
from diloco.run.record import Run, read_run
from rendezvous.agreement.rules import Timing
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.records.records import Commit
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet

TIMING = Timing(poll=0.1, beat=0.5, dead_after=2.0, start_patience=1.0, give_up=20.0, store_patience=10.0)
Delta = Callable[[str, int, OuterState], np.ndarray]


def toward(goal: np.ndarray, noise: float = 0.3) -> Delta:
    """Pseudogradients to a goal, with a replica's own noise: alike, and no two the same."""

    def delta(slot: str, step: int, state: OuterState) -> np.ndarray:
        fragment = step % len(state.thetas)
        starts = np.cumsum([0, *(theta.numel() for theta in state.thetas)])
        aim = goal[starts[fragment] : starts[fragment + 1]]
        wobble = np.random.default_rng([int(slot[1:]), step]).standard_normal(aim.size).astype(np.float32)
        return (-aim + noise * np.abs(aim).mean() * wobble).astype(np.float32)

    return delta


class Puppet:
    """One replica, step by step."""

    def __init__(self, run: Run, state: OuterState, clock: ManualClock, slot: str) -> None:
        self.rv = Rendezvous(run.store, clock, slot, run.config.outer.rules, TIMING, host="here")
        self.rv.claim()
        self.state = state
        self.rv.join(state)

    def step(self) -> Commit:
        commit = self.rv.settle()
        mean = np.empty(self.state.size(self.rv.fragment), np.float32)
        self.rv.mean(commit, mean)
        self.state.apply(self.rv.fragment, mean)
        self.rv.advance(commit)
        return commit


class PuppetRun:
    """delta(slot, step, state): what a replica offers; by default all go to one random goal."""

    def __init__(self, folder: Path, replicas: int = 3, delta: Delta | None = None, **changes: Any) -> None:
        changes = {**changes, "fleet": {"replicas": replicas, "steps": 100, **changes.get("fleet", {})}}
        self.fleet = Fleet(folder, **changes)
        self.url = self.fleet.url
        self.clock = ManualClock()
        self.run = read_run(self.url)
        self.puppets: dict[str, Puppet] = {}
        for i in range(replicas):
            self.puppets[f"r{i:02d}"] = self.add(f"r{i:02d}")
        elements = sum(theta.numel() for theta in self.puppets["r00"].state.thetas)
        self.goal = 0.01 * np.random.default_rng(7).standard_normal(elements).astype(np.float32)
        self.delta = delta or toward(self.goal)

    @property
    def folder(self) -> Path:
        return self.fleet.folder / "run"

    def add(self, slot: str) -> Puppet:
        state = empty_state(self.fleet.model, self.run.config.outer)
        state.load({**state.all_arrays(), **start_arrays(self.run, self.fleet.model)})
        return Puppet(self.run, state, self.clock, slot)

    def offer(self, *slots: str, h: int = 4) -> None:
        for slot in slots:
            puppet = self.puppets[slot]
            self.clock.sleep(0.2)
            puppet.rv.offer(self.delta(slot, puppet.rv.step, puppet.state), h, samples=4.0 * h, stats={"loss": 1.0})

    def round(self, *slots: str) -> Commit:
        """Offers of these (default: of all), and the step."""
        slots = slots or tuple(self.puppets)
        self.offer(*slots)
        return [self.puppets[slot].step() for slot in slots][-1]

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def catch_up(self, slot: str, h: int = 2) -> None:
        """The slot hears of the steps that were decided without it, and offers what it has late."""
        puppet = self.puppets[slot]
        puppet.rv.members.tick()

        def late(t: int) -> None:
            puppet.rv.offer(self.delta(slot, t, puppet.state), h, samples=4.0 * h)

        puppet.rv.catch_up(late=late)
