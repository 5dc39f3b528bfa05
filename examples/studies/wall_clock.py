"""N machines for the same time: the judged trials of tuned.py at equal wall clock, as a table and a figure.

    python examples/studies/wall_clock.py toolworld [--rows docs/studies/rows] [--to docs/studies]

    clock     inner steps of each machine; samples and GPU-hours are N times as many
    level     a reward of .8 or a loss of 1.2: the clock at which the mean curve of eight seeds reaches it

Links and boots cost nothing here: docs/benchmarks.md has the seconds of a sync.

Not promised: more than the rows show; this file trains nothing.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from replicas import by_seed
from trials import Curve, Row, at_step, first_step, read_rows
from tuned import choose
from worlds import WORLDS, World

from diloco.runlog.worth import resized

CLOCK = (20, 40, 80)
LEVEL = {"toolworld": 0.8, "text": 1.2}
RATES = {"1": "default", "√N": "sqrt", "N": "times"}  # inner lr × this -> the study's rule


def arms(world: World, tuning: Sequence[Row]) -> dict[str, tuple[int, str]]:
    """Return name in the figure -> (machines, name in the rows). The single machine has the task's own rate."""
    chosen = choose(world, tuning)
    found = {"one machine": (1, "alone x1" if world.name == "toolworld" else chosen["alone"])}
    for n in (2, 4, 8):
        found |= {f"{n} replicas, lr × {words}": (n, f"fleet-{n}-5 {rule}") for words, rule in RATES.items()}
        found[f"{n} linked machines"] = (n, chosen[f"linked-{n}"])
    return found


def mean_curve(rows: list[Row], arm: str) -> Curve:
    """Return the mean over seeds, at a curve's points."""
    curves = [row["curve"] for row in by_seed(rows, arm)]
    return [(point[0], fmean(at_step(curve, point[0]) for curve in curves)) for point in curves[0]]


def reached(world: World, curve: Curve) -> float | None:
    sign = 1 if world.upwards else -1
    return first_step([(step, sign * value) for step, value in curve], sign * LEVEL[world.name])


def table(world: World, tuning: list[Row], rows: list[Row]) -> str:
    what = "reward" if world.upwards else "loss"
    to_level = f"clock to {LEVEL[world.name]:g} | GPU time to it, × one machine"
    lines = [f"| {what} at a clock of | {' | '.join(map(str, CLOCK))} | {to_level} |", "|---|---|---|---|---|---|"]
    alone: float | None = None
    for words, (machines, arm) in arms(world, tuning).items():
        curve = mean_curve(rows, arm)
        first = reached(world, curve)
        alone = first if machines == 1 else alone
        cells = [f"{at_step(curve, step):.3f}" if step <= curve[-1][0] else "" for step in CLOCK]
        cost = f"{first * machines / alone:.2f}" if first and alone else ""
        lines.append(f"| {words} | {' | '.join(cells)} | {f'{first:.0f}' if first else 'not reached'} | {cost} |")
    return "\n".join(lines)


def agreement_table(rows: dict[str, list[Row]]) -> str:
    """Return the price of twice as many replicas: estimated from their mean cosine, as in `status`; and measured."""
    told = "2 → 4 reckoned | seen | 4 → 8 reckoned | seen"
    lines = [f"| samples to a loss of 2.0, a reward of .6, at 2 N against N | {told} |", "|---|---|---|---|---|"]
    for name, found in rows.items():
        for words, rule in RATES.items():
            pairs = [_doubled(WORLDS[name], found, f"fleet-{n}-5 {rule}", f"fleet-{2 * n}-5 {rule}", n) for n in (2, 4)]
            cells = [f"× {value:.2f}" for pair in pairs for value in pair]
            lines.append(f"| {name}, lr × {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _doubled(world: World, rows: list[Row], arm: str, twice: str, n: int) -> tuple[float, float]:
    sign, level = (1, 0.6) if world.upwards else (-1, 2.0)
    curves = [[(step, sign * value) for step, value in mean_curve(rows, one)] for one in (arm, twice)]
    steps = [first_step(curve, sign * level) or float("nan") for curve in curves]
    cosine = fmean(c for row in by_seed(rows, arm) for c in row["cos_pair"] if c is not None)
    return resized(n, 2 * n, cosine)[1], steps[1] * 2 * n / (steps[0] * n)


def draw(world: World, tuning: list[Row], rows: list[Row], to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (clock, samples) = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    styles = {"1": ":", "√N": "-", "N": "--"}
    for words, (machines, arm) in arms(world, tuning).items():
        curve = mean_curve(rows, arm)
        style = next((line for way, line in styles.items() if words.endswith(f"× {way}")), "-.")
        color = {1: "black", 2: "tab:green", 4: "tab:blue", 8: "tab:red"}[machines]
        label = words if machines in (1, 4) else None
        for axis, scale in ((clock, 1), (samples, machines)):
            axis.plot([s * scale for s, _ in curve], [v for _, v in curve], style, color=color, label=label, lw=1.2)
    clock.set(
        xlabel="equal wall clock: inner steps of each machine",
        ylabel="reward" if world.upwards else "loss",
        xlim=(0, 160),
    )
    samples.set(xlabel="equal samples, and equal rent: inner steps of all machines", xlim=(0, 320))
    clock.legend(fontsize=8)
    figure.suptitle(
        f"{world.name}: 1 (black), 2 (green), 4 (blue), 8 (red) machines, H = 5, means of eight seeds", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(to, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=list(LEVEL))
    parser.add_argument("--rows", type=Path, default=Path("docs/studies/rows"))
    parser.add_argument("--to", type=Path, default=Path("docs/studies"))
    given = parser.parse_args()
    tuning, rows = (read_rows(given.rows / f"tuned-{given.world}-{part}.jsonl") for part in ("tuning", "judging"))
    print(table(WORLDS[given.world], tuning, rows))
    draw(WORLDS[given.world], tuning, rows, given.to / f"wall-clock-{given.world}.png")


if __name__ == "__main__":
    main()
