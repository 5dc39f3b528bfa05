"""`make real` without this project: TRL's trainer with PEFT, and run.toml's model, prompts, reward, settings, samples.

    python examples/real/trl_alone.py FOLDER [SEED]     FOLDER/adapter, and the held-out rewards in FOLDER/held_out.json

Run it after `make real`: both start from, and are measured on, its export of the base (the GGUF file, dequantised).
"""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch
from datasets import load_dataset
from peft import LoraConfig
from rewards import answer
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

HERE = Path(__file__).parent
BASE = Path("runs/real-exports/base")


def arguments(run: dict[str, Any], folder: Path, seed: int) -> GRPOConfig:
    inner = run["inner"]
    return GRPOConfig(
        output_dir=str(folder),
        seed=seed,
        max_steps=run["fleet"]["replicas"] * run["fleet"]["steps"] * run["outer"]["sync_every"],
        per_device_train_batch_size=inner["batch_size"],
        num_generations=inner["sampling"]["num_generations"],
        max_completion_length=inner["sampling"]["max_completion_length"],
        learning_rate=inner["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        loss_type="dr_grpo",
        scale_rewards="none",
        bf16=bool(torch.cpu.get_capabilities().get("amx_bf16")),
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        logging_steps=4,
    )


def train(folder: Path, seed: int) -> None:
    run = tomllib.loads((HERE / "run.toml").read_text())
    adapter = run["inner"]["lora"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(BASE),
        reward_funcs=answer,
        args=arguments(run, folder, seed),
        train_dataset=load_dataset("json", data_files=str(HERE / "prompts.jsonl"), split="train"),
        peft_config=LoraConfig(
            r=adapter["r"], lora_alpha=adapter["alpha"], target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model(str(folder / "adapter"))


def evaluate(base: Path, folder: Path) -> None:
    words = [sys.executable, str(HERE / "evaluate.py"), str(base), str(folder / "adapter")]
    found = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    (folder / "held_out.json").write_text(found)
    print(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="TRL's own trainer on the task of `make real`, after `make real`.")
    parser.add_argument("folder", type=Path, help="where the adapter and held_out.json go")
    parser.add_argument("seed", type=int, nargs="?", default=0)
    args = parser.parse_args()
    if not BASE.is_dir():
        parser.error(f"there is no {BASE} here; run `make real` first, in this folder")
    train(args.folder, args.seed)
    evaluate(BASE, args.folder)
