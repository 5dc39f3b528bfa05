"""What else could a fleet of four do with the same samples? Ten ways to take inner and outer steps, H = 5.

    python examples/studies/outer_rules.py toolworld --to studies        about 30 minutes of one core
    python examples/studies/outer_rules.py text --to studies             about 6

    plain         inner rate × 4, η 1, μ 0: the reference of all comparisons
    nesterov      inner rate × 4, η .7, μ .5
    restart       inner rate × 4, η .7, μ .9; the momentum is dropped where ⟨ḡ, m⟩ < 0        (arXiv 2605.28585)
    gpa           inner rate × 4: z ← z − ḡ, x ← (x + z)/2; replicas start at y = (x + z)/2, x is valued (2512.17131)
    moments       plain, and Adam's second moments are averaged at each sync: twice the bytes
    muon, muon-1  Muon inside (arXiv 2505.23725), inner rate × 4 and × 1, η 1, μ 0
    short-first   plain; H = 2 five times, 5 six times, 10 four times
    long-first    the same in reverse order
    agree         plain; the inner rate begins at × 2, grows by ¼ where the replicas' cosine is above .6 and shrinks by
                  a fifth where it is below .3, between × 1 and × 8

All take 80 inner steps of each machine.

Not promised: the methods of those papers, whose runs are thousands of outer steps long.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from fleet import Outer, Turn, flat, put, scripted_steps, with_nesterov
from replicas import by_seed
from torch import Tensor
from trials import Curve, Row, Trial, compared, run_missing
from worlds import WORLDS, World

from diloco.outer.optimizer import nesterov
from diloco.outer.safety import pairwise_cosine
from inner import InnerConfig, InnerLoop
from inner.settings.task import ScheduleSettings
from rendezvous.agreement.rules import Rules

MACHINES, EVERY, STEPS = 4, 5, 80  # inner steps of each machine
SEEDS = range(24, 32)
SHORT_FIRST = [2] * 5 + [5] * 6 + [10] * 4
GROWS, SHRINKS = (0.6, 1.25), (0.3, 0.8)  # limit of the cosine, and factor of the rate


@dataclass(frozen=True)
class Arm:
    """scale: of the task's inner rate.   rounds: H of each outer step.   shares: are second moments averaged?"""

    outer: Callable[[], Outer]
    scale: float = float(MACHINES)
    optimizer: str = "adamw"
    rounds: Sequence[int] = (EVERY,) * (STEPS // EVERY)
    shares: bool = False
    agrees: bool = False


def plain() -> Outer:
    return with_nesterov(lambda mean, deltas: 1.0, 0.0)


def restarting(lr: float = 0.7, mu: float = 0.9) -> Outer:
    kept: list[Tensor] = []

    def step(theta: Tensor, mean: Tensor, deltas: Sequence[Tensor]) -> Tensor:
        momentum = kept[0] if kept else torch.zeros_like(theta)
        kept[:] = [momentum.zero_() if float(mean @ momentum) < 0 else momentum]
        nesterov(theta, momentum, mean, lr=lr, mu=mu)
        return theta

    return step


def averaging() -> Outer:
    """Return the rule in which θ is y.   z: the θ of plain averaging.   x: the average of its path, which is valued."""
    kept: list[Tensor] = []

    def step(theta: Tensor, mean: Tensor, deltas: Sequence[Tensor]) -> Tensor:
        z, x = kept or (theta.clone(), theta.clone())
        kept[:] = [z, x]
        z.sub_(mean)
        x.add_(z).mul_(0.5)
        theta.copy_(x).add_(z).mul_(0.5)
        return x

    return step


ARMS = {
    "plain": Arm(plain),
    "nesterov": Arm(lambda: with_nesterov(lambda mean, deltas: 0.7, 0.5)),
    "restart": Arm(restarting),
    "gpa": Arm(averaging),
    "moments": Arm(plain, shares=True),
    "muon": Arm(plain, optimizer="muon"),
    "muon-1": Arm(plain, 1.0, optimizer="muon"),
    "short-first": Arm(plain, rounds=SHORT_FIRST),
    "long-first": Arm(plain, rounds=SHORT_FIRST[::-1]),
    "agree": Arm(plain, 1.0, agrees=True),
}


def main() -> None:
    given = arguments()
    world = WORLDS[given.world]
    world.prepare(given.to)
    trials = [Trial(arm, seed) for seed in SEEDS for arm in ARMS if given.arms in arm]
    rows = run_missing(
        trials, partial(run, world, given.to), given.to / f"outer-rules-{world.name}.jsonl", given.workers
    )
    print(table(world, rows))


# -------------------------------------------------------------------- one trial


def run(world: World, folder: Path, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    arm = ARMS[trial.arm]
    here = replace(world, config=partial(configured, world, arm))
    loops = [
        here.build(folder, trial.seed, machine, batch=world.batch, lr=world.lr * arm.scale)
        for machine in range(MACHINES)
    ]
    outer = sharing(loops, arm.outer()) if arm.shares else arm.outer()
    outer = following(loops, outer) if arm.agrees else outer
    script = lambda t: [Turn(machine, arm.rounds[t], t) for machine in range(MACHINES)]  # noqa: E731
    build = lambda machine, session, start: loops[machine]  # noqa: E731
    thetas = scripted_steps(flat(loops[0]), build, script, rules=Rules(sync_every=EVERY), outer=outer)
    curve, taken = [(0, world.value(loops[0]))], 0
    for theta, h in zip(islice(thetas, len(arm.rounds)), arm.rounds, strict=True):
        taken += h
        put(loops[0], theta)
        curve.append((taken, world.value(loops[0])))
    thetas.close()
    return curve


def configured(world: World, arm: Arm, batch: int, lr: float) -> InnerConfig:
    schedule = ScheduleSettings(lr_replicas="linear" if arm.agrees else "constant")
    return replace(world.config(batch, lr), optimizer=arm.optimizer, schedule=schedule)


def sharing(loops: Sequence[InnerLoop], outer: Outer) -> Outer:
    """Average Adam's second moments over the replicas before each outer step."""

    def step(theta: Tensor, mean: Tensor, deltas: Sequence[Tensor]) -> Tensor:
        of = [[state["exp_avg_sq"] for state in loop.optimizer.state.values()] for loop in loops]
        for moments in zip(*of, strict=True):
            shared = torch.stack(list(moments)).mean(0)
            for one in moments:
                one.copy_(shared)
        return outer(theta, mean, deltas)

    return step


def following(loops: Sequence[InnerLoop], outer: Outer) -> Outer:
    """Let the inner rate follow the replicas' agreement, given to the loops as a number of replicas (lr_replicas)."""
    scale = [2.0]  # times the task's own rate; a schedule accepts no number of replicas below 1

    def step(theta: Tensor, mean: Tensor, deltas: Sequence[Tensor]) -> Tensor:
        weights = [1 / len(deltas)] * len(deltas)
        cosine = pairwise_cosine(weights, [float(delta.norm()) for delta in deltas], float(mean.norm())) or 0.0
        grown = GROWS[1] if cosine > GROWS[0] else SHRINKS[1] if cosine < SHRINKS[0] else 1.0
        scale[0] = min(8.0, max(1.0, scale[0] * grown))
        return outer(theta, mean, deltas)

    for loop in loops:
        loop.follow(lambda: 0, lambda: iter(()), lambda: scale[0])  # type: ignore[arg-type,return-value]
    return step


# -------------------------------------------------------------------- telling


def table(world: World, rows: list[Row]) -> str:
    """Return the table; differences are paired over seeds, positive if the arm is better than `plain`."""
    lines = ["| arm | mean over the run | at the end | − plain, mean | − plain, end |", "|---|---|---|---|---|"]
    against = [row["curve"] for row in by_seed(rows, "plain")]
    for arm in ARMS:
        curves = [row["curve"] for row in by_seed(rows, arm)]
        if len(curves) == len(against) > 1:
            lines.append(f"| {' | '.join([arm, *compared(curves, against, world.upwards)])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--arms", default="", help="only arms whose name has this in it")
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
