"""The check of rollouts on SmolLM2: who is found, who is believed, and how often an honest worker is doubted.

    python -m tests.benchmarks.bench_rollout_check MODEL.gguf [WORKERS=40]

The checker has SmolLM2-135M-Instruct in fp32.  A worker answers 4 prompts with 32 sampled tokens each:

honest       the same weights: fp32, bf16
model        θ after 40 AdamW steps at 1e-4 on another text
precision    every matrix rounded to 4 bits, to 8 bits per row
temperature  .7 and 1.3 where 1 was asked for
"asked"      the same, with log-probs that the right model gave afterwards

Not promised: other models and engines; on a GPU kernels differ more.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from inner.extras.rollout_check.check import RolloutCheck, check_rollouts
from inner.models.gguf import load_gguf

PROMPTS, TOKENS = 4, 32
QUESTIONS = (
    "What is a glacier?", "Tell me about bread.", "Why is the sky blue?", "Name a city and say why you like it.",
    "How do bees find flowers?", "What is 12 plus 30?", "Write a line of a poem.", "Explain recursion.",
)  # fmt: skip


def rounded(model: Any, levels: int) -> Any:
    found = copy.deepcopy(model)
    for p in found.parameters():
        if p.dim() == 2:
            scale = p.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / levels
            p.data = (p.data / scale).round().clamp(-levels, levels) * scale
    return found


def trained(model: Any, tokenizer: Any) -> Any:
    found = copy.deepcopy(model).train()
    tokens = torch.tensor(
        tokenizer("\n".join(p.read_text() for p in sorted(Path("rendezvous").glob("*.py"))))["input_ids"]
    )
    optimizer, rng = torch.optim.AdamW(found.parameters(), lr=1e-4), torch.Generator().manual_seed(0)
    for _ in range(40):
        starts = torch.randint(len(tokens) - 64, (2,), generator=rng)
        batch = torch.stack([tokens[at : at + 64] for at in starts])
        found(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found.eval()


@torch.no_grad()
def sample(model: Any, ids: list[int], temperature: float, rng: torch.Generator) -> tuple[list[int], list[float]]:
    """-> tokens, and their log-probs as the worker has them."""
    tokens, logps, cache, step = list[int](), list[float](), None, torch.tensor([ids])
    for _ in range(TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, every = out.past_key_values, (out.logits[0, -1].float() / temperature).log_softmax(-1)
        token = int(torch.multinomial(every.exp(), 1, generator=rng))
        tokens.append(token)
        logps.append(float(every[token]))
        step = torch.tensor([[token]])
    return tokens, logps


@torch.no_grad()
def asked(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    every = model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(every, tokens, strict=True)]


def worker(checker: Any, tokenizer: Any, model: Any, temperature: float, seed: int, *, asks: bool) -> RolloutCheck:
    rng = torch.Generator().manual_seed(seed)
    rollouts: list[tuple[list[int], list[int], list[float]]] = []
    for i in range(PROMPTS):
        chat = [{"role": "user", "content": QUESTIONS[(seed + i) % len(QUESTIONS)]}]
        prompt = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
        tokens, logps = sample(model, prompt, temperature, rng)
        rollouts.append((prompt, tokens, asked(checker, prompt, tokens) if asks else logps))
    return check_rollouts(checker, rollouts, seed=seed)


def main() -> None:
    checker, tokenizer = load_gguf(sys.argv[1], "float32")
    checker.eval()
    workers = int(sys.argv[2]) if len(sys.argv) > 2 else 40
    other = trained(checker, tokenizer)
    kinds: dict[str, tuple[Callable[[], Any], float, bool]] = {
        "honest, fp32": (lambda: checker, 1.0, False),
        "honest, bf16": (lambda: copy.deepcopy(checker).bfloat16(), 1.0, False),
        "8 bits per row": (lambda: rounded(checker, 127), 1.0, False),
        "4 bits per row": (lambda: rounded(checker, 7), 1.0, False),
        "4 bits per row, asked": (lambda: rounded(checker, 7), 1.0, True),
        "another model": (lambda: other, 1.0, False),
        "another model, asked": (lambda: other, 1.0, True),
        "temperature .7": (lambda: checker, 0.7, False),
        "temperature .7, asked": (lambda: checker, 0.7, True),
        "temperature 1.3": (lambda: checker, 1.3, False),
        "temperature 1.3, asked": (lambda: checker, 1.3, True),
    }
    print("| worker | disagreement: median, largest | surprise z: median, farthest | doubted |\n|---|---|---|---|")
    for name, (make, temperature, asks) in kinds.items():
        model = make()
        found = [worker(checker, tokenizer, model, temperature, seed, asks=asks) for seed in range(workers)]
        d, z = sorted(f.disagreement for f in found), sorted((f.surprise for f in found), key=abs)
        doubted = sum(bool(f.doubts) for f in found)
        told = f"{d[len(d) // 2]:.3f}, {d[-1]:.3f} | {z[len(z) // 2]:+.1f}, {z[-1]:+.1f} | {doubted} of {workers}"
        print(f"| {name} | {told} |", flush=True)


if __name__ == "__main__":
    main()
