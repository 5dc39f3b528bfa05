"""Do scores of single turns help beside a reward? ToolWorld, four kinds of scores, a right or a noisy reward.

    python examples/studies/process.py --to studies          about 45 minutes of one core

    reward R     1 for the right number at the end          reward N     is wrong for 1 rollout in 4
    X            the reward alone
    X-plurality, X-weighted, X-variance        and three teachers' votes on each turn of the policy's own rollouts
    X-trained    and a head that was trained once on these teachers' answers in 400 recorded states, without a teacher
    …-quarter                                  the same with weight .25 beside the reward, not 1
    X-weighted-rest, X-trained-rest            with credit for the turns before, too

One machine, 160 inner steps of 32 rollouts; the value of θ is the right reward of 256 held-out prompts, sampled.

Not promised: anything about language models, or teachers that share more of their mistakes (docs/studies/process.md).
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from trials import Curve, Row, Trial, area, paired, run_missing
from worlds import NAMES, PROMPTS

from inner import InnerConfig, InnerLoop, Seeds, ToolWorld, TraceState, build_inner, publish_model, train_process_head
from inner.settings.channels import ProcessSettings
from inner.settings.task import RewardSettings, ToolworldSettings
from inner.train.build import load_start

STEPS, BATCH, EVERY = 160, 32, 10
SEEDS = range(8)
SHAPES = ("plurality", "weighted", "variance", "trained")
KINDS = (*SHAPES, *(f"{shape}-quarter" for shape in SHAPES), "weighted-rest", "trained-rest")
ARMS = tuple(reward + kind for reward in ("R", "N") for kind in ("", *(f"-{kind}" for kind in KINDS)))
CODE = Path(__file__).with_name("process_scores.py")
HEAD = "head.safetensors"
RECORDED = 400  # states that the head is trained on


def main() -> None:
    given = arguments()
    prepare(given.to)
    trials = [Trial(arm, seed) for seed in given.seeds for arm in given.arms]
    rows = run_missing(trials, partial(run, given.to), given.to / "process.jsonl", given.workers)
    text = f"{table(rows)}\n\n{comparisons(rows)}"
    (given.to / "process.md").write_text(text + "\n")
    draw(rows, given.to / "process.png")
    print(text)


def config_of(arm: str) -> InnerConfig:
    """Return the settings of one arm."""
    kind = arm[2:]
    shape, _, option = kind.partition("-")
    process = None
    if shape:
        file = {"head": HEAD} if shape == "trained" else {"function": f"{CODE.name}:{shape}"}
        weight = 0.25 if option == "quarter" else 1.0
        process = ProcessSettings(weight=weight, credit="rest" if option == "rest" else "turn", **file)
    told = {f"{CODE.name}:noisy": 1.0, f"{CODE.name}:right": 0.0}  # the right reward is logged, and teaches nothing
    rewards = RewardSettings(functions=told) if arm[0] == "N" else RewardSettings()
    return InnerConfig(
        batch_size=BATCH, lr=1e-3, process=process, rewards=rewards, toolworld=ToolworldSettings(names=NAMES)
    )


def prepare(folder: Path) -> None:
    """Write the start model, and a head that is trained once on recorded states."""
    model = folder / "toolworld"
    folder.mkdir(parents=True, exist_ok=True)
    if not model.exists():
        publish_model(config_of("R"), model)
    if not (folder / HEAD).exists():
        head, loss = train_process_head(
            load_start(model, "float32")[0], ToolWorld(names=NAMES).tokenizer(), *recorded()
        )
        head.save(folder / HEAD)
        print(f"head: {loss:.3f} nats", flush=True)


def recorded() -> tuple[list[TraceState], list[object]]:
    """Return first turns of prompts that no trial has, and the three teachers' actions there."""
    from process_scores import answers

    states: list[TraceState] = [
        {"state_id": str(i), "state_messages": row["prompt"], "student_action": "giveup"}
        for i, row in enumerate(ToolWorld(names=NAMES).rows(RECORDED, seed=77))
    ]
    return states, answers(states)


def run(folder: Path, trial: Trial) -> Curve:
    torch.set_num_threads(1)
    seeds = Seeds(data=1000 * trial.seed, noise=1000 * trial.seed)
    files = {"process": CODE, "reward.noisy": CODE, "reward.right": CODE, "process_head": folder / HEAD}
    loop = build_inner(config_of(trial.arm), folder / "toolworld", files, seeds)
    curve, taken = [(0, value(loop))], 0

    def stop() -> bool:
        nonlocal taken
        taken += 1
        if taken % EVERY == 0:
            curve.append((taken, value(loop)))
        return taken >= STEPS

    loop.train(stop)
    return curve


def value(loop: InnerLoop) -> float:
    """Return the mean right reward of 256 held-out prompts."""
    rows = ToolWorld(names=NAMES).rows(PROMPTS, seed=99)
    scores = loop.score(rows, greedy=False, seed=99)  # type: ignore[attr-defined]
    return fmean(scores.get("right", scores["reward"]))


# -------------------------------------------------------------------- telling


def table(rows: list[Row]) -> str:
    lines = ["| arm | at the end | mean over the run |", "|---|---|---|"]
    for arm in [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]:
        curves = curves_of(rows, arm)
        end, mean = fmean(curve[-1][1] for curve in curves), fmean(area(curve) for curve in curves)
        lines.append(f"| {arm} | {end:.3f} | {mean:.3f} |")
    return "\n".join(lines)


def comparisons(rows: list[Row]) -> str:
    """Return differences paired over seeds, positive if the scores help; with 95 % intervals."""
    lines = ["| first − second | mean over the run | at the end |", "|---|---|---|"]
    pairs = [(f"{reward}-{kind}", reward) for reward in "RN" for kind in KINDS]
    pairs += [(f"{reward}-{shape}-rest", f"{reward}-{shape}") for reward in "RN" for shape in ("weighted", "trained")]
    pairs += [(f"{reward}-trained", f"{reward}-weighted") for reward in "RN"]
    for first, second in pairs:
        a, b = curves_of(rows, first), curves_of(rows, second)
        if len(a) == len(b) > 1:
            means = paired([area(c) for c in a], [area(c) for c in b])
            ends = paired([c[-1][1] for c in a], [c[-1][1] for c in b])
            lines.append(f"| {first} − {second} | {means} | {ends} |")
    return "\n".join(lines)


def curves_of(rows: list[Row], arm: str) -> list[Sequence[Sequence[float]]]:
    return [row["curve"] for row in sorted(rows, key=lambda row: row["seed"]) if row["arm"] == arm]


def draw(rows: list[Row], to: Path) -> None:
    """Draw seeds as thin lines and means as thick ones; left: the right reward, right: the noisy one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for panel, name in zip(panels, "RN", strict=True):
        for number, arm in enumerate((name, *(f"{name}-{shape}" for shape in SHAPES))):
            curves = curves_of(rows, arm)
            for curve in curves:
                panel.plot(*zip(*curve, strict=True), color=f"C{number}", lw=0.4, alpha=0.5)
            if curves:
                means = [fmean(values) for values in zip(*([v for _, v in c] for c in curves), strict=True)]
                panel.plot([step for step, _ in curves[0]], means, color=f"C{number}", lw=2, label=arm)
        panel.set(xlabel="inner steps", ylabel="held-out reward" if name == "R" else None)
        panel.legend(fontsize=8)
    figure.savefig(to, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("studies"), help="the folder for everything")
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=list(SEEDS))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS), help=", ".join(ARMS))
    parser.add_argument("--workers", type=int, default=1, help="processes, a core each")
    given = parser.parse_args()
    if unknown := [name for name in given.arms if name not in ARMS]:
        parser.error(f"no arm is called {unknown[0]!r}; there are: {', '.join(ARMS)}")
    return given


if __name__ == "__main__":
    main()
