"""Peak memory of a replica beside plain TRL + PEFT: SmolLM2-135M-Instruct with LoRA, the settings of `make real`.

    python -m tests.benchmarks.bench_memory [ROUNDS=3]        after `make smollm2`; 2 to 4 minutes a round

    a process:  plain     GRPOTrainer on PeftModel, STEPS inner steps
    a process:  replica   python -m diloco.replica, alone in its run, STEPS inner steps in STEPS / H outer steps

Both start from the same files and take as many prompts, of the same lengths. Peak: the most that was resident of a
process, as the kernel counts it (ru_maxrss), start and end included. Goal: 1.15 × plain.

Not promised: the same ratio on a GPU, where activations and the store client's bytes lie in different memories.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from diloco.model.fetch import fetch_model
from diloco.model.publish import publish_model
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from inner import InnerConfig, Seeds
from rendezvous.clock import SystemClock

ROOT = Path(__file__).parent.parent.parent
SMOLLM2 = ROOT / ".venv" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
REAL = ROOT / "examples" / "real"
STEPS = 8
H = 4


def found(folder: Path) -> RunConfig:
    """A run of one replica; θ₀ lies in `folder`/model as well, for plain TRL."""
    inner: dict[str, Any] = {
        "model": str(SMOLLM2), "batch_size": 16, "lr": 3e-4, "lora": {"r": 16, "alpha": 32.0},
        "data": {"prompts": str(REAL / "prompts.jsonl")}, "rewards": {"function": f"{REAL / 'rewards.py'}:answer"},
        "sampling": {"num_generations": 8, "max_completion_length": 10},
    }  # fmt: skip
    fleet = {"replicas": 1, "min_replicas": 1, "steps": STEPS // H}
    config = RunConfig.from_dict({"inner": inner, "fleet": fleet, "outer": {"sync_every": H}}, folder)
    run = open_run(config, str(folder / "run"), SystemClock())
    fetch_model(run.store, publish_model(run, SystemClock()), folder / "model")
    return config


def train_plain(folder: Path) -> None:
    """A person's own script: TRL and PEFT, and nothing of ours but the settings' numbers."""
    import json

    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.trainer.grpo_trainer import GRPOTrainer

    from diloco.run.record import read_run
    from inner.train.grpo import trainer_arguments

    torch.set_num_threads(1)
    sys.path.insert(0, str(REAL))
    from rewards import answer  # pyright: ignore[reportMissingImports]

    config: InnerConfig = read_run(str(folder / "run")).config.inner
    arguments = trainer_arguments(config, Seeds(data=0, noise=0), str(folder / "out"))
    arguments.max_steps = STEPS
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (REAL / "prompts.jsonl").read_text().splitlines()]
    trainer = GRPOTrainer(
        model=PeftModel.from_pretrained(base, str(folder / "model" / "adapter"), is_trainable=True),
        reward_funcs=answer, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )  # fmt: skip
    trainer.train()


def peak_of(command: list[str]) -> float:
    """MB that were resident at most."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    told = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{told.decode()[-2000:]}")
    return usage.ru_maxrss / 1024


def measure() -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run([sys.executable, "-m", __spec__.name, "found", scratch], check=True)
        plain = peak_of([sys.executable, "-m", __spec__.name, "plain", scratch])
        replica = peak_of([sys.executable, "-m", "diloco.replica", str(folder / "run"), "--slot", "r00"])
    print(f"plain TRL + PEFT {plain:6.0f} MB, a replica {replica:6.0f} MB: {replica / plain:.3f} ×", flush=True)
    return plain, replica


def main() -> None:
    if sys.argv[1:2] == ["found"]:
        found(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["plain"]:
        train_plain(Path(sys.argv[2]))
    else:
        rounds = [measure() for _ in range(int(sys.argv[1]) if sys.argv[1:] else 3)]
        print(f"median of {len(rounds)}: {median(replica / plain for plain, replica in rounds):.3f} × (goal 1.15)")


if __name__ == "__main__":
    main()
