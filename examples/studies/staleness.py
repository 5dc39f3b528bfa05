"""What do old rollouts cost, and what do importance weights restore? Four replicas, two tasks, S outer steps of age.

    python examples/studies/staleness.py toolworld --to studies          about an hour of one core
    python examples/studies/staleness.py errands --to studies            an hour; rollouts of 49 tokens

    θ₀ … θ_t−S … θ_t ──▶ outer step t: each replica trains H inner steps, each on 16 rollouts
              └ one sampler at θ_max(0, t−S) makes all of them before it begins

    own            each replica samples before each inner step, from its weights of that moment; no sampler
    S0 … S8        S = 0: of θ_t itself, so 0 to H−1 inner steps old; S: S·H to S·H + H−1
    -off           the loss as if the rollouts were the replica's own
    -token         each token's loss × min(π_now / π_sampled, 2)           TRL's "token_truncate"; what actors have
    -sequence      each rollout's × Π π_now / π_sampled; 0 if over 3       TRL's "sequence_mask"; TRL's default
    -guard         the replica samples itself in place of rollouts beyond .2 nats per token, as in the product

Without -guard, the guard against distant policies (inner/rollouts/recording/drift.py) is off.  Random numbers of the
sampler depend on the seed and t alone, so arms of one seed differ in weights only.

Not promised: bundles that come late or not at all; language models; engines whose log-probs are rounded otherwise.
"""

import argparse
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from fleet import Turn, flat, put, scripted_steps, with_nesterov
from replicas import by_seed
from torch import Tensor
from transformers import set_seed
from trials import STUDENT, Curve, Paired, Row, Trial, area, paired, read_rows, run_missing
from worlds import WORLDS, World, mean_reward

from diloco import OuterConfig
from inner import InnerConfig, InnerLoop, ToolWorld
from inner.data.order import Share
from inner.rollouts.recording.acting import Sampler
from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.drift import FARTHEST, drift_of
from inner.rollouts.recording.recorded import BundlePlace, Unfit, record_rollouts
from inner.settings.task import ToolworldSettings
from rendezvous.agreement.rules import Rules

SEEDS = range(8)
MACHINES, EVERY, BATCH = 4, 4, 16
LR = 1e-3  # for four replicas: half of the product's default, so that a replica's own rollouts are safe
VALUED = 2  # outer steps from one point of a curve to the next
TASK, PROMPTS = ToolworldSettings(kinds=4, names=8), 128
FIRST = Path(__file__).parents[2] / "docs" / "studies" / "rows" / "staleness.jsonl"  # the rows of the first task
FAR = FARTHEST  # nats per token: the guard's limit
MARGIN = 0.05  # of reward
AGES, CORRECTIONS = (0, 1, 2, 4, 8), ("off", "token", "sequence")
MODES = {"token": ("token_truncate", 2.0), "sequence": ("sequence_mask", 3.0)}  # TRL's name, and clip_max


def config(batch: int, lr: float) -> InnerConfig:
    return InnerConfig(batch_size=batch, lr=lr, toolworld=TASK)


def reward(loop: InnerLoop) -> float:
    return mean_reward(loop, ToolWorld(kinds=TASK.kinds, names=TASK.names).rows(PROMPTS, seed=99))


SMALL = replace(WORLDS["toolworld"], name="toolworld-4x8", lr=LR, config=config, value=reward)


@dataclass(frozen=True)
class Arm:
    """age: S, the age of the sampler's weights; None: no sampler."""

    age: int | None = None
    correction: str = "off"
    guarded: bool = False


@dataclass(frozen=True)
class Study:
    """rounds: outer steps.   file: the name of its rows."""

    world: World
    arms: Mapping[str, Arm]
    rounds: int
    file: str


ARMS = {"own": Arm(), **{f"S{age}-{kind}": Arm(age, kind) for age, kind in product(AGES, CORRECTIONS)}}
LONG_ARMS = {
    **{f"S{age}-{kind}": Arm(age, kind) for age, kind in product((0, 1, 2), MODES)},
    **{f"S{age}-{kind}-guard": Arm(age, kind, guarded=True) for age, kind in product((0, 1), MODES)},
}
ALL_ARMS = ARMS | LONG_ARMS
STUDIES = {
    "toolworld": Study(SMALL, ARMS, rounds=16, file="staleness"),
    "errands": Study(replace(WORLDS["errands"], lr=LR), LONG_ARMS, rounds=12, file="staleness-errands"),
}


def main() -> None:
    given = arguments()
    study = STUDIES[given.task]
    study.world.prepare(given.to)
    trials = [Trial(arm, seed) for seed in given.seeds for arm in given.arms or study.arms]
    rows = run_missing(trials, partial(run, given.task, given.to), given.to / f"{study.file}.jsonl", given.workers)
    told = [table(rows), comparisons(rows), guard(rows)]
    if given.task == "errands":
        told += [passed(rows), decision(read_rows(FIRST), rows)]
    print("\n\n".join(told))


# -------------------------------------------------------------------- one trial


class Handed:
    """The places of one replica: bundles that are made before its outer step, by generation.

    drifts: the guard's measure of each bundle when its place comes, if `measures`.
    passed: the generations whose bundles the guard passed over.
    """

    def __init__(self, arm: Arm, measures: bool) -> None:
        self.arm, self.measures = arm, measures
        self.bundles: dict[int, Bundle] = {}
        self.drifts: list[float] = []
        self.passed: list[int] = []
        self.loop: InnerLoop | None = None

    def join(self, loop: InnerLoop) -> None:
        """Let a loop train on these bundles, and with this correction."""
        trainer = loop.trainer  # type: ignore[attr-defined]
        record_rollouts(trainer, self)
        if self.arm.correction in MODES:
            mode, most = MODES[self.arm.correction]
            trainer.vllm_importance_sampling_mode, trainer.vllm_importance_sampling_clip_max = mode, most
        self.loop = loop

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        bundle = self.bundles.pop(place.generation)
        plain = replace(bundle, logprobs=None)
        if self.measures:
            self.drifts.append(drift_of(self.loop.trainer, bundle))  # type: ignore[union-attr]
        why = unfit(bundle if self.arm.guarded else plain)  # the guard looks at log-probs
        if isinstance(why, TooFar):
            self.passed.append(place.generation)
            return None
        if why:
            raise ValueError(f"{place}: {why}")
        return bundle if self.arm.correction in MODES else plain

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        if place.generation not in self.passed:
            raise AssertionError("a replica sampled by itself")
        return made


class FleetSampler(Sampler):
    """Samples for all replicas at once.   share: the first replica's. One generation serves one outer step."""

    def rows(self, share: Share, generation: int) -> list[dict[str, Any]]:
        shares = [Share(share.seed + machine) for machine in range(MACHINES)]
        return [row for one in shares for row in super(FleetSampler, self).rows(one, generation)]


class Actor:
    """Makes the rollouts of an outer step for all replicas, with a θ of its choice."""

    def __init__(self, loop: InnerLoop, seed: int) -> None:
        self._loop, self._seed = loop, seed
        self._sampler = FleetSampler(loop.trainer)  # type: ignore[attr-defined]

    def fill(self, places: Sequence[Handed], t: int, theta: Tensor) -> None:
        """Give each replica the bundles of its generations in outer step t."""
        put(self._loop, theta)
        set_seed(1000 * self._seed + t)
        made = self._sampler.sample(Share(1000 * self._seed), t)
        for i in range(MACHINES * EVERY):
            places[i // EVERY].bundles[EVERY * t + i % EVERY] = part(made, i * BATCH, BATCH)


def part(bundle: Bundle, first: int, count: int) -> Bundle:
    """Return some of a bundle's rollouts."""
    names = ("prompts", "completions", "prompt_ids", "ids", "mask", "logprobs", "rewards", "environments")
    parts = {name: getattr(bundle, name) for name in names}
    return replace(bundle, **{k: None if v is None else v[first : first + count] for k, v in parts.items()})


def run(task: str, folder: Path, trial: Trial) -> tuple[Curve, Row]:
    torch.set_num_threads(1)
    study = STUDIES[task]
    arm = study.arms[trial.arm]
    build = partial(study.world.build, folder, trial.seed, lr=study.world.lr)
    places = [Handed(arm, measures=machine == 0) for machine in range(MACHINES)]
    judge = build(0, batch=BATCH)
    actor = None if arm.age is None else Actor(build(0, batch=EVERY * BATCH), trial.seed)
    thetas, loops = [flat(judge)], list[InnerLoop]()

    def script(t: int) -> list[Turn]:
        if actor is not None:
            actor.fill(places, t, thetas[max(0, t - (arm.age or 0))])
        return [Turn(machine, EVERY, t) for machine in range(MACHINES)]

    def build_one(machine: int, session: int, start: int) -> InnerLoop:
        loops.append(build(machine, batch=BATCH))
        if actor is not None:
            places[machine].join(loops[-1])
        return loops[-1]

    steps = fleet_steps(thetas[0].clone(), build_one, script)
    for theta in islice(steps, study.rounds):
        thetas.append(theta.clone())  # one by one: `script` reads them
    steps.close()
    return curve_of(study.world, judge, thetas), told(arm, places, loops)


def fleet_steps(
    theta: Tensor, build: Callable[..., InnerLoop], script: Callable[[int], list[Turn]]
) -> Generator[Tensor]:
    """Return the fleet's outer steps, at the product's default outer rate."""
    outer = with_nesterov(lambda mean, deltas: float(OuterConfig().lr), OuterConfig().momentum)
    return scripted_steps(theta, build, script, rules=Rules(sync_every=EVERY), outer=outer)


def curve_of(world: World, judge: InnerLoop, thetas: Sequence[Tensor]) -> Curve:
    found: Curve = []
    for t in range(0, len(thetas), VALUED):
        put(judge, thetas[t])
        found.append((EVERY * t, world.value(judge)))
    return found


def told(arm: Arm, places: Sequence[Handed], loops: Sequence[InnerLoop]) -> Row:
    """Return the first trainer's drift by outer steps, and the means of the loss's weights and the masked share."""
    metrics = [loop.pop_metrics() for loop in loops]
    drifts = places[0].drifts
    found: Row = {"drift": [round(fmean(drifts[i : i + EVERY]), 4) for i in range(0, len(drifts), EVERY)]}
    names = [name for name in ("importance_ratio", "importance_masked") if name in metrics[0]]
    if bool(names) != (arm.age is not None and arm.correction in MODES):
        raise AssertionError(f"{arm}: the loss was weighed by {names}")
    if arm.guarded:
        found["passed"] = round(sum(len(one.passed) for one in places) / MACHINES / len(drifts), 4)
    return found | {name: round(fmean(one[name] for one in metrics), 4) for name in names}


# -------------------------------------------------------------------- telling


def last_third(curve: Curve) -> float:
    """Return the mean over the last third of the run, which depends less on single points than the end."""
    return area([point for point in curve if 3 * point[0] >= 2 * curve[-1][0]])


OUTCOMES: tuple[Callable[[Curve], float], ...] = (area, last_third)


def is_collapsed(row: Row) -> bool:
    return last_third(row["curve"]) < 0.5


def gap(a: list[Row], b: list[Row], of: Callable[[Curve], float]) -> Paired:
    return paired(*([of(row["curve"]) for row in rows] for rows in (a, b)))


def difference(a: list[Row], b: list[Row], of: Callable[[Curve], float]) -> str:
    """Return mean ± standard error of a − b, paired over seeds; a star if the 95 % interval excludes 0."""
    return with_error(gap(a, b, of), len(a))


def with_error(found: Paired, count: int) -> str:
    error = found.half_width / STUDENT[count - 1][1]
    return f"{found.mean:+.3f} ± {error:.3f}{' *' if abs(found.mean) > found.half_width > 0 else ''}"


def table(rows: list[Row]) -> str:
    """Return one line for each arm, with differences from `own`, or from S0-token where no trial is `own`."""
    base = "own" if by_seed(rows, "own") else "S0-token"
    lines = [
        f"| arm | mean | last third | − {base}, mean | − {base}, last third | collapsed | drift | weight | masked |"
    ]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    against = by_seed(rows, base)
    for arm in ALL_ARMS:
        mine = by_seed(rows, arm)
        if len(mine) == len(against) > 1:
            means = [f"{fmean(of(row['curve']) for row in mine):.3f}" for of in OUTCOMES]
            cells = [*means, *(difference(mine, against, of) for of in OUTCOMES), *seen(mine)]
            lines.append(f"| {' | '.join([arm, *cells])} |")
    return "\n".join(lines)


def seen(rows: list[Row]) -> list[str]:
    """Return four cells: the number of collapsed seeds; means over seeds, if known; of drifts the median."""
    drifts = [fmean(row["drift"]) for row in rows if row["drift"]]
    names = ("importance_ratio", "importance_masked")
    means = [f"{fmean(row[name] for row in rows):.3f}" if name in rows[0] else "" for name in names]
    return [f"{sum(map(is_collapsed, rows))}", f"{median(drifts):.3f}" if drifts else "", *means]


def comparisons(rows: list[Row]) -> str:
    """Return differences, positive if the first is better."""
    lines = ["| first − second | mean | last third |", "|---|---|---|"]
    pairs = [(f"S{age}-{kind}", f"S{age}-off") for age in AGES for kind in MODES]
    pairs += [(f"S{age}-sequence", f"S{age}-token") for age in AGES]
    pairs += [(f"S8-{kind}", f"S0-{kind}") for kind in CORRECTIONS]
    pairs += [(f"S{b}-{kind}", f"S{a}-{kind}") for kind in CORRECTIONS for a, b in pairwise(AGES)]
    pairs += [(f"S{age}-sequence-guard", f"S{age}-token-guard") for age in AGES]
    pairs += [(f"S{age}-{kind}-guard", f"S{age}-{kind}") for age in AGES for kind in MODES]
    for first, second in pairs:
        a, b = by_seed(rows, first), by_seed(rows, second)
        if len(a) == len(b) > 1:
            lines.append(f"| {first} − {second} | {' | '.join(difference(a, b, of) for of in OUTCOMES)} |")
    return "\n".join(lines)


def guard(rows: list[Row]) -> str:
    """Return trials by correction: did the drift pass the guard's limit in some outer step, and did they collapse?

    Warned: it passed before the value had fallen to half of its best.
    """
    lines = ["| correction | collapsed, warned | collapsed, not warned | far, but well | never far, well |"]
    lines += ["|---|---|---|---|---|"]
    for kind in CORRECTIONS:
        mine = [row for row in rows if row["arm"].endswith(kind)]
        if not mine:
            continue
        bad, good = ([row for row in mine if is_collapsed(row) is which] for which in (True, False))
        warned, far = sum(map(is_warned, bad)), sum(max(row["drift"]) > FAR for row in good)
        lines.append(f"| {kind} | {warned} | {len(bad) - warned} | {far} | {len(good) - far} |")
    return "\n".join(lines)


def is_warned(row: Row) -> bool:
    best = max(range(len(row["curve"])), key=lambda i: row["curve"][i][1])
    level = row["curve"][best][1] / 2
    fallen = next((step for step, value in row["curve"][best:] if value < level), row["curve"][-1][0])
    return any(drift > FAR and EVERY * t < fallen for t, drift in enumerate(row["drift"]))


def passed(rows: list[Row]) -> str:
    """Return the shares of bundles that the guard passed over: the mean over seeds, and that of each seed."""
    lines = ["| arm | passed over | by seed |", "|---|---|---|"]
    for arm in (name for name, arm in ALL_ARMS.items() if arm.guarded):
        if shares := [row["passed"] for row in by_seed(rows, arm)]:
            lines.append(f"| {arm} | {fmean(shares):.3f} | {', '.join(f'{share:.3f}' for share in shares)} |")
    return "\n".join(lines)


def decision(first: list[Row], rows: list[Row]) -> str:
    """Return the conditions for another mode in the product, by the second page.   first: the other task's rows.

    Differences are sequence − token: the mean, its two-sided 95 % interval, and the lower one-sided 95 % bound.
    """

    def gaps(age: int, end: str = "", of: Sequence[Callable[[Curve], float]] = OUTCOMES) -> list[Paired]:
        return [gap(*(by_seed(rows, f"S{age}-{kind}{end}") for kind in ("sequence", "token")), one) for one in of]

    both = [[*by_seed(rows, arm), *by_seed(first, arm)] for arm in ("S0-sequence", "S0-token")]
    over = paired(*([row["passed"] for row in by_seed(rows, f"S1-{kind}-guard")] for kind in ("sequence", "token")))
    gains = any(one.mean > one.half_width for one in gaps(1, "-guard")) or over.mean < -over.half_width
    conditions = [
        ("a. S = 1, no guard: better on both outcomes", gaps(1), all(one.mean > one.half_width for one in gaps(1))),
        ("b. S = 0, no guard: within the margin over the run", gaps(0, of=[area]), is_within(gaps(0, of=[area]))),
        ("c. the same over both tasks", [gap(*both, area)], is_within([gap(*both, area)])),
        ("d. S = 0, guard: within the margin on both outcomes", gaps(0, "-guard"), is_within(gaps(0, "-guard"))),
        ("e. S = 1, guard: within the margin on both outcomes", gaps(1, "-guard"), is_within(gaps(1, "-guard"))),
        ("f. S = 1, guard: better on an outcome, or less passed over", [*gaps(1, "-guard"), over], gains),
    ]
    lines = ["| condition | sequence − token | holds |", "|---|---|---|"]
    lines += [
        f"| {what} | {'; '.join(map(interval, found))} | {'yes' if holds else 'no'} |"
        for what, found, holds in conditions
    ]
    word = "changes to sequence_mask" if all(holds for *_, holds in conditions) else "stays token_truncate"
    return "\n".join([*lines, "", f"By these conditions, the mode {word}."])


def is_within(found: list[Paired]) -> bool:
    return all(one.lower > -MARGIN for one in found)


def interval(found: Paired) -> str:
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return f"{found.mean:+.3f} [{low:+.3f}, {high:+.3f}], bound {found.lower:+.3f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", default="toolworld", choices=list(STUDIES))
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=list(SEEDS))
    parser.add_argument("--arms", type=lambda text: text.split(","), help=", ".join(ARMS | LONG_ARMS))
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    given = parser.parse_args()
    arms = STUDIES[given.task].arms
    if unknown := [name for name in given.arms or () if name not in arms]:
        parser.error(f"no arm is called {unknown[0]!r}; there are: {', '.join(arms)}")
    return given


if __name__ == "__main__":
    main()
