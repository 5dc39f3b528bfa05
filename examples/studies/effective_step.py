"""How long should the outer step be? H × μ under three rules for its learning rate; four replicas, the text.

    python examples/studies/effective_step.py --to studies               about 25 minutes of one core

    fixed      η = .7
    matched    η_eff = η·(1 + μ/(1 − μρ)) = 1                 outer.lr = "auto": ρ is learned   (diloco/outer/safety.py)
    root       η_eff = (‖Δ‖/‖ḡ‖)^½                            longer if replicas disagree; ‖Δ‖: mean length

Not promised: the same result elsewhere (docs/studies/replicas.md).
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from fleet import flat, outer_steps
from replicas import by_seed, curve_of
from torch import Tensor
from trials import Curve, Row, Trial, area, paired, run_missing
from worlds import WORLDS

from diloco.outer.auto_lr import AutoLR

WORLD, MACHINES, STEPS = WORLDS["text"], 4, 100  # inner steps of each machine
RULES, MOMENTA, EVERY = ("fixed", "matched", "root"), (0.0, 0.5, 0.9), (5, 20, 50)
ARMS = {f"{rule} μ={mu:g} H={h}": (rule, mu, h) for rule in RULES for mu in MOMENTA for h in EVERY}
SEEDS = range(8)


def main() -> None:
    given = arguments()
    WORLD.prepare(given.to)
    trials = [Trial(arm, seed) for seed in given.seeds for arm in ARMS]
    rows = run_missing(trials, partial(run, given.to), given.to / "effective-step.jsonl", given.workers)
    text = "\n\n".join((table(rows), comparisons(rows)))
    (given.to / "effective-step.md").write_text(text + "\n")
    draw(rows, given.to / "effective-step.png")
    print(text)


def run(folder: Path, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    rule, mu, every = ARMS[trial.arm]
    build = partial(WORLD.build, folder, trial.seed, batch=WORLD.batch, lr=WORLD.lr)
    loops = [build(machine) for machine in range(MACHINES)]
    thetas = outer_steps(loops, every=every, rate=rate_of(rule, mu, flat(loops[0]).numel()), mu=mu)
    return curve_of(WORLD, loops[0], thetas, STEPS // every, every)


def rate_of(rule: str, mu: float, size: int) -> Callable[[Tensor, Sequence[Tensor]], float]:
    if rule == "fixed":
        return lambda mean, deltas: 0.7
    auto = AutoLR(size, mu=mu)
    if rule == "matched":
        return lambda mean, deltas: auto.step(mean.numpy())
    return lambda mean, deltas: auto.step(mean.numpy()) * disagreement(mean, deltas) ** 0.5


def disagreement(mean: Tensor, deltas: Sequence[Tensor]) -> float:
    """Return ‖Δ‖/‖ḡ‖ ≥ 1: 1 if all replicas agree, √N if they have nothing in common."""
    return fmean(float(delta.norm()) for delta in deltas) / float(mean.norm())


def values(rows: list[Row], arm: str) -> list[float]:
    """Return the held-out loss at the end, seed by seed."""
    return [row["curve"][-1][1] for row in by_seed(rows, arm)]


def table(rows: list[Row]) -> str:
    lines = ["| H | μ | " + " | ".join(RULES) + " |", "|---|---|" + "---|" * len(RULES)]
    for h in EVERY:
        for mu in MOMENTA:
            cells = [cell(rows, f"{rule} μ={mu:g} H={h}") for rule in RULES]
            lines.append(f"| {h} | {mu:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(rows: list[Row], arm: str) -> str:
    """Return the loss at the end, and its mean over the run."""
    curves = [row["curve"] for row in by_seed(rows, arm)]
    return f"{fmean(c[-1][1] for c in curves):.3f} ({fmean(area(c) for c in curves):.3f})" if curves else ""


def comparisons(rows: list[Row]) -> str:
    """Return ratios of losses at the end, paired over seeds: above 0 if the first is worse."""
    lines = ["| first / second − 1 | difference |", "|---|---|"]
    for first, second in COMPARED:
        a, b = values(rows, first), values(rows, second)
        if a and len(a) == len(b) > 1:
            ratios = [x / y - 1 for x, y in zip(a, b, strict=True)]
            lines.append(f"| {first} / {second} | {paired(ratios, [0.0] * len(ratios))} |")
    return "\n".join(lines)


COMPARED = [
    *((f"fixed μ={mu:g} H={h}", f"matched μ={mu:g} H={h}") for h in EVERY for mu in MOMENTA),
    *((f"root μ={mu:g} H={h}", f"matched μ={mu:g} H={h}") for h in EVERY for mu in MOMENTA),
    *((f"matched μ=0.9 H={h}", f"matched μ=0 H={h}") for h in EVERY),
    *((f"fixed μ={mu:g} H={h}", f"fixed μ=0.5 H={h}") for h in EVERY for mu in (0.0, 0.9)),
]


def draw(rows: list[Row], to: Path) -> None:
    """Draw a panel per H: the loss at the end over μ, a dot per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(EVERY), figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, h in zip(panels, EVERY, strict=True):
        for number, rule in enumerate(RULES):
            ends = [values(rows, f"{rule} μ={mu:g} H={h}") for mu in MOMENTA]
            for at, found in enumerate(ends):
                panel.plot([at + 0.12 * (number - 1)] * len(found), found, ".", color=f"C{number}", ms=4, alpha=0.6)
            if all(ends):
                means = [fmean(found) for found in ends]
                panel.plot([at + 0.12 * (number - 1) for at in range(3)], means, color=f"C{number}", label=rule)
        panel.set(title=f"H = {h}", xlabel="μ", xticks=range(len(MOMENTA)), xticklabels=[f"{mu:g}" for mu in MOMENTA])
    panels[0].set_ylabel("held-out loss at the end")
    panels[0].legend()
    figure.savefig(to, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=list(SEEDS))
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
