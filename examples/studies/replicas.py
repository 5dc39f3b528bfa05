"""How much do replicas help? N machines with only a bucket between them, against one batch over N linked machines.

    python examples/studies/replicas.py toolworld --to studies           about 60 minutes of one core
    python examples/studies/replicas.py text --to studies                about 15

    alone        one machine, 320 inner steps of B sequences
    linked-N     the same samples as 320/N steps of one batch of N·B: N machines whose link costs nothing; learning
                 rate as it is, and ×√N
    fleet-N-H    N machines, each alone for H steps of B sequences, then an outer step (the project's defaults); 320/N
                 inner steps each
    …-auto       the same with outer.lr = "auto"
    …-mu         the same with outer.momentum = 0.9; not preregistered, so only if --arms names it

All arms see equal samples (equal GPU-hours); at equal inner steps of one machine they took equal wall-clock time if a
link costs nothing, which favours the linked arms. The curve shows θ's value on held-out data.

Not promised: real noise of real fleets: no replica is late or dies here (docs/studies/replicas.md).
"""

import argparse
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from fleet import flat, outer_steps, put
from torch import Tensor
from trials import Curve, Row, Trial, area, at_step, first_step, paired, run_missing
from worlds import WORLDS, World

from diloco.outer.auto_lr import AutoLR
from diloco.run.config import OuterConfig
from inner import InnerLoop

STEPS = WORLDS["text"].steps  # inner steps of `alone`: 320 · B sequences in every arm
SEEDS = range(8)
SIZES, EVERY = (2, 4, 8), (5, 20)


@dataclass(frozen=True)
class Arm:
    """machines: N.   every: H; 0 for linked machines, or one alone.   scale: factor of the learning rate.

    mu: the outer step's; None: the default.
    """

    machines: int = 1
    every: int = 0
    scale: float = 1.0
    auto: bool = False
    mu: float | None = None


ARMS = {
    "alone": Arm(),
    **{f"linked-{n}": Arm(n) for n in SIZES},
    **{f"linked-{n}-sqrt": Arm(n, scale=n**0.5) for n in SIZES},
    **{f"fleet-{n}-{h}": Arm(n, h) for h in EVERY for n in (1, *SIZES)},
    **{f"fleet-4-{h}-auto": Arm(4, h, auto=True) for h in EVERY},
}
LATER = {f"fleet-{n}-{h}-mu": Arm(n, h, mu=0.9) for h in EVERY for n in SIZES}
ALL = ARMS | LATER


def main() -> None:
    given = arguments()
    world = WORLDS[given.world]
    world.prepare(given.to)
    trials = [Trial(arm, seed) for seed in given.seeds for arm in given.arms]
    rows = run_missing(trials, partial(run, world, given.to), given.to / f"{world.name}.jsonl", given.workers)
    text = "\n\n".join((table(world, rows), comparisons(world, rows)))
    (given.to / f"{world.name}.md").write_text(text + "\n")
    draw(world, rows, given.to / f"replicas-{world.name}.png")
    print(text)


# -------------------------------------------------------------------- one trial


def run(world: World, folder: Path, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    arm = ALL[trial.arm]
    return fleet(world, folder, trial, arm) if arm.every else linked(world, folder, trial, arm)


def linked(world: World, folder: Path, trial: Trial, arm: Arm) -> Curve:
    """Train one loop with the batch of all machines."""
    steps, lr = world.steps // arm.machines, world.lr * arm.scale
    loop = world.build(folder, trial.seed, 0, batch=world.batch * arm.machines, lr=lr)
    curve, taken = [(0, world.value(loop))], 0

    def stop() -> bool:
        nonlocal taken
        taken += 1
        if taken % max(1, steps // world.points) == 0:
            curve.append((taken, world.value(loop)))
        return taken >= steps

    loop.train(stop)
    return curve


def fleet(world: World, folder: Path, trial: Trial, arm: Arm) -> Curve:
    """Train replicas that are averaged every H inner steps."""
    build = partial(world.build, folder, trial.seed, batch=world.batch, lr=world.lr)
    loops = [build(machine) for machine in range(arm.machines)]
    outer, count = OuterConfig(), world.steps // arm.machines // arm.every
    mu = outer.momentum if arm.mu is None else arm.mu
    rate = auto_rate(loops[0], mu) if arm.auto else lambda mean, deltas: float(outer.lr)
    thetas = outer_steps(loops, every=arm.every, rate=rate, mu=mu)
    return curve_of(world, loops[0], thetas, count, arm.every)


def curve_of(world: World, loop: InnerLoop, thetas: Generator[Tensor], count: int, every: int) -> Curve:
    """Return θ's value at up to `points` of its `count` outer steps.   loop: gets θ, to measure it."""
    curve = [(0, world.value(loop))]
    for t, theta in enumerate(islice(thetas, count), 1):
        if t % max(1, count // world.points) == 0:
            put(loop, theta)
            curve.append((t * every, world.value(loop)))
    thetas.close()
    return curve


def auto_rate(loop: InnerLoop, mu: float) -> Callable[[Tensor, Sequence[Tensor]], float]:
    auto = AutoLR(flat(loop).numel(), mu=mu)
    return lambda mean, deltas: auto.step(mean.numpy())


# -------------------------------------------------------------------- telling


def table(world: World, rows: list[Row]) -> str:
    level, sign = (0.8, 1) if world.upwards else (-1.0, -1)
    lines = [
        f"| arm | at the end | mean over the run | inner steps of one machine to {abs(level):g} | "
        f"samples to it, × {world.batch} |",
        "|---|---|---|---|---|",
    ]
    for name in [name for name in ALL if any(row["arm"] == name for row in rows)]:
        curves = [row["curve"] for row in rows if row["arm"] == name]
        reached = [first_step([(s, sign * v) for s, v in curve], level) for curve in curves]
        known = [step for step in reached if step is not None]
        told = f"{fmean(known):.0f}" if len(known) == len(reached) else f"{len(known)} of {len(reached)} get there"
        samples = f"{fmean(known) * ALL[name].machines:.0f}" if len(known) == len(reached) else ""
        end, mean = fmean(curve[-1][1] for curve in curves), fmean(area(curve) for curve in curves)
        lines.append(f"| {name} | {end:.3f} | {mean:.3f} | {told} | {samples} |")
    return "\n".join(lines)


def comparisons(world: World, rows: list[Row]) -> str:
    """Return differences paired over seeds, positive if the first is better; with 95 % intervals."""
    lines = ["| first − second | of what | difference |", "|---|---|---|"]
    for first, second, what in COMPARED:
        a, b = ([row["curve"] for row in by_seed(rows, name)] for name in (first, second))
        if a and len(a) == len(b) > 1:
            values = [[MEASURES[what](curve, ALL[first].machines) for curve in curves] for curves in (a, b)]
            ordered = values if world.upwards else values[::-1]
            lines.append(f"| {first} − {second} | {what} | {paired(*ordered)} |")
    return "\n".join(lines)


def by_seed(rows: list[Row], arm: str) -> list[Row]:
    return sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])


MEASURES: dict[str, Callable[[Curve, int], float]] = {
    "mean over the run, equal samples": lambda curve, machines: area(curve),
    "end, equal samples": lambda curve, machines: curve[-1][1],
    "end, equal wall clock": lambda curve, machines: at_step(curve, STEPS // machines),
}
COMPARED = [
    *((f"fleet-{n}-{h}", "alone", what) for n in SIZES for h in EVERY for what in MEASURES),
    *((f"fleet-{n}-{h}", f"linked-{n}{s}", "mean over the run, equal samples")
      for n in SIZES for h in EVERY for s in ("", "-sqrt")),
    *((f"fleet-{n}-20", f"fleet-{n}-5", "mean over the run, equal samples") for n in SIZES),
    *((f"fleet-4-{h}-auto", f"fleet-4-{h}", "mean over the run, equal samples") for h in EVERY),
    *((name, name.removesuffix("-mu"), what) for name in LATER for what in MEASURES if "samples" in what),
    *((f"fleet-1-{h}", "alone", "mean over the run, equal samples") for h in EVERY),
]  # fmt: skip


def draw(world: World, rows: list[Row], to: Path) -> None:
    """Draw seeds as thin lines and means as thick ones; left by samples, right by time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = ("alone", "linked-4-sqrt", *(f"fleet-{n}-20" for n in SIZES), "fleet-4-5")
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for number, name in enumerate(shown):
        curves = [row["curve"] for row in by_seed(rows, name)]
        for panel, scale in zip(panels, (ARMS[name].machines, 1), strict=True):
            for curve in curves:
                panel.plot([s * scale for s, _ in curve], [v for _, v in curve], color=f"C{number}", lw=0.4, alpha=0.5)
            if curves:
                means = [fmean(values) for values in zip(*([v for _, v in curve] for curve in curves), strict=True)]
                steps = [step * scale for step, _ in curves[0]]
                panel.plot(steps, means, color=f"C{number}", lw=2, label=name)
    panels[0].set(xlabel=f"samples (× {world.batch}): GPU time", ylabel="held-out reward" if world.upwards else "loss")
    panels[1].set(xlabel="inner steps of one machine: wall-clock time")
    panels[1].legend(fontsize=8)
    figure.savefig(to, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=list(SEEDS))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ALL))
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    given = parser.parse_args()
    if unknown := [name for name in given.arms if name not in ALL]:
        parser.error(f"no arm is called {unknown[0]!r}; there are: {', '.join(ALL)}")
    return given


if __name__ == "__main__":
    main()
