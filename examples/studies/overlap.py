"""How much learning does a slow link cost, and how much do fragments, τ and α restore?

    python examples/studies/overlap.py toolworld --to studies    about 45 minutes of one core
    python examples/studies/overlap.py text --to studies         about 10

Four machines, for the time of 120 inner steps. Sending the whole vector takes as long as S = 4 inner steps:

    no-link     H = 6, sends take no time                         120 inner steps
    waits-H     trains H, then waits S                            120 · H / (H + S)
    overlap     H = 6, τ = 4: the vector is sent during the next 4 inner steps     120; α 0 or ½
    stream      H = 6, two fragments, τ = 2: each takes S / 2                           120; α 0 or ½

The replicas are the product's own (`make_diloco` on a store in memory), in threads of one process: a baton lets one of
them train at a time, each with its own random numbers, so they have a real fleet's bits (tests/house/test_studies.py).

Not promised: seconds on a network. S is a number of inner steps, and `plan` computes it for a link and a model.
"""

import argparse
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fleet import put
from replicas import by_seed
from torch import Tensor
from trials import Curve, Row, Trial, compared, run_missing
from worlds import WORLDS, World

from diloco import OuterConfig, StoreManager, make_diloco
from inner import InnerLoop
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.layout import slot_name
from rendezvous.store import Store
from rendezvous.stores.memory import MemoryStore

SEEDS = range(48, 56)
MACHINES, BUDGET, SEND = 4, 120, 4  # in inner steps: the time of the whole run, and the way of one whole vector
POINTS = 12


@dataclass(frozen=True)
class Arm:
    """waits: does a machine wait while its vector is sent?"""

    h: int = 6
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    waits: bool = False

    @property
    def steps(self) -> int:
        """The number of inner steps in the given time."""
        return BUDGET * self.h // (self.h + SEND) // self.h * self.h if self.waits else BUDGET

    @property
    def pace(self) -> float:
        """The time per inner step, in units of an inner step without waits."""
        return (self.h + SEND) / self.h if self.waits else 1.0


ARMS = {
    "no-link": Arm(),
    "waits-6": Arm(waits=True),
    "waits-12": Arm(h=12, waits=True),
    "waits-24": Arm(h=24, waits=True),
    "overlap-0": Arm(delay=4),
    "overlap-half": Arm(delay=4, alpha=0.5),
    "stream-0": Arm(fragments=2, delay=2),
    "stream-half": Arm(fragments=2, delay=2, alpha=0.5),
}


def main() -> None:
    given = arguments()
    world = WORLDS[given.world]
    world.prepare(given.to)
    trials = [Trial(arm, seed) for seed in SEEDS for arm in ARMS if given.arms in arm]
    path = given.to / f"overlap-{world.name}.jsonl"
    print(table(world, run_missing(trials, partial(run, world, given.to), path, given.workers)))


# -------------------------------------------------------------------- one trial


def run(world: World, folder: Path, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    arm = ARMS[trial.arm]
    build = partial(world.build, folder, trial.seed, batch=world.batch, lr=world.lr * MACHINES**0.5)
    outer = OuterConfig(
        sync_every=arm.h, fragments=arm.fragments, fragment_sync_delay=arm.delay, fragment_update_alpha=arm.alpha,
        snapshot_every=1 << 30,
    )  # fmt: skip
    thetas = fleet_thetas(build, MACHINES, outer, arm.steps)
    judge = build(0)
    marks = sorted({arm.h * round(k * arm.steps / POINTS / arm.h) for k in range(POINTS + 1)})
    return [(round(step * arm.pace), value_of(world, judge, thetas[step])) for step in marks]


def value_of(world: World, judge: InnerLoop, theta: Tensor) -> float:
    put(judge, theta)
    return world.value(judge)


def fleet_thetas(build: Callable[[int], InnerLoop], machines: int, outer: OuterConfig, steps: int) -> list[Tensor]:
    """θ as replica 0 holds it after 0, 1, … inner steps of each machine.   build: machine -> its loop."""
    found: list[Tensor] = []
    baton, store, errors = Baton(), MemoryStore(), list[BaseException]()

    def live(machine: int) -> None:
        try:
            train(baton, store, machine, machines, build, outer, steps, found if machine == 0 else None)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=live, args=(machine,), daemon=True) for machine in range(machines)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        threads[0].join(0.1)
    if errors:
        raise errors[0]
    return found


def train(
    baton: "Baton", store: Store, machine: int, machines: int, build: Callable[[int], InnerLoop], outer: OuterConfig,
    steps: int, thetas: list[Tensor] | None,
) -> None:  # fmt: skip
    """Run one replica to its end.   thetas: gets θ after each inner step."""
    with baton:
        loop = build(machine)
    manager = StoreManager(
        store, slot_name(machine), replicas=machines, min_replicas=machines, timing=Timing(poll=0.002), clock=Slept()
    )
    loop.optimizer.register_step_post_hook(lambda *_: baton.give())
    with make_diloco(loop.model, loop.optimizer, manager, outer, boundary=loop.boundary) as rounds:
        loop.optimizer.register_step_post_hook(lambda *_: baton.take())
        done = 0

        def note() -> None:
            if thetas is not None:
                thetas.append(torch.cat([theta.detach().clone() for theta in rounds.thetas]))

        def stop() -> bool:
            nonlocal done
            done += 1
            note()
            return done >= steps

        note()
        with baton:
            loop.train(stop)


class Baton:
    """Lets one thread train at a time, with the random numbers that it had when it last held the baton."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states = threading.local()

    def take(self) -> None:
        self._lock.acquire()
        if hasattr(self._states, "kept"):
            ours, numpys, pythons = self._states.kept
            torch.set_rng_state(ours)
            np.random.set_state(numpys)
            random.setstate(pythons)

    def give(self) -> None:
        self._states.kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._lock.release()

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give()


class Slept(SystemClock):
    """A clock that only runs while its replica waits, so that all replicas are equally fast in any order of turns."""

    def __init__(self) -> None:
        self._slept = 0.0

    def now(self) -> float:
        return self._slept

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._slept += seconds


# -------------------------------------------------------------------- telling


def table(world: World, rows: list[Row]) -> str:
    """Return the table at equal time; differences are paired over seeds, positive if better than `waits-6`."""
    lines = ["| arm | inner steps | mean over the time | at the end | − waits-6, mean | − waits-6, end |"]
    lines += ["|---|---|---|---|---|---|"]
    against = [row["curve"] for row in by_seed(rows, "waits-6")]
    for name, arm in ARMS.items():
        curves = [row["curve"] for row in by_seed(rows, name)]
        if len(curves) == len(against) > 1:
            cells = compared(curves, against, world.upwards)
            lines.append(f"| {' | '.join([name, str(arm.steps), *cells])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=["toolworld", "text"])
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--arms", default="", help="only arms whose name has this in it")
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
