"""Weights for engines: which share of SmolLM2's bf16 values an outer step changes, in how many bytes, in which time.

    python -m tests.benchmarks.bench_weights FOLDER      a model's folder (`diloco export`), or a .gguf file

The model begins with bf16 values, as published ones do.  Two replicas take 50 AdamW steps (β₂ .95, batches of 2 windows
of 64 tokens of this repository's code); the outer step is the first one of a run with the defaults (η .7, μ .5: θ moves
1.05 of the mean).  Bytes are set against 2 per value, which is all of bf16.

Not promised: other data, other optimizers; later outer steps with momentum move further, up to 1.4 of the mean.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rendezvous.weights.patch import CHUNK, bf16_bits, changes_between, decode, encode, whole

RATES, EVERY, REPLICAS, MOVES = (1e-6, 1e-5, 1e-4), (1, 10, 50), 2, 1.05


def load(path: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **name)
    return model, AutoTokenizer.from_pretrained(folder, **name)


def batches(tokenizer: Any, seed: int) -> Iterator[torch.Tensor]:
    text = "\n".join(p.read_text() for p in sorted(Path("rendezvous").rglob("*.py")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    rng = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - 64, (2,), generator=rng)
        yield torch.stack([tokens[at : at + 64] for at in starts])


def flat(model: Any) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()


def local_values(
    model: Any, start: dict[str, torch.Tensor], tokenizer: Any, rate: float, seed: int
) -> Iterator[np.ndarray]:
    """A replica's values after each of EVERY's steps."""
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step, batch in zip(range(1, max(EVERY) + 1), batches(tokenizer, seed), strict=False):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in EVERY:
            yield flat(model)


def patches(old: np.ndarray, new: np.ndarray) -> tuple[int, int]:
    """-> changed values, bytes."""
    changed = size = 0
    for at in range(0, len(new), CHUNK):
        found = changes_between(old[at : at + CHUNK], new[at : at + CHUNK], at)
        changed += len(found.values)
        size += len(encode(found))
    return changed, size


def times(before: np.ndarray, theta: np.ndarray) -> str:
    """Times on one core, medians of 3: rounding and comparing, packing, and a reader's unpacking."""
    taken: list[tuple[float, float, float]] = []
    for _ in range(3):
        old = before.copy()
        began = time.perf_counter()
        chunks = [(at, bf16_bits(theta[at : at + CHUNK])) for at in range(0, len(theta), CHUNK)]
        found = [changes_between(old[at : at + CHUNK], new, at) for at, new in chunks]
        compared = time.perf_counter()
        bodies = [encode(changes) for changes in found]
        packed = time.perf_counter()
        for body in bodies:
            for changes in decode(body):
                changes.apply(old)
        taken.append((compared - began, packed - compared, time.perf_counter() - packed))
    return " + ".join(f"{median(part):.2f}" for part in zip(*taken, strict=True))


def main() -> None:
    torch.manual_seed(0)
    model, tokenizer = load(Path(sys.argv[1]))
    model.train()
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    theta = flat(model).copy()
    old = np.concatenate([bf16_bits(theta[at : at + CHUNK]) for at in range(0, len(theta), CHUNK)])
    body = sum(len(encode(whole(old[at : at + CHUNK], at))) for at in range(0, len(old), CHUNK))
    print(f"{len(theta) / 1e6:.1f} M values; an anchor: {body / 1e6:.0f} MB, {body / len(old):.2f} bytes per value\n")
    print("| lr | H | changed | MB | of all of bf16 | bytes per changed value |\n|---|---|---|---|---|---|")
    for rate in RATES:
        sums = {every: np.zeros_like(theta) for every in EVERY}
        for seed in range(REPLICAS):
            for every, values in zip(EVERY, local_values(model, start, tokenizer, rate, seed), strict=True):
                sums[every] += theta - values
        for every in EVERY:
            moved = theta - np.float32(MOVES / REPLICAS) * sums[every]
            new = np.concatenate([bf16_bits(moved[at : at + CHUNK]) for at in range(0, len(theta), CHUNK)])
            changed, size = patches(old, new)
            print(
                f"| {rate:g} | {every} | {changed / len(old):.1%} | {size / 1e6:.1f} | {size / 2 / len(old):.1%} | "
                f"{size / max(1, changed):.2f} |", flush=True,
            )  # fmt: skip
            if every == 10:
                spent = times(old, moved)
                print(
                    f"<!-- lr {rate:g}, H 10: rounding and comparing + packing + unpacking: {spent} s -->", flush=True
                )


if __name__ == "__main__":
    main()
