"""Do hints and pairs add to plain GRPO on a pretrained model? SmolLM2 at a help desk, the notes' four arms.

    python examples/studies/channels.py --to studies       four arms × five paired seeds, then two more: four core hours

    θ₀ ─▶ 64 rollouts ─▶ the calls that failed ─▶ three teachers ─▶ two agree ─▶ pairs of this seed
     └──▶ each arm × seed: the same prompts in the same order ─▶ channels.jsonl ─▶ table

The teachers are behind a real endpoint on this machine: the checkpoint, which is the same model after more training,
and two scripts that are right four times in five and share half of their mistakes.

Run `make smollm2` first. It needs no GPU and no account. The same command continues a stopped study.

Not promised: anything about other models or tasks (docs/studies/channels.md).
"""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from threading import Lock
from typing import Any

import desk
import torch
import trl.trainer.utils as trl_utils
from transformers import AutoTokenizer
from trials import Curve, Paired, Row, Trial, paired, read_rows, run_missing

from inner import DEFAULT_TEACHERS, InnerConfig, InnerLoop, Seeds, Teacher, build_inner, publish_model
from inner.models.lora import ADAPTER, load_adapter, save_adapter
from inner.replay.actions import action_message
from inner.replay.ask import replay_trace
from inner.replay.pairs import extract_dpo_pairs, save_pairs
from inner.replay.states import TraceState
from inner.rollouts.rollout_states import rollout_states
from inner.settings.channels import ReplaySettings, SdpoSettings
from inner.settings.task import DataSettings, LoraSettings, SamplingSettings
from inner.train.build import load_start

sys.path.insert(0, str(Path(__file__).parents[2]))  # not examples/, because its verl/ and monarch/ look like packages
from examples.local_teachers import serving_replies

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
ARMS = {"baseline": (0.0, 0.0), "+sdpo": (0.1, 0.0), "+replay": (0.0, 0.3), "full": (0.1, 0.3)}  # α, β
LATER = {"+replay, anchored": (0.0, 0.3), "full, anchored": (0.1, 0.3)}  # arms added after seed 0: nll_weight = 1
WARM_STEPS, STEPS, EVERY, BATCH, GROUP, LR = 60, 24, 12, 16, 8, 1e-3
TEACHER_SEED, TEACHER_STEPS = 100, 36
HELD, FAILED = 64, 64  # held-out prompts; rollouts of θ₀ for the pairs
ACCURACY = 0.8


def main() -> None:
    given = arguments()
    prepare(given.to)
    if not (given.to / "teacher").exists():
        train_teacher(given.to)
    for seed in given.seeds:
        if not (given.to / f"seed-{seed}.json").exists():
            prepare_seed(given.to, seed)
    for arms in (ARMS, LATER):
        trials = [Trial(arm, seed) for seed in given.seeds for arm in arms]
        run_missing(trials, partial(run, given.to), given.to / "channels.jsonl", given.workers)
    rows = read_rows(given.to / "channels.jsonl")
    print(f"{table(rows)}\n\n{hypotheses(rows)}")


def config_of(arm: str, pairs: str | None = None) -> InnerConfig:
    alpha, beta = (ARMS | LATER)[arm]
    return InnerConfig(
        model="start", dtype="bfloat16", batch_size=BATCH, lr=LR, data=DataSettings(prompts="prompts.jsonl"),
        lora=LoraSettings(r=8, alpha=16.0, targets=["q_proj", "v_proj"]),
        sampling=SamplingSettings(
            environment="desk.py:Desk", num_generations=GROUP, max_completion_length=64, max_tool_calling_iterations=1
        ),
        sdpo=SdpoSettings(weight=alpha),
        replay=ReplaySettings(weight=beta, pairs=pairs if beta else None, nll_weight=float(arm in LATER)),
    )  # fmt: skip


def prepare(folder: Path) -> None:
    """Write θ₀ with an adapter that changes nothing, and the prompts, once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in desk.rows(480, 0, desk.TRAINED)))
    if not (folder / "start").exists():
        desk.write_start(SMOLLM2, folder / "start", WARM_STEPS)
    if not (folder / "model").exists():
        publish_model(replace(config_of("baseline"), model=str(folder / "start")), folder / "model")


def open_loop(folder: Path, arm: str, seed: int, lr: float = LR) -> InnerLoop:
    pairs = f"pairs-{seed}.jsonl"
    files = {"prompts": folder / "prompts.jsonl", "environment": Path(desk.__file__)}
    if (ARMS | LATER)[arm][1]:
        files["pairs"] = folder / pairs
    torch.set_num_threads(1)
    trl_utils._use_triton = lambda device: True  # type: ignore[attr-defined]  # head of completions alone, as on a GPU
    return build_inner(
        replace(config_of(arm, pairs), lr=lr), folder / "model", files, Seeds(data=1000 * seed, noise=1000 * seed)
    )


# -------------------------------------------------------------------- a trial


def run(folder: Path, trial: Trial, steps: int = STEPS) -> tuple[Curve, Row]:
    loop = open_loop(folder, trial.arm, trial.seed)
    facts = json.loads((folder / f"seed-{trial.seed}.json").read_text())
    curve = [(0, facts.pop("start"))]
    rewards, tokens = train(loop, steps, lambda taken: curve.append((taken, value(loop, trial.seed))))
    return curve, {"rewards": rewards, "tokens": tokens, **facts}


def train(loop: InnerLoop, steps: int, look: Callable[[int], None]) -> tuple[list[float], int]:
    """Train; return the mean reward of each step, and the number of sampled tokens.   look: called after each EVERY."""
    rewards, tokens = list[float](), 0.0

    def stop() -> bool:
        nonlocal tokens
        numbers = loop.pop_metrics()
        rewards.append(round(numbers["reward"], 4))
        tokens += BATCH * numbers["completion_length"]
        if len(rewards) % EVERY == 0:
            look(len(rewards))
        return len(rewards) >= steps

    loop.train(stop)
    return rewards, round(tokens)


def value(loop: InnerLoop, seed: int) -> float:
    """Return the mean sampled reward of held-out prompts: other orders, in phrases that θ₀ never saw."""
    rows = desk.rows(HELD, 99, desk.HELD_OUT)
    return fmean(loop.score(rows, greedy=False, seed=seed)["reward"])  # type: ignore[attr-defined]


# -------------------------------------------------------------------- the teachers, and their pairs


def train_teacher(folder: Path) -> None:
    """Train the teacher checkpoint, with hints, more steps, and a seed that no arm has."""
    (folder / f"seed-{TEACHER_SEED}.json").write_text("{}")
    loop = open_loop(folder, "+sdpo", TEACHER_SEED)
    rewards, _ = train(loop, TEACHER_STEPS, lambda taken: print(taken, value(loop, TEACHER_SEED), flush=True))
    print("teacher:", rewards, flush=True)
    save_adapter(loop.model, folder / "teacher" / ADAPTER)


class Checkpoint:
    """The trained checkpoint as a teacher: greedy, one answer at a time."""

    def __init__(self, folder: Path) -> None:
        settings = config_of("baseline").lora
        base, _ = load_start(folder / "model", "bfloat16")
        self._model = load_adapter(base, folder / "teacher" / ADAPTER, settings).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        self._lock = Lock()

    @torch.no_grad()
    def say(self, body: Mapping[str, Any]) -> tuple[str, int]:
        """Return its turn as text, and the number of tokens that it read."""
        ids = self._tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self._lock:
            out = self._model.generate(**ids, max_new_tokens=16, do_sample=False, pad_token_id=2)
        read = ids["input_ids"].shape[1]
        return self._tokenizer.decode(out[0, read:], skip_special_tokens=True), read


def scripted(teacher: str, body: Mapping[str, Any]) -> str:
    """Return a turn that is right four times in five; the scripted teachers share half of the mistakes."""
    text = next(m["content"] for m in body["messages"] if m["role"] == "user")
    kind = kind_of(body["messages"])
    order = re.findall(r"\d+", text)[0]
    wrong = [word for word in desk.WORDS if word != desk.RIGHT[kind]]
    chance = Random(f"{teacher}:{text}")
    if chance.random() < ACCURACY:
        return f"call desk action={desk.RIGHT[kind]} order={order}"
    return f"call desk action={wrong[0] if chance.random() < 0.5 else chance.choice(wrong)} order={order}"


def reply(checkpoint: Checkpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    own = body["model"] == "checkpoint"
    text, read = checkpoint.say(body) if own else (scripted(body["model"], body), len(str(body["messages"])) // 4)
    found = re.fullmatch(r"call desk action=(\w+) order=(\w+)", text.strip())
    message: dict[str, Any] = {"role": "assistant", "content": None if found else text}
    if found:
        call = {"name": "desk", "arguments": json.dumps({"action": found[1], "order": found[2]})}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": call}]
    usage = {"prompt_tokens": read, "completion_tokens": 10}
    return {
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": usage,
    }


def prepare_seed(folder: Path, seed: int) -> None:
    """Measure θ₀ on held-out prompts, and make this seed's pairs from its failed calls."""
    loop = open_loop(folder, "baseline", seed, lr=1e-12)
    start, found, taken = value(loop, seed), list[TraceState](), 0

    def stop() -> bool:
        nonlocal taken
        sample = loop.sample(BATCH)
        for i, rollout in enumerate(sample["rollouts"]):
            found.extend(rollout_states(rollout, f"{seed}/{taken}.{i}", sample["tools"]))
        taken += 1
        return taken >= FAILED // BATCH

    loop.train(stop)
    states = [state for state in found if state.get("error")]
    with serving_replies(partial(reply, Checkpoint(folder))) as url:
        names = ("checkpoint", "scripted-0", "scripted-1")
        teachers = [
            Teacher(name, p.prompt_usd, p.completion_usd, base_url=url, key_env=None, max_tokens=64)
            for name, p in zip(names, DEFAULT_TEACHERS, strict=False)
        ]
        asked = asyncio.run(replay_trace(states, teachers, 100.0, agreement_threshold=2, progress=False))
    pairs = extract_dpo_pairs(states, asked, 2)
    save_pairs(pairs, folder / f"pairs-{seed}.jsonl")
    right = fmean(is_right(pair["state_messages"], pair["chosen"]) for pair in pairs)
    row = {
        "start": round(start, 5),
        "states": len(states),
        "pairs": len(pairs),
        "right": round(right, 3),
        "usd": round(asked.spent_usd, 5),
    }
    (folder / f"seed-{seed}.json").write_text(json.dumps(row))
    print(f"seed {seed}: {row}", flush=True)


def is_right(messages: Sequence[Any], action: str) -> bool:
    calls = action_message(action).get("tool_calls") or []
    return bool(calls) and calls[0]["function"]["arguments"].get("action") == desk.RIGHT[kind_of(messages)]


def kind_of(messages: Sequence[Any]) -> str:
    text = next(m["content"] for m in messages if m["role"] == "user").lower()
    return next(kind for kind in desk.KINDS if kind in text)


def table(rows: list[Row]) -> str:
    lines = [
        "| arm | training reward | held out: before | at the end | − baseline, training | − baseline, end | "
        "tokens | CPU s | pairs | right | teachers $ |",
        "|" + "---|" * 11,
    ]
    for arm, (_, beta) in (ARMS | LATER).items():
        own, base = of_arm(rows, arm), of_arm(rows, "baseline")
        less = ["", ""] if arm == "baseline" else [differences(of, own, base) for of in (mean_reward, held_out)]
        cells = [arm, spread(mean_reward, own), spread(before, own), spread(held_out, own), *map(str, less)]
        cells += [f"{fmean(row[key] for row in own):.0f}" for key in ("tokens", "cpu_s")]
        pairs = [f"{fmean(r['pairs'] for r in own):.0f}", f"{fmean(r['right'] for r in own):.0%}"]
        cells += [*pairs, f"{fmean(r['usd'] for r in own):.3f}"] if beta else ["", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def hypotheses(rows: list[Row]) -> str:
    """Answer H1 to H4 by the preregistered rule."""
    better = max(("+sdpo", "+replay"), key=lambda arm: fmean(map(held_out, of_arm(rows, arm))))
    lines = ["| | held out, at the end | one-sided 95 % bounds | answer |", "|---|---|---|---|"]
    for name, arm, other, margin in (
        ("H1", "+sdpo", "baseline", 0.0), ("H2", "+replay", "baseline", 0.0), ("H3", "full", better, 0.05),
        ("H4", "+replay, anchored", "baseline", 0.0),
    ):  # fmt: skip
        found = differences(held_out, of_arm(rows, arm), of_arm(rows, other))
        answer = "**yes**" if found.lower > margin else "**refuted**" if found.upper < margin else "**not shown**"
        lines.append(f"| {name}: {arm} − {other} | {found} | {found.lower:+.3f}, {found.upper:+.3f} | {answer} |")
    return "\n".join(lines)


def of_arm(rows: list[Row], arm: str) -> list[Row]:
    return sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])


def differences(of: Callable[[Row], float], rows: list[Row], others: list[Row]) -> Paired:
    return paired([of(row) for row in rows], [of(row) for row in others])


def before(row: Row) -> float:
    return row["curve"][0][1]


def mean_reward(row: Row) -> float:
    return fmean(row["rewards"])


def held_out(row: Row) -> float:
    return row["curve"][-1][1]


def spread(of: Callable[[Row], float], rows: list[Row]) -> str:
    values = [of(row) for row in rows]
    return f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True, help="the folder for everything")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--workers", type=int, default=1, help="trials at the same time, a core and 4 GB each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
