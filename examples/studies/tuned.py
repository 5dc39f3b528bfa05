"""Each arm at its own best learning rates: is a fleet of N worth N machines, and which rule finds the rates?

    python examples/studies/tuned.py toolworld tune --to studies         about two hours of one core
    python examples/studies/tuned.py toolworld judge --to studies        about four
    python examples/studies/tuned.py text tune|judge --to studies        a fifth of that
    python examples/studies/tuned.py text decide --to studies            T5 and T6, from the judged rows of both tasks

    tune    every arm × TEN settings × seeds 104, 105       ─▶ the setting with the best mean over the run, for each arm
    judge   those settings, the defaults, and rules without tuning × seeds 8 … 15

    alone, linked-N       ten inner learning rates, ½ … 11.3 × the task's own
    fleet-N-H             five, 1 … 16 ×, under the default outer step (η .7, μ .5) and a plain average (η 1, μ 0)

Ten settings for each arm, so none was searched longer.  All arms see equal samples, as in replicas.py.

Not promised: a best setting outside the grid; the tables mark a choice at its edge.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from effective_step import disagreement
from fleet import OuterRate, outer_steps
from replicas import MEASURES, SIZES, Arm, auto_rate, by_seed, curve_of, linked
from torch import Tensor
from trials import Curve, Paired, Row, Trial, area, paired, read_rows, run_missing
from worlds import WORLDS, World

from diloco.outer.safety import pairwise_cosine

EVERY = (1, 5, 20)
TUNED_ON, JUDGED_ON = (104, 105), range(8, 16)
LINKED = [0.5 * 2 ** (k / 2) for k in range(10)]
FLEET = [(scale, *outer) for outer in ((0.7, 0.5), (1.0, 0.0)) for scale in (1.0, 2.0, 4.0, 8.0, 16.0)]
ONE_MACHINE = "alone x1"  # the default of one machine, judged beside the chosen settings
GOOD_ENOUGH = {"toolworld": 0.05, "text": 0.02}  # reward; share of the loss
NO_WORSE = {"toolworld": 0.02, "text": 0.01}  # T6: in the same units


@dataclass(frozen=True)
class Setting:
    """scale: factor of the task's inner learning rate.   rate: (ḡ, Δ) -> η, made for a loop; None: not a fleet."""

    machines: int
    every: int
    scale: float
    rate: Callable[[int], OuterRate] | None = None
    mu: float = 0.0


def tunings() -> dict[str, list[tuple[str, Setting]]]:
    """Return arm -> its ten settings, by name."""
    machines = {"alone": 1, **{f"linked-{n}": n for n in SIZES}}
    found = {arm: [(f"{arm} x{s:.3g}", Setting(n, 0, s)) for s in LINKED] for arm, n in machines.items()}
    for n, h in ((n, h) for n in SIZES for h in EVERY):
        arm = f"fleet-{n}-{h}"
        found[arm] = [(f"{arm} x{s:g} {lr:g}/{mu:g}", Setting(n, h, s, fixed(lr), mu)) for s, lr, mu in FLEET]
    return found


def fixed(lr: float) -> Callable[[int], OuterRate]:
    return lambda machines: lambda mean, deltas: lr


def by_disagreement(power: float) -> Callable[[int], OuterRate]:
    """Return η = (‖Δ‖/‖ḡ‖)^power, at most N: with power 2, N if the replicas' steps are noise; 1 if they agree."""
    return lambda machines: lambda mean, deltas: min(float(machines), disagreement(mean, deltas) ** power)


# name -> (a of inner lr × N^a, η, μ)
RULES: dict[str, tuple[float, Callable[[int], OuterRate] | None, float]] = {
    "default": (0.0, fixed(0.7), 0.5),
    "auto": (0.0, None, 0.5),
    "sqrt": (0.5, fixed(0.7), 0.5),
    "times": (1.0, fixed(0.7), 0.5),
    "sqrt-plain": (0.5, fixed(1.0), 0.0),
    "times-plain": (1.0, fixed(1.0), 0.0),
    "norm": (0.0, by_disagreement(1.0), 0.0),
    "norm-sqrt": (0.5, by_disagreement(1.0), 0.0),
    "square": (0.0, by_disagreement(2.0), 0.0),
}


def rules() -> dict[str, Setting]:
    return {
        f"fleet-{n}-{h} {name}": Setting(n, h, n**a, rate, mu)
        for n in SIZES
        for h in EVERY[1:]
        for name, (a, rate, mu) in RULES.items()
    }


def main() -> None:
    given = arguments()
    if given.part == "decide":
        print(decision_table({name: read_rows(given.to / f"tuned-{name}-judging.jsonl") for name in NO_WORSE}))
        return
    world = WORLDS[given.world]
    world.prepare(given.to)
    tuning, judging = (given.to / f"tuned-{world.name}-{part}.jsonl" for part in ("tuning", "judging"))
    settings = dict(named for arm in tunings().values() for named in arm)
    chosen = choose(world, read_rows(tuning)) if given.part == "judge" else {}
    if chosen:
        settings = {name: settings[name] for name in (*chosen.values(), ONE_MACHINE)} | rules()
    seeds = TUNED_ON if given.part == "tune" else JUDGED_ON
    trials = [Trial(name, seed) for seed in seeds for name in settings if given.arms in name]
    path = tuning if given.part == "tune" else judging
    rows = run_missing(trials, partial(run, world, given.to), path, given.workers)
    print(tuning_table(world, rows) if given.part == "tune" else judging_table(world, rows, chosen))


def run(world: World, folder: Path, trial: Trial) -> Curve | tuple[Curve, Row]:
    all_settings = dict(named for arm in tunings().values() for named in arm) | rules()
    return run_setting(world, folder, trial, all_settings[trial.arm])


def run_setting(world: World, folder: Path, trial: Trial, one: Setting) -> Curve | tuple[Curve, Row]:
    """Return the curve; for a fleet, also the replicas' agreement in each outer step (a log's `cos_pair`)."""
    torch.set_num_threads(1)
    if not one.every:
        return linked(world, folder, trial, Arm(one.machines, scale=one.scale))
    build = partial(world.build, folder, trial.seed, batch=world.batch, lr=world.lr * one.scale)
    loops = [build(machine) for machine in range(one.machines)]
    rate = one.rate(one.machines) if one.rate is not None else auto_rate(loops[0], one.mu)
    agreed: list[float | None] = []
    thetas = outer_steps(loops, every=one.every, rate=partial(watched, rate, agreed), mu=one.mu)
    curve = curve_of(world, loops[0], thetas, world.steps // one.machines // one.every, one.every)
    return curve, {"cos_pair": agreed}


def watched(rate: OuterRate, agreed: list[float | None], mean: Tensor, deltas: Sequence[Tensor]) -> float:
    """Return `rate`'s η, and note the mean cosine between two replicas."""
    weights = [1 / len(deltas)] * len(deltas)
    found = pairwise_cosine(weights, [float(delta.norm()) for delta in deltas], float(mean.norm()))
    agreed.append(None if found is None else round(found, 4))
    return rate(mean, deltas)


# -------------------------------------------------------------------- choosing, telling


def choose(world: World, rows: Sequence[Row]) -> dict[str, str]:
    """Return arm -> the name of its setting with the best mean over the run and all tuning seeds."""
    sign = 1 if world.upwards else -1
    means = {name: fmean(values) for name, values in _areas(rows).items()}
    return {
        arm: max((name for name, _ in named if name in means), key=lambda name: sign * means[name])
        for arm, named in tunings().items()
        if any(name in means for name, _ in named)
    }


def _areas(rows: Sequence[Row]) -> dict[str, list[float]]:
    names = dict.fromkeys(row["arm"] for row in rows)
    return {name: [area(row["curve"]) for row in rows if row["arm"] == name] for name in names}


def tuning_table(world: World, rows: Sequence[Row]) -> str:
    chosen, means = choose(world, rows), {name: fmean(values) for name, values in _areas(rows).items()}
    lines = ["| arm | chosen | mean over the run | all settings, in order |", "|---|---|---|---|"]
    for arm, best in chosen.items():
        tried = [name for name, _ in tunings()[arm] if name in means]
        edge = ", at the grid's edge" if _is_at_edge(arm, best) else ""
        all_of_them = " ".join(f"{means[name]:.3f}" for name in tried)
        lines.append(f"| {arm} | {best.removeprefix(arm).strip()}{edge} | {means[best]:.3f} | {all_of_them} |")
    return "\n".join(lines)


def _is_at_edge(arm: str, name: str) -> bool:
    scales = [setting.scale for _, setting in tunings()[arm]]
    return dict(tunings()[arm])[name].scale in (min(scales), max(scales))


def judging_table(world: World, rows: list[Row], chosen: dict[str, str]) -> str:
    """Return each arm at its best, then the rules; paired differences are positive if the first is better."""
    lines = [
        "| setting | mean over the run | at the end | − its linked arm, mean | − default, mean |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["arm"] for row in rows):
        arm = name.split(" ")[0]
        curves = [row["curve"] for row in by_seed(rows, name)]
        against = chosen.get(f"linked-{arm.split('-')[1]}") if arm.startswith("fleet") else None
        default = f"{arm} default" if arm.startswith("fleet") and not name.endswith(" default") else None
        cells = [_difference(world, rows, name, other) for other in (against, default)]
        mean, end = fmean(map(area, curves)), fmean(curve[-1][1] for curve in curves)
        lines.append(f"| {name} | {mean:.3f} | {end:.3f} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def _difference(world: World, rows: list[Row], first: str, second: str | None) -> str:
    a, b = (by_seed(rows, name) if name else [] for name in (first, second))
    if not a or len(a) != len(b):
        return ""
    values = [[MEASURES["mean over the run, equal samples"](row["curve"], 1) for row in of] for of in (a, b)]
    return str(paired(*(values if world.upwards else values[::-1])))


def decision_table(rows: dict[str, list[Row]]) -> str:
    """Return each rule's comparison with the default: T5 (N = 4, H = 5), and T6's worst other cell, per margin.

    A rule passes T5 if the one-sided bound is above 0 on both tasks, and T6 if no cell is below −1.
    """
    others = [(n, h) for n in SIZES for h in EVERY[1:] if (n, h) != (4, 5)]
    lines = ["| rule | T5, by task | T5 | worst other cell, × margin | T6 | mean gain |", "|---|---|---|---|---|---|"]
    for rule in (name for name in RULES if name != "default"):
        first = {task: gain(task, rows[task], 4, 5, rule) for task in rows}
        worst = min(
            (gain(task, rows[task], n, h, rule).lower / NO_WORSE[task], f"{task} N = {n}, H = {h}")
            for task in rows
            for n, h in others
        )
        yes = ["yes" if all(one.lower > 0 for one in first.values()) else "no", "yes" if worst[0] >= -1 else "no"]
        told = "; ".join(f"{task} {one}" for task, one in first.items())
        mean = fmean(one.mean for one in first.values())
        lines.append(f"| {rule} | {told} | {yes[0]} | {worst[0]:+.1f}, {worst[1]} | {yes[1]} | {mean:+.3f} |")
    return "\n".join(lines)


def gain(task: str, rows: list[Row], n: int, h: int, rule: str) -> Paired:
    """Return the gain over the default, positive if the rule is better: reward, or a share of the default's loss."""
    ours, default = ([area(row["curve"]) for row in by_seed(rows, f"fleet-{n}-{h} {of}")] for of in (rule, "default"))
    if WORLDS[task].upwards:
        return paired(ours, default)
    return paired([1 - a / b for a, b in zip(ours, default, strict=True)], [0.0] * len(ours))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument("part", choices=["tune", "judge", "decide"])
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--arms", default="", help="only settings whose name has this in it")
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
