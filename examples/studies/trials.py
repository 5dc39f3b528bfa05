"""Trials of a study: each runs once, in a process with its own core, and adds one row to results.jsonl.

    trials ─▶ those without a row ─▶ workers ─▶ run(trial) ─▶ {arm, seed, cpu_s, curve: [[inner steps, value] …], …}

Rows are appended as trials end, so the same command continues a stopped study.

Not promised: an order of the rows.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

Row = dict[str, Any]
Curve = list[tuple[int, float]]  # inner steps of one machine, and what θ is worth there


@dataclass(frozen=True)
class Trial:
    """arm: its name; a script knows what it means."""

    arm: str
    seed: int


Run = Callable[[Trial], Curve | tuple[Curve, Row]]  # the curve, and what else belongs into the row


def run_missing(trials: Sequence[Trial], run: Run, path: Path, workers: int) -> list[Row]:
    """Return the rows of these trials.   run: a module's function, so that another process can import it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    have = {(row["arm"], row["seed"]) for row in read_rows(path)}
    missing = [trial for trial in trials if (trial.arm, trial.seed) not in have]
    os.environ.setdefault("MALLOC_ARENA_MAX", "1")  # or glibc keeps freed memory for each thread, that is, each replica
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = [pool.submit(_timed, run, trial) for trial in missing]
        for ended in as_completed(running):
            row = ended.result()
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{row['arm']:28s} seed {row['seed']}  ends at {row['curve'][-1][1]:.3f}  {row['cpu_s']} s", flush=True
            )
    wanted = {(trial.arm, trial.seed) for trial in trials}
    return [row for row in read_rows(path) if (row["arm"], row["seed"]) in wanted]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _timed(run: Run, trial: Trial) -> Row:
    began = time.process_time()
    found = run(trial)
    curve, others = found if isinstance(found, tuple) else (found, {})
    rounded = [[step, round(value, 5)] for step, value in curve]
    cpu_s = round(time.process_time() - began, 1)
    return {"arm": trial.arm, "seed": trial.seed, "cpu_s": cpu_s, "curve": rounded, **others}


# -------------------------------------------------------------------- a curve as a number


def area(curve: Sequence[Sequence[float]]) -> float:
    """Return a curve's mean over its inner steps, by trapezoids."""
    pairs = list(pairwise(curve))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / (curve[-1][0] - curve[0][0])


def at_step(curve: Sequence[Sequence[float]], step: float) -> float:
    """Return the curve's value at a step, by linear interpolation; after its end, the last value."""
    for a, b in pairwise(curve):
        if step <= b[0]:
            return a[1] + (b[1] - a[1]) * (step - a[0]) / (b[0] - a[0])
    return curve[-1][1]


def first_step(curve: Sequence[Sequence[float]], level: float) -> float | None:
    """Return the inner step at which the curve first reaches a level, by a straight line; None if it never does."""
    for a, b in pairwise(curve):
        if a[1] < level <= b[1]:
            return a[0] + (b[0] - a[0]) * (level - a[1]) / (b[1] - a[1])
    return None


# -------------------------------------------------------------------- paired differences


# one-sided 95 % and two-sided 95 % points of Student's t, by degrees of freedom
STUDENT = {1: (6.314, 12.706), 2: (2.920, 4.303), 3: (2.353, 3.182), 4: (2.132, 2.776), 5: (2.015, 2.571),
           6: (1.943, 2.447), 7: (1.895, 2.365), 9: (1.833, 2.262), 11: (1.796, 2.201), 14: (1.761, 2.145),
           15: (1.753, 2.131)}  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """A mean of differences with its one-sided and two-sided 95 % bounds."""

    mean: float
    lower: float
    upper: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}"


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Return a − b, seed by seed.   lower, upper: one-sided 95 %; half_width: the two-sided interval's."""
    differences = [x - y for x, y in zip(a, b, strict=True)]
    count, mean = len(differences), fmean(differences)
    error = (sum((d - mean) ** 2 for d in differences) / (count - 1) / count) ** 0.5
    one, two = STUDENT[count - 1]
    return Paired(mean, mean - one * error, mean + one * error, two * error)


def compared(curves: Sequence[Curve], against: Sequence[Curve], upwards: bool) -> list[str]:
    """Return four cells: the means over the run and at the end, and both as paired differences, positive if `curves`
    are better.   upwards: is a larger value better?"""
    values = [[[of(curve) for curve in some] for some in (curves, against)] for of in (area, end)]
    return [
        *(f"{fmean(own):.3f}" for own, _ in values),
        *(str(paired(*(both if upwards else both[::-1]))) for both in values),
    ]


def end(curve: Sequence[Sequence[float]]) -> float:
    return curve[-1][1]
