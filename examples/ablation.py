"""What do the channels add? Plain RL, + SDPO, + replay, both; ToolWorld, several seeds, one command.

    python examples/ablation.py --to ablation                        all arms, 3 seeds: about 10 minutes of one core
    python examples/ablation.py --to ablation --arms "baseline|+sdpo" --seeds 0 --steps 20

    θ₀ ─▶ 256 rollouts ─▶ the calls that failed ─▶ teachers (local, simulated) ─▶ pairs per (teachers, threshold)
     └──▶ each arm × seed: the same prompts in the same order ─▶ results.jsonl ─▶ table.md, ablation.png

An arm × seed with a row in results.jsonl is not run again.

    steps to .8    the first step where the mean reward of the last three is .8; a run that never reaches it counts with
                   all its steps, so such a mean is a lower bound
    final reward   mean of the last five steps
    right pairs    share of the pairs whose chosen call is the right one
    teachers $     the endpoint's token counts at the list prices of the default teachers; nothing was paid

Not promised: anything about language models (docs/studies/ablation.md).
"""

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from local_teachers import question, serving, wrong_name

from inner import DEFAULT_TEACHERS, InnerConfig, Seeds, Teacher, ToolWorld, build_inner, publish_model
from inner.channels.hints import filter_hint
from inner.replay.actions import action_message
from inner.replay.ask import replay_trace
from inner.replay.pairs import extract_dpo_pairs, save_pairs
from inner.replay.states import TraceState
from inner.rollouts.rollout_states import rollout_states
from inner.settings.channels import ReplaySettings, SdpoSettings
from inner.settings.objectives import GrpoSettings

WORLD = ToolWorld(kinds=6, names=32)
THETA_0_STEPS = 4  # generations of 64 at θ₀, for the pairs
ALPHA, BETA = 0.1, 0.3
MAIN = ("baseline", "+sdpo", "+replay", "full")


@dataclass(frozen=True)
class Arm:
    """teachers: the number asked, 0 for no replay.   threshold: so many must agree."""

    name: str
    alpha: float = 0.0
    teachers: int = 0
    threshold: int = 2
    wrong_hint: bool = False
    lr: float | None = None
    objective: str = "dr_grpo"


ARMS = {
    arm.name: arm
    for arm in (
        Arm("baseline"),
        Arm("+sdpo", alpha=ALPHA),
        Arm("+replay", teachers=3),
        Arm("full", alpha=ALPHA, teachers=3),
        Arm("baseline, lr 5e-4", lr=5e-4),
        Arm("baseline, lr 3e-3", lr=3e-3),
        Arm("baseline, grpo", objective="grpo"),
        Arm("+sdpo, wrong hints", alpha=ALPHA, wrong_hint=True),
        Arm("+replay, 1 teacher", teachers=1, threshold=1),
        Arm("+replay, 3 of 3 agree", teachers=3, threshold=3),
        Arm("+replay, 3 of 5 agree", teachers=5, threshold=3),
    )
}


@dataclass(frozen=True)
class Pairs:
    path: Path
    count: int
    right: float
    usd: float


def main() -> None:
    given = arguments()
    torch.set_num_threads(1)
    given.to.mkdir(parents=True, exist_ok=True)
    model = given.to / "model"
    if not model.exists():
        publish_model(InnerConfig(), model)
    results = given.to / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for seed in given.seeds:
        for name in given.arms:
            if not any((row["arm"], row["seed"], row["steps"]) == (name, seed, given.steps) for row in done):
                done.append(run(ARMS[name], seed, given.steps, model, given.to))
                with results.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
                print(told(done[-1]), flush=True)
    rows = [row for row in done if row["arm"] in given.arms and row["seed"] in given.seeds]
    rows = [row for row in rows if row["steps"] == given.steps]
    (given.to / "table.md").write_text(table(rows) + "\n")
    draw(rows, given.to / "ablation.png")
    print(table(rows))


# -------------------------------------------------------------------- one run


def run(arm: Arm, seed: int, steps: int, model: Path, folder: Path) -> dict[str, Any]:
    pairs = pairs_for(arm, seed, model, folder) if arm.teachers else None
    config = InnerConfig(
        batch_size=64, lr=arm.lr, sdpo=SdpoSettings(weight=arm.alpha), grpo=GrpoSettings(objective=arm.objective)
    )
    files = {}
    if pairs is not None:
        config = replace(config, replay=ReplaySettings(weight=BETA, pairs=pairs.path.name))
        files = {"pairs": pairs.path}
    loop = build_inner(config, model, files, Seeds(data=seed, noise=seed))
    if arm.wrong_hint:
        loop.trainer.hint = wrong_hint  # pyright: ignore[reportAttributeAccessIssue]
    rewards: list[float] = []
    numbers: list[dict[str, float]] = []

    def stop() -> bool:
        numbers.append(loop.pop_metrics())
        rewards.append(numbers[-1]["reward"])
        return len(rewards) >= steps

    wall, cpu = time.monotonic(), time.process_time()
    loop.train(stop)
    return {
        "arm": arm.name,
        "seed": seed,
        "steps": steps,
        "rewards": [round(r, 4) for r in rewards],
        "wall_s": round(time.monotonic() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "coverage": {k: round(numbers[0][k], 3) for k in ("sdpo_coverage", "replay_coverage") if k in numbers[0]},
        "pairs": pairs.count if pairs else 0,
        "right_pairs": round(pairs.right, 3) if pairs else None,
        "usd": round(pairs.usd, 4) if pairs else 0.0,
    }


def wrong_hint(row: Any, error: str) -> str | None:
    """Return the control's hint: as certain as the right hint, but wrong."""
    wrong = wrong_name(WORLD, row["kind"])
    return filter_hint(f"hint use {wrong}" if "not found" in error else None, wrong, error)


# -------------------------------------------------------------------- rollouts → teachers → pairs


def pairs_for(arm: Arm, seed: int, model: Path, folder: Path) -> Pairs:
    states = failed_states(seed, model, folder)
    with serving(WORLD) as url:
        prices = [DEFAULT_TEACHERS[i % 3] for i in range(arm.teachers)]
        teachers = [
            Teacher(f"expert-{i}", p.prompt_usd, p.completion_usd, base_url=url, key_env=None, max_tokens=64)
            for i, p in enumerate(prices)
        ]
        asked = asyncio.run(replay_trace(states, teachers, 100.0, agreement_threshold=arm.threshold, progress=False))
    found = extract_dpo_pairs(states, asked, arm.threshold)
    path = folder / f"pairs-{arm.teachers}-{arm.threshold}-{seed}.jsonl"
    save_pairs(found, path)
    right = fmean(is_right(pair["state_messages"], pair["chosen"]) for pair in found)
    return Pairs(path, len(found), right, asked.spent_usd)


def failed_states(seed: int, model: Path, folder: Path) -> list[TraceState]:
    """Return the failed calls of θ₀ in a few generations without learning."""
    config = InnerConfig(batch_size=64, lr=1e-12)
    loop = build_inner(config, model, {}, Seeds(data=1000 + seed, noise=1000 + seed))
    states: list[TraceState] = []
    taken = 0

    def stop() -> bool:
        nonlocal taken
        sample = loop.sample(64)
        for i, rollout in enumerate(sample["rollouts"]):
            states.extend(rollout_states(rollout, f"{seed}/{taken}.{i}", sample["tools"]))
        taken += 1
        return taken >= THETA_0_STEPS

    loop.train(stop)
    return [state for state in states if state.get("error")]


def is_right(messages: Any, action: str) -> bool:
    kind, _, _ = question(messages)
    calls = action_message(action).get("tool_calls") or []
    return bool(calls) and calls[0]["function"]["name"] == WORLD.right_name(kind)


# -------------------------------------------------------------------- telling


def steps_to(rewards: list[float], level: float = 0.8) -> int | None:
    return next((i for i in range(3, len(rewards) + 1) if fmean(rewards[i - 3 : i]) >= level), None)


def told(row: dict[str, Any]) -> str:
    reached = steps_to(row["rewards"])
    return (
        f"{row['arm']:24s} seed {row['seed']}  to .8: {reached or 'never'}  final {fmean(row['rewards'][-5:]):.3f}  "
        f"{row['wall_s']:.0f} s ({row['cpu_s']:.0f} s CPU)  {row['pairs']} pairs  {row['coverage']}"
    )


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | steps to .8 | final reward | wall s | CPU s | pairs | right pairs | teachers $ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["arm"] for row in rows):
        runs = [row for row in rows if row["arm"] == name]
        reached = [steps_to(row["rewards"]) for row in runs]
        mean = fmean(r or row["steps"] for r, row in zip(reached, runs, strict=True))
        each = ", ".join(str(r or "–") for r in reached)
        finals = [fmean(row["rewards"][-5:]) for row in runs]
        right = f"{fmean(row['right_pairs'] for row in runs):.0%}" if runs[0]["pairs"] else ""
        lines.append(
            f"| {name} | {'≥ ' if None in reached else ''}{mean:.0f} ({each}) | {fmean(finals):.2f} "
            f"({', '.join(f'{f:.2f}' for f in finals)}) | {fmean(r['wall_s'] for r in runs):.0f} | "
            f"{fmean(r['cpu_s'] for r in runs):.0f} | {fmean(r['pairs'] for r in runs):.0f} | {right} | "
            f"{fmean(r['usd'] for r in runs):.2f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["arm"] for row in rows))
    groups = [[n for n in names if n in MAIN], [n for n in names if n not in MAIN]]
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    for panel, group, title in zip(panels, groups, ("the channels", "controls and teachers"), strict=True):
        for name in group:
            curves = [smooth(row["rewards"]) for row in rows if row["arm"] == name]
            steps = range(1, len(curves[0]) + 1)
            (line,) = panel.plot(steps, [fmean(c) for c in zip(*curves, strict=True)], label=name)
            low, high = ([f(c) for c in zip(*curves, strict=True)] for f in (min, max))
            panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        panel.axhline(0.8, color="grey", linewidth=0.5)
        panel.set(title=title, xlabel="step", ylim=(0, 1))
        if group:
            panel.legend(fontsize=7, loc="lower right")
    panels[0].set_ylabel("mean reward (of 3 steps)")
    figure.savefig(to, dpi=120)


def smooth(rewards: list[float]) -> list[float]:
    return [fmean(rewards[max(0, i - 2) : i + 1]) for i in range(len(rewards))]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("ablation"), help="the folder for everything")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--arms", type=lambda text: text.split("|"), default=list(ARMS), help='"baseline|+sdpo|…"')
    given = parser.parse_args()
    if unknown := [name for name in given.arms if name not in ARMS]:
        parser.error(f"no arm is called {unknown[0]!r}; there are: {' | '.join(ARMS)}")
    return given


if __name__ == "__main__":
    main()
