"""A fleet whose actors are killed all the time, and what actors do to the learning.

    python -m tests.benchmarks.bench_actors --minutes 30 --kills 120     a storm: 2 replicas, 4 actors, kills per hour
    python -m tests.benchmarks.bench_actors --pairs 8 --steps 20         seeds with and without actors, in turns
    python -m tests.benchmarks.bench_actors --pairs 4 --steps 8 --actors 1 --gguf SMOLLM2 --bits Q8_0
                                                                         SmolLM2 with LoRA, its actor is llama.cpp

    storm   rounds above twice the median · bundles of actors · too late · every pseudogradient computed again
    pairs   reward over the run, in its last quarter, on held-out rows at its end: with − without ± standard error
    gguf    the same for one replica of examples/real; llama.cpp reads the model in 8 or 4 bits (make test-engines)

The places of counted work follow from the chain, so a pseudogradient that is equal to the byte when it is computed
again was trained on exactly its slot's places, each once.

Not promised: a machine's speed; all processes share this machine's cores, so actors take time from the replicas.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median, stdev
from typing import TypeAlias

from diloco.audit.inner import recompute_offers
from diloco.run.record import read_run
from diloco.runlog.reader import Report, read_report
from diloco.runlog.summary import actor_words
from inner.worlds.toolworld import ToolWorld
from rendezvous.agreement.membership import read_beat, write_control
from rendezvous.clock import SystemClock
from rendezvous.layout import is_actor

CONFIG = """[inner]
model = "toolworld"
batch_size = 32
lr = 1e-3
[inner.sdpo]
weight = 0.1
[outer]
sync_every = 6
[fleet]
record_rollouts = true
broadcast_weights = true
"""
REAL = """[inner]
model = "{model}"
batch_size = 16
lr = 3e-4
[inner.data]
prompts = "prompts.jsonl"
[inner.rewards]
function = "rewards.py:answer"
[inner.sampling]
num_generations = 8
max_completion_length = 16
[inner.lora]
r = 8
alpha = 16.0
[outer]
sync_every = 4
[fleet]
record_rollouts = true
broadcast_weights = true
{engine}
[eval]
prompts = "held_out.jsonl"
every = 1000
"""
NUMBERS = ("over the run", "in its last quarter", "held out at its end")
World = Callable[[Path], str]  # writes a run's files into a folder, and returns its number of replicas
Fleet: TypeAlias = "subprocess.Popen[bytes]"
HELD_OUT = """[eval]
prompts = "held_out.jsonl"
every = 1000
samples = 4
greedy = false
"""


def write_toolworld(folder: Path) -> str:
    """Write what a run of ToolWorld reads into `folder`; return its number of replicas."""
    rows = ToolWorld().rows(100, seed=1000)
    (folder / "held_out.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.toml").write_text(CONFIG + HELD_OUT)
    return "2"


def write_real(folder: Path, model: Path, bits: str) -> str:
    """Write a run of examples/real, and `model` in other bits for llama.cpp.   bits: "" for no engine."""
    from gguf import GGMLQuantizationType

    from tests.support.gguf_files import requantise

    for name in ("prompts.jsonl", "held_out.jsonl", "rewards.py"):
        (folder / name).write_text((Path(__file__).parents[2] / "examples" / "real" / name).read_text())
    if bits:
        requantise(model, folder / "engine.gguf", GGMLQuantizationType[bits])
    engine = f'actor_engine = "llama_cpp:{folder}/engine.gguf"' if bits else ""
    (folder / "run.toml").write_text(REAL.format(model=model.resolve(), engine=engine))
    return "1"


def start(folder: Path, world: World, *, seed: int, steps: int, actors: int, more: Sequence[str]) -> Fleet:
    """Start a fleet of some replicas and actors below `folder`.   more: settings."""
    command = ["train", "run.toml", "--run", "run", "--replicas", world(folder), "--min-replicas", "1"]
    command += ["--steps", str(steps)]
    command += [
        "--set",
        f"seed={seed}",
        *(word for setting in more for word in ("--set", setting)),
        "--no-preflight",
        "--yes",
        *(["--actors", str(actors)] if actors else []),
    ]
    code = f"import sys; from executors.cli.main import main; sys.exit(main({command!r}))"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    log = (folder / "train.log").open("wb")
    return subprocess.Popen([sys.executable, "-c", code], cwd=folder, env=env, stdout=log, stderr=log)


def storm(folder: Path, *, minutes: float, kills_per_hour: float, actors: int, more: Sequence[str]) -> Report:
    """Kill an actor at a time for so many minutes; then end the run, and return its report."""
    fleet = start(folder, write_toolworld, seed=0, steps=1_000_000, actors=actors, more=more)
    run_folder = folder / "run"
    while not (run_folder / "steps" / f"{0:010d}" / "commit.json").exists():
        assert fleet.poll() is None, (folder / "train.log").read_text()
        time.sleep(0.5)
    run, killed, began = read_run(str(run_folder)), 0, time.monotonic()
    while time.monotonic() - began < 60 * minutes:
        time.sleep(3600 / kills_per_hour)
        beat = read_beat(run.store, f"a{killed % actors:02d}")
        killed += 1
        if beat is not None and beat.phase == "sample":
            os.kill(beat.pid, signal.SIGKILL)
    write_control(run.store, SystemClock(), steps=read_report(run.store).head + 2)
    assert fleet.wait(300) == 0, (folder / "train.log").read_text()[-3000:]
    return read_report(run.store)


def tell_storm(report: Report, folder: Path) -> None:
    rounds = [b.at - a.at for a, b in zip(report.steps, report.steps[1:], strict=False)]
    slow = [seconds for seconds in rounds if seconds > 2 * median(rounds)]
    lost = [e for e in report.of_kind("lost") if is_actor(e["slot"])]
    waited = max(e["wait_s"] for e in report.of_kind("step"))  # for the other replica's offer and the commit
    print(
        f"{report.head} outer steps, median {median(rounds):.2f} s, {len(slow)} above twice that ({max(rounds):.2f} s)"
        f"; a replica waited {waited:.2f} s at most"
    )
    print(f"actors: {actor_words(report)[0]}; {len(lost)} lost")
    found = recompute_offers(read_run(str(folder / "run")))
    print(f"computed again: {found.equal} equal to the byte, off {found.off}, unchecked {found.unchecked}")


def learned(
    folder: Path, world: World, *, seed: int, steps: int, actors: int, more: Sequence[str]
) -> tuple[float, float, float]:
    """Return the mean reward over a run, in its last quarter, and on held-out rows after it."""
    fleet = start(folder, world, seed=seed, steps=steps, actors=actors, more=more)
    assert fleet.wait(3600) == 0, (folder / "train.log").read_text()[-3000:]
    report = read_report(read_run(str(folder / "run")).store)
    rewards = [step.mean_reward or 0.0 for step in report.steps]
    held_out = report.evaluations[-1].headline[1]
    doubted = len(report.of_kind("rollouts_doubted"))
    print(actor_words(report), f"{doubted} doubted; held out {held_out.mean:.3f} ± {held_out.error:.3f}", flush=True)
    return mean(rewards), mean(rewards[-max(1, steps // 4) :]), held_out.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kills", type=float, default=120.0, help="per hour")
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], help="a setting of the run, as for `diloco train`")
    parser.add_argument("--pairs", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gguf", type=Path, help="SmolLM2 (make smollm2), instead of ToolWorld")
    parser.add_argument("--bits", default="Q8_0", choices=["Q8_0", "Q4_0"], help="of the model that llama.cpp reads")
    typed = parser.parse_args()
    if not typed.pairs:
        with tempfile.TemporaryDirectory() as scratch:
            how = {"minutes": typed.minutes, "kills_per_hour": typed.kills, "actors": typed.actors}
            tell_storm(storm(Path(scratch), **how, more=typed.set), Path(scratch))
        return
    differences: list[list[float]] = []
    for seed in range(1, typed.pairs + 1):
        runs = []
        for actors in (0, typed.actors):
            with tempfile.TemporaryDirectory() as scratch:
                bits = typed.bits if actors else ""
                world = partial(write_real, model=typed.gguf, bits=bits) if typed.gguf else write_toolworld
                how = {"seed": seed, "steps": typed.steps, "actors": actors, "more": typed.set}
                runs.append(learned(Path(scratch), world, **how))
        differences.append([helped - alone for alone, helped in zip(*runs, strict=True)])
        told = ", ".join(f"{name} {a:.3f} {b:.3f}" for name, a, b in zip(NUMBERS, *runs, strict=True))
        print(f"seed {seed}: {told}", flush=True)
    for name, column in zip(NUMBERS, zip(*differences, strict=True), strict=True):
        error = stdev(column) / len(column) ** 0.5 if len(column) > 1 else float("nan")
        print(f"with actors − without, {name}: {mean(column):+.3f} ± {error:.3f} ({len(column)} pairs)")


if __name__ == "__main__":
    main()
