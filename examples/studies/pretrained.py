"""A pretrained model with LoRA: what is a fleet worth at its own best rates, on two tasks?

    python examples/studies/pretrained.py sums tune --to studies         about 2.5 hours of one core
    python examples/studies/pretrained.py sums judge --to studies        about six hours
    python examples/studies/pretrained.py products judge --to studies    about four; needs reasoning-gym
    python examples/studies/pretrained.py products rule --to studies     an hour and a half; sums, too

    tune     on sums, seed 104:   alone × ½, 1, 2, 4      fleet-4-5: plain × 1, 2, 4, and the default at × 1
    judge    seeds 8 … 11:        alone and fleet-4-5 at the chosen rates, the default, fleet-2-5 and fleet-8-5 at the
                                  fleet's rate · √(N/4) (sums); on products the rates chosen on sums
    linked   the same seeds:      four machines that share each batch, at the fleet's rate: would more steps help?
    rule     the same seeds:      fleet-4-5 at √4 under the default outer step, as decision 076 has it for whole models

SmolLM2-135M-Instruct, LoRA of rank 8, GRPO (examples/real/run.toml); 80 inner steps of 16 completions in every arm.

Not promised: a narrow interval: there are four seeds, and each trial takes eighteen minutes of a core.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import trl.trainer.utils as trl_utils
from replicas import by_seed
from trials import Curve, Row, Trial, area, paired, read_rows, run_missing
from tuned import Setting, fixed, run_setting
from worlds import WORLDS, World

EVERY = 5
TUNED_ON, JUDGED_ON = (104,), range(8, 12)
ALONE = [Setting(1, 0, scale) for scale in (0.5, 1.0, 2.0, 4.0)]
FLEET = [Setting(4, EVERY, scale, fixed(1.0), 0.0) for scale in (1.0, 2.0, 4.0)]
DEFAULT = Setting(4, EVERY, 1.0, fixed(0.7), 0.5)
RULE = Setting(4, EVERY, 2.0, fixed(0.7), 0.5)
LINKED = Setting(4, 0, 4.0)


def name_of(one: Setting) -> str:
    arm = (
        f"fleet-{one.machines}-{one.every}" if one.every else f"linked-{one.machines}" if one.machines > 1 else "alone"
    )
    return f"{arm} x{one.scale:.3g}" + (" default" if one.mu else "")


def tunings() -> dict[str, Setting]:
    return {name_of(one): one for one in (*ALONE, *FLEET, DEFAULT)}


def judged(chosen: dict[str, Setting], task: str) -> dict[str, Setting]:
    """Return the best of each kind and the default; on sums, also two other sizes, at rates from the fleet's."""
    found = [chosen["alone"], chosen["fleet"], DEFAULT]
    best = replace(chosen["fleet"], rate=fixed(1.0), mu=0.0)
    others = [replace(best, machines=n, scale=best.scale * (n / 4) ** 0.5) for n in (2, 8)]
    return {name_of(one): one for one in (*found, *(others if task == "sums" else []))}


def choose(rows: Sequence[Row]) -> dict[str, Setting]:
    """Return kind -> its setting with the best mean over the run."""
    means = {row["arm"]: area(row["curve"]) for row in rows}
    kinds = {"alone": ALONE, "fleet": [*FLEET, DEFAULT]}
    return {
        kind: max((one for one in of if name_of(one) in means), key=lambda one: means[name_of(one)])
        for kind, of in kinds.items()
    }


def main() -> None:
    given = arguments()
    world = WORLDS[given.world]
    world.prepare(given.to)
    tuning = given.to / "pretrained-tuning.jsonl"
    settings = settings_of(given.part, tuning, world)
    trials = [Trial(name, seed) for seed in (TUNED_ON if given.part == "tune" else JUDGED_ON) for name in settings]
    path = tuning if given.part == "tune" else given.to / f"pretrained-{world.name}.jsonl"
    print(table(run_missing(trials, partial(run, world, given.to, tuning, given.part), path, given.workers)))


def run(world: World, folder: Path, tuning: Path, part: str, trial: Trial) -> Curve | tuple[Curve, Row]:
    trl_utils._use_triton = lambda device: True  # type: ignore[attr-defined]  # head of completions alone, as on a GPU
    return run_setting(world, folder, trial, settings_of(part, tuning, world)[trial.arm])


def settings_of(part: str, tuning: Path, world: World) -> dict[str, Setting]:
    if part == "rule":
        return {name_of(one): one for one in (DEFAULT, RULE)}
    if part == "tune":
        return tunings()
    found = judged(choose(read_rows(tuning)), world.name)
    return {**found, name_of(LINKED): LINKED} if part == "linked" else found


def table(rows: list[Row]) -> str:
    """Return the table; paired differences are positive if better than alone (rule: than the default)."""
    names = list(dict.fromkeys(row["arm"] for row in rows))
    first = next((name for name in names if name.startswith("alone")), name_of(DEFAULT))
    lines = [f"| setting | mean over the run | at the end | − {first}, mean | end |", "|---|---|---|---|---|"]
    for name in names:
        curves, against = ([row["curve"] for row in by_seed(rows, one)] for one in (name, first))
        values = [[area(c) for c in curves], [c[-1][1] for c in curves]]
        cells = ["", ""]
        if len(curves) == len(against) > 1 and name != first:
            other = [[area(c) for c in against], [c[-1][1] for c in against]]
            cells = [str(paired(*both)) for both in zip(values, other, strict=True)]
        lines.append(f"| {' | '.join([name, *(f'{fmean(v):.3f}' for v in values), *cells])} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=["sums", "products"])
    parser.add_argument("part", choices=["tune", "judge", "rule", "linked"])
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
