"""TRL's shipped scripts as three unreliable replicas, beside one process with as many samples: what is held out.

    python -m tests.benchmarks.bench_scripts [SEEDS=3] [KINDS=sft,dpo,grpo]

    fleet    one line added, learning rate × √3, 3 replicas: one is killed, one leaves     counted inner steps: K
    alone    the script as it is, K steps                                                  both: 32 held-out rows

    sft    loss of the completion, nats per token     dpo    its own loss, against the start     grpo    mean reward

A row is a seed; the last row of a kind has the mean of fleet − alone and its standard error over the seeds.

Not promised: that √3 is the best factor; anything about a model that is not tiny.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.runlog.reader import read_report
from rendezvous.stores.open import open_store
from tests.executors.test_launch import pid_after_step
from tests.executors.test_launch_trl import COMMON, KINDS, LINE, REWARDS
from tests.support.tiny_models import tiny_model_folder

HELD_OUT = [{"prompt": f"{i} plus {i + 1} is", "completion": f" {2 * i + 1}."} for i in range(96, 128)]
STEPS, BETA = 80, 0.1
RATES = {"sft": 2e-3, "dpo": 2e-3, "grpo": 5e-3}  # of the script alone
ROOT = Path(__file__).parents[2]


def words(kind: str, seed: int, steps: int, rate: float) -> list[str]:
    own = COMMON.replace("--max_steps 48", f"--max_steps {steps}").replace("1e-3", f"{rate:g}")
    model = f"--model_name_or_path {tiny_model_folder('llama')} --dataset_name data --seed {seed}"
    return f"{model} {KINDS[kind][1]} {own}".split()


def write_script(kind: str, folder: Path, line: str) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in KINDS[kind][0]))
    (folder / "rewards.py").write_text(REWARDS)
    source = resources.files("trl.scripts").joinpath(f"{kind}.py").read_text()
    (folder / "train.py").write_text(re.sub(r"(    trainer = \w+Trainer\(\n)", rf"\1        {line}\n", source))


def diloco(*said: str) -> list[str]:
    return [sys.executable, "-m", "executors.cli", *said]


def fleet(kind: str, seed: int, folder: Path) -> tuple[Path, int]:
    """Return the exported model, and the inner steps that count."""
    write_script(kind, folder, LINE)
    typed = ["launch", "--replicas", "3", "--file", "data", "train.py", *words(kind, seed, STEPS, RATES[kind] * 3**0.5)]
    launched = subprocess.Popen(diloco(*typed), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"file://{folder}/runs/train"
    os.kill(pid_after_step(url, "r01", step=2), signal.SIGKILL)
    pid_after_step(url, "r02", step=STEPS // 8)
    subprocess.run(diloco("drain", url, "r02"), check=True, capture_output=True)
    assert launched.wait(900) == 0
    subprocess.run(diloco("export", url, "--to", str(folder / "model")), check=True, capture_output=True)
    steps = read_report(open_store(url)).steps
    return folder / "model", sum(h for step in steps for h in step.h.values())


def alone(kind: str, seed: int, folder: Path, steps: int) -> Path:
    write_script(kind, folder, "")
    typed = [sys.executable, "train.py", *words(kind, seed, steps, RATES[kind])]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    subprocess.run(typed, cwd=folder, check=True, capture_output=True, env=environment)
    return folder / "out"


# -------------------------------------------------------------------- held out


@torch.no_grad()
def log_probs(model: Any, tokenizer: Any, prompt: str, completion: str) -> torch.Tensor:
    """Return those of the completion's tokens, (T,)."""
    head, tail = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, completion))
    found = model(torch.tensor([head + tail])).logits[0].log_softmax(-1)
    return found[len(head) - 1 : -1].gather(1, torch.tensor(tail)[:, None])[:, 0]


def sft(model: Any, tokenizer: Any) -> float:
    return fmean(-float(log_probs(model, tokenizer, r["prompt"], r["completion"]).mean()) for r in HELD_OUT)


def dpo(model: Any, tokenizer: Any) -> float:
    start = AutoModelForCausalLM.from_pretrained(tiny_model_folder("llama"))

    def margin(one: Any, row: dict[str, str]) -> torch.Tensor:
        chosen, rejected = (log_probs(one, tokenizer, row["prompt"], c).sum() for c in (row["completion"], " no"))
        return chosen - rejected

    gains = [margin(model, row) - margin(start, row) for row in HELD_OUT]
    return fmean(-float(torch.nn.functional.logsigmoid(BETA * gain)) for gain in gains)


def grpo(model: Any, tokenizer: Any) -> float:
    torch.manual_seed(0)
    rewards = []
    for row in HELD_OUT:
        ids = tokenizer([row["prompt"]] * 8, return_tensors="pt")["input_ids"]
        mask = torch.ones_like(ids)
        made = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=True, top_k=0)
        texts = tokenizer.batch_decode(made[:, ids.size(1) :], skip_special_tokens=True)
        rewards += [sum(c in "aeiou" for c in text) / 6 for text in texts]
    return fmean(rewards)


MEASURES: dict[str, Callable[[Any, Any], float]] = {"sft": sft, "dpo": dpo, "grpo": grpo}


def held_out(kind: str, folder: Path) -> float:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return MEASURES[kind](model.eval(), AutoTokenizer.from_pretrained(tiny_model_folder("llama")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seeds", nargs="?", type=int, default=3)
    parser.add_argument("kinds", nargs="?", default=",".join(MEASURES))
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    print("| script | seed | start | fleet | alone | steps of each | fleet − alone |\n|---|---|---|---|---|---|---|")
    for kind in given.kinds.split(","):
        start, differences = held_out(kind, tiny_model_folder("llama")), []
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory(prefix="bench-scripts-") as folder:
                model, steps = fleet(kind, seed, Path(folder) / "fleet")
                both = held_out(kind, model), held_out(kind, alone(kind, seed, Path(folder) / "alone", steps))
            differences.append(both[0] - both[1])
            print(f"| {kind} | {seed} | {start:.3f} | {both[0]:.3f} | {both[1]:.3f} | {steps} | |", flush=True)
        error = stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
        print(f"| {kind} | all | | | | | {fmean(differences):+.3f} ± {error:.3f} |", flush=True)


if __name__ == "__main__":
    main()
