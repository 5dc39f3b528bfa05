"""PRIME-RL's custom loss with hints, on a CPU: the table of trainer.toml, and a model of 0.1 M parameters.

    python examples/prime_rl/on_cpu.py [--alpha 0]

    question ─▶ 8 samples ─▶ reward: is the tool's name right? ─▶ A = reward − mean of the group
             └▶ the same tokens behind a hint ─▶ ref_logprobs
    samples, one by one ─▶ [trainer.loss] ─▶ sum / tokens ─▶ AdamW

If prime-rl can be imported, its own CustomLossConfig, setup_rl_loss_fn and compute_loss get the table and samples.
Without it, this file imports the function that the table names, and divides the sum by the tokens, as they do.

Not promised: PRIME-RL's orchestrator, its engine and its trainer: they need GPUs, and Python 3.12.
"""

import argparse
import random
import sys
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inner import ToolWorld

HERE = Path(__file__).parent
WORLD = ToolWorld(kinds=6, names=32)
STEPS, QUESTIONS, GROUP, LONGEST, RATE = 16, 8, 8, 16, 3e-3


@dataclass
class Sample:
    """One rollout under the names of PRIME-RL's LossInputs, (T,) each; of all tokens but the first."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


Loss = Callable[[list[Sample]], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--alpha", type=float, help="in place of the table's alpha_sdpo")
    given = parser.parse_args()
    table = tomllib.loads((HERE / "trainer.toml").read_text())["trainer"]["loss"]
    if given.alpha is not None:
        table["kwargs"]["alpha_sdpo"] = given.alpha
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train(given.steps, loss_of(table), f"{table['import_path']}, alpha {table['kwargs']['alpha_sdpo']}")


def loss_of(table: dict[str, Any]) -> Loss:
    """Return samples -> the loss of the batch, by prime-rl's own functions if they are here."""
    if find_spec("prime_rl") is not None:
        return upstream_loss(table)
    module, _, name = table["import_path"].rpartition(".")
    one = partial(getattr(import_module(module), name), **table["kwargs"])
    return lambda samples: torch.stack([one(sample).loss for sample in samples]).sum() / tokens_of(samples)


def upstream_loss(table: dict[str, Any]) -> Loss:
    if "wandb" not in sys.modules and find_spec("wandb") is None:
        sys.modules["wandb"] = types.ModuleType("wandb")
    loss = import_module("prime_rl.trainer.rl.loss")
    config = import_module("prime_rl.configs.trainer").CustomLossConfig(**table)
    names = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask")
    rest: dict[str, Any] = {"rl_weights": None, "ce_weights": None, "ref_kl_weights": None, "ce_scale": 1}

    def of(samples: list[Sample]) -> Tensor:
        columns = {name: [getattr(sample, name) for sample in samples] for name in names}
        fn = loss.setup_rl_loss_fn(config)
        return loss.compute_loss(rl_loss_fn=fn, rl_scale=tokens_of(samples), ref_kl_scale=1, **columns, **rest)[0]

    return of


def tokens_of(samples: list[Sample]) -> int:
    return sum(int(sample.loss_mask.sum()) for sample in samples)


def train(steps: int, loss: Loss, words: str) -> None:
    print(f"{words}; prime-rl's own functions: {'yes' if find_spec('prime_rl') else 'no, they are not installed'}")
    tokenizer, model = WORLD.tokenizer(), WORLD.model(seed=0)
    WORLD.warm_start(model, tokenizer)
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rng = random.Random(0)
    for step in range(steps):
        groups = [rolled_out(model, tokenizer, rng) for _ in range(QUESTIONS)]
        samples = [sample for group, _ in groups for sample in group]
        batch = loss(samples)
        optimizer.zero_grad()
        batch.backward()
        optimizer.step()
        reward = sum(mean for _, mean in groups) / QUESTIONS
        print(f"step {step:2d}: reward {reward:.3f}, loss {batch.item():+.3f}", flush=True)


def rolled_out(model: Any, tokenizer: Any, rng: random.Random) -> tuple[list[Sample], float]:
    """Return the samples of one question, and their mean reward."""
    kind = rng.randrange(WORLD.kinds)
    asked = [{"role": "user", "content": f"op{kind} {rng.randrange(20)} {rng.randrange(20)}"}]
    hint = {"role": "system", "content": f"hint use {WORLD.right_name(kind)}"}
    ids_of = lambda messages: tokenizer.apply_chat_template(  # noqa: E731
        messages, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    prompt, hinted = ids_of(asked), ids_of([*asked, hint])
    with torch.no_grad():
        made = model.generate(torch.tensor([prompt] * GROUP), do_sample=True, top_k=0, max_new_tokens=LONGEST)
    replies = [trimmed(row.tolist(), tokenizer) for row in made[:, len(prompt) :]]
    right = tokenizer.convert_tokens_to_ids(WORLD.right_name(kind))
    rewards = torch.tensor([float(right in reply[:2]) for reply in replies])
    advantages = rewards - rewards.mean()
    return [
        a_sample(model, prompt, hinted, reply, float(a)) for reply, a in zip(replies, advantages, strict=True)
    ], float(rewards.mean())


def trimmed(reply: list[int], tokenizer: Any) -> list[int]:
    """Return the reply up to its end token."""
    end = tokenizer.eos_token_id
    return reply[: reply.index(end) + 1] if end in reply else reply


def a_sample(model: Any, prompt: list[int], hinted: list[int], reply: list[int], advantage: float) -> Sample:
    own = log_probs(model, [*prompt, *reply])
    with torch.no_grad():
        reference = own.detach().clone()
        reference[len(prompt) - 1 :] = log_probs(model, [*hinted, *reply])[len(hinted) - 1 :]
    mask = torch.arange(len(own)) >= len(prompt) - 1
    return Sample(own, own.detach(), reference, advantage * mask.float(), mask)


def log_probs(model: Any, ids: list[int]) -> Tensor:
    """Return log π of each token after the first, (T − 1,)."""
    logits = model(torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


if __name__ == "__main__":
    main()
