"""How much learning does an unequal, unreliable fleet lose? Four machines, H = 5, at their best rates.

    python examples/studies/elastic.py toolworld --to studies            about 40 minutes of one core
    python examples/studies/elastic.py text --to studies                 about 5
    python examples/studies/elastic.py toolworld --default --to studies  at the default rate (× √4), other seeds

    equal             four equal machines that all take part
    slow-waits        one is half as fast, and all wait for it: `equal`, at half its pace; no trials of its own
    slow-by-speed     it makes 2 of 5 inner steps and counts by them          (`-uniform`: as much as the others)
    slow-late         it makes 5 in two rounds and counts one step late, at γ (`-full`: at 1)
    slow-unheard      it is late, and no late work counts: three machines at the rent of four
    spot-20, spot-5   each machine dies in one round of 20 or 5, at random: that round is lost, and so is the next,
                      while a machine boots, which begins with an empty Adam
    notice-5          as spot-5, but with a warning before: 2 inner steps count

All arms run for 16 outer steps of 5 inner steps of the fast machines, so all rent four machines for the same time.

Not promised: seconds of boots, networks and stores; the unit is a round.
"""

import argparse
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from fleet import Turn, flat, scripted_steps, with_nesterov
from replicas import by_seed, curve_of
from trials import Curve, Row, Trial, at_step, compared, read_rows, run_missing
from tuned import Setting, choose, rules, tunings
from worlds import WORLDS, World

from inner import InnerLoop
from rendezvous.agreement.rules import Rules

MACHINES, EVERY, ROUNDS = 4, 5, 16
SEEDS, DEFAULT_SEEDS = range(16, 24), range(40, 48)  # at the tuned setting; at the default
WARMUP = 3  # inner steps of a session that begins in the middle of a run (diloco/replica/replica.py)
SHORT = 2  # inner steps of a slow machine's round, and of one that was told to leave


@dataclass(frozen=True)
class Arm:
    """slow: how the slow machine takes part.   dies: in one of so many rounds; 0: never.   notice: is it warned?

    weighting, discount: of the outer step (outer.weighting, outer.age_discount).
    """

    slow: str = ""
    dies: int = 0
    notice: bool = False
    weighting: str = "steps"
    discount: float = 0.5


ARMS = {
    "equal": Arm(),
    "slow-by-speed": Arm("by-speed"),
    "slow-by-speed-uniform": Arm("by-speed", weighting="uniform"),
    "slow-late": Arm("late"),
    "slow-late-full": Arm("late", discount=1.0),
    "slow-unheard": Arm("unheard"),
    "spot-20": Arm(dies=20),
    "spot-5": Arm(dies=5),
    "notice-5": Arm(dies=5, notice=True),
}


def main() -> None:
    given = arguments()
    world = WORLDS[given.world]
    world.prepare(given.to)
    seeds = DEFAULT_SEEDS if given.default else SEEDS
    trials = [Trial(arm, seed) for seed in seeds for arm in ARMS if given.arms in arm]
    tuning = None if given.default else given.to / f"tuned-{world.name}-tuning.jsonl"
    run_one = partial(run, world, given.to, tuning)
    path = given.to / f"elastic-{world.name}{'-default' if given.default else ''}.jsonl"
    rows = run_missing(trials, run_one, path, given.workers)
    print(table(world, rows))


# -------------------------------------------------------------------- one trial


def run(world: World, folder: Path, tuning: Path | None, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    arm, best = ARMS[trial.arm], best_setting(world, tuning)
    lives = [life(arm, machine, random.Random(f"{trial.seed} {machine}")) for machine in range(MACHINES)]
    build_one = partial(world.build, folder, trial.seed, batch=world.batch, lr=world.lr * best.scale)

    def build(machine: int, session: int, start: int) -> InnerLoop:
        return build_one(machine, session=session, start=start, warmup=WARMUP if session > 1 else 0)

    script = lambda t: [turn for one in lives if (turn := one[t]) is not None]  # noqa: E731
    judge = build(0, 1, 0)
    assert best.rate is not None, "of a fleet"
    rules = Rules(sync_every=EVERY, weighting=arm.weighting, age_discount=arm.discount)
    thetas = scripted_steps(flat(judge), build, script, rules=rules, outer=with_nesterov(best.rate(MACHINES), best.mu))
    return curve_of(world, judge, thetas, ROUNDS, EVERY)


def best_setting(world: World, tuning: Path | None) -> Setting:
    """Return tuned.py's setting for four machines and this H on this task; None: the product's default."""
    arm = f"fleet-{MACHINES}-{EVERY}"
    if tuning is None:
        return rules()[f"{arm} sqrt"]
    return dict(tunings()[arm])[choose(world, read_rows(tuning))[arm]]


def life(arm: Arm, machine: int, rng: random.Random) -> list[Turn | None]:
    """Return a machine's turn in each outer step; None while it boots, or still trains.

    The last machine is the slow one.   rng: the machine's own, so that arms of one rate lose the same rounds.
    """
    found: list[Turn | None] = []
    slow = arm.slow if machine == MACHINES - 1 else ""
    session = 1
    while (t := len(found)) < ROUNDS:
        dies = rng.random() * arm.dies < 1 if arm.dies else False
        if dies:
            found += [Turn(machine, SHORT, t, session) if arm.notice else Turn(machine, EVERY, None, session), None]
            session += 1
        elif slow in ("late", "unheard"):
            found += [Turn(machine, EVERY, t + 1 if slow == "late" else None, session), None]
        else:
            found.append(Turn(machine, SHORT if slow else EVERY, t, session))
    return found[:ROUNDS]


# -------------------------------------------------------------------- telling


def table(world: World, rows: list[Row]) -> str:
    """Differences are paired over seeds, positive where the arm is better than `equal`."""
    lines = ["| arm | mean over the run | at the end | − equal, mean | − equal, end |", "|---|---|---|---|---|"]
    equal = [row["curve"] for row in by_seed(rows, "equal")]
    shown = {arm: [row["curve"] for row in by_seed(rows, arm)] for arm in ARMS}
    shown["slow-waits"] = [slowed(curve) for curve in equal]
    for arm, curves in shown.items():
        if len(curves) == len(equal) > 1:
            lines.append(f"| {' | '.join([arm, *compared(curves, equal, world.upwards)])} |")
    return "\n".join(lines)


def slowed(curve: Curve) -> Curve:
    """Return the curve at half its pace, up to the same last step."""
    last = curve[-1][0]
    return [(2 * step, value) for step, value in curve if 2 * step < last] + [(last, at_step(curve, last / 2))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=list(WORLDS))
    parser.add_argument(
        "--to", type=Path, default=Path("studies"), help="the folder for everything; it has tuned.py's rows"
    )
    parser.add_argument("--arms", default="", help="only arms whose name has this in it")
    parser.add_argument("--default", action="store_true", help="at the product's default rate, seeds 40 to 47")
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
