"""One replica on one GPU: milliseconds of an outer step, and what a dtype costs and keeps.

    python -m tests.benchmarks.bench_gpu [PART=all] [SHAPE=0.5B|1.5B|tiny]

    outer       one outer step of a model whose weights are on the device: the whole hook, and its parts: gather (Δ to
                the host), offer (encode and put), settle, mean, scatter; beside plain copies of the same bytes
    precision   AdamW on next-token loss: fp32, fp32 masters under bf16 autocast, bf16, LoRA on a bf16 base under
                autocast: ms per step, peak memory, loss
    moves       the share of a model's bf16 weights that change: per inner step and in H = 1, 8, 64 of them

Models are random, of Qwen2.5's shapes; the store is a folder in memory.  `tiny` is for a try without a GPU.

Not promised: anything of a real model's gradients; what one card says of another.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    "1.5B": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "intermediate_size": 8960},
}
TOKENS = {"tiny": 512, "0.5B": 151_936, "1.5B": 151_936}
ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_model(shape: str, dtype: torch.dtype) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=TOKENS[shape], num_key_value_heads=2, tie_word_embeddings=True, use_cache=False, **SHAPES[shape]
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Qwen2ForCausalLM(config).to(dtype)


def sync() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def milliseconds(f: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median over rounds, after one that warms up; of that one where rounds is 0."""
    took: list[float] = []
    for _ in range(rounds + 1):
        sync()
        began = time.perf_counter()
        f()
        sync()
        took.append(time.perf_counter() - began)
    return 1000 * statistics.median(took[1:] or took)


# -------------------------------------------------------------------- outer


class Spans:
    """The seconds inside methods, by name; nested ones count in both.   As a context: the methods are put back."""

    def __init__(self, methods: Sequence[tuple[Any, str, str]]) -> None:
        """methods: owner, method, name."""
        self.seconds: dict[str, list[float]] = {}
        self._kept = [(owner, method, getattr(owner, method)) for owner, method, _ in methods]
        for owner, method, name in methods:
            setattr(owner, method, self._timed(getattr(owner, method), name))

    def __enter__(self) -> "Spans":
        return self

    def __exit__(self, *_: object) -> None:
        for owner, method, inner in self._kept:
            setattr(owner, method, inner)

    def _timed(self, inner: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            sync()
            began = time.perf_counter()
            try:
                return inner(*args, **options)
            finally:
                sync()
                self.seconds.setdefault(name, []).append(time.perf_counter() - began)

        return timed

    def medians(self) -> dict[str, float]:
        return {name: 1000 * statistics.median(s[1:]) for name, s in self.seconds.items() if len(s) > 1}


@contextmanager
def folder_in_memory() -> Iterator[str]:
    root = tempfile.mkdtemp(prefix="bench-gpu-", dir="/dev/shm")
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def outer(shape: str) -> None:
    large = shape == "1.5B"
    for dtype in (torch.float32,) if large else (torch.float32, torch.bfloat16):
        for codec in ("fp32", "int8") if large else ("fp32", "bf16", "int8", "int4"):
            with folder_in_memory() as root:
                print(f"outer {shape} {str(dtype)[6:]:8} {codec:5}", outer_step(shape, dtype, codec, root), flush=True)
        model = make_model(shape, dtype)
        print(f"outer {shape} {str(dtype)[6:]:8} plain", plain_copies(model), flush=True)
        del model


def outer_step(shape: str, dtype: torch.dtype, codec: str, root: str) -> str:
    from diloco import StoreManager, make_diloco
    from diloco.outer.flat import FlatFragment

    model = make_model(shape, dtype)
    manager = StoreManager(root, "r00", replicas=1, min_replicas=1)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    rv = manager.session.rv
    methods = [
        (FlatFragment, "delta", "gather"), (FlatFragment, "scatter", "scatter"), (rv, "offer", "offer"),
        (rv, "settle", "settle"), (rv, "mean", "mean"), (rv, "advance", "advance"),
    ]  # fmt: skip
    whole: list[float] = []
    noise = torch.randn(1 << 20, device=DEVICE) * 1e-3
    loop = make_diloco(model, inner, manager, sync_every=1, codec=codec, snapshot_every=1 << 30)
    with Spans(methods) as spans, loop:
        for _ in range(4):
            nudge(model, noise)
            whole.append(milliseconds(inner.step, rounds=0))
    parts = "  ".join(f"{name} {ms:.0f}" for name, ms in spans.medians().items())
    return f"hook {statistics.median(whole[1:]):.0f} ms:  {parts}"


@torch.no_grad()
def nudge(model: nn.Module, noise: Tensor) -> None:
    for p in model.parameters():
        flat = p.view(-1)
        part = noise[: flat.numel()].to(p.dtype)
        flat[: part.numel()] += part


def plain_copies(model: nn.Module) -> str:
    """The floor of gather and scatter: the same bytes at once, pinned and not, and parameter by parameter."""
    each = [p.detach().reshape(-1) for p in model.parameters()]
    near = torch.cat(each)
    far = torch.empty(near.shape, dtype=near.dtype)
    out = {
        "to pageable": milliseconds(lambda: far.copy_(near)),
        "to pageable, one by one": milliseconds(lambda: [p.cpu() for p in each]),
        "to the device": milliseconds(lambda: near.copy_(far)),
    }
    if DEVICE == "cuda":
        pinned = torch.empty(near.shape, dtype=near.dtype, pin_memory=True)
        out["to pinned"] = milliseconds(lambda: pinned.copy_(near))
        out["from pinned"] = milliseconds(lambda: near.copy_(pinned))
    gigabytes = near.numel() * near.element_size() / 1e9
    return f"{gigabytes:.2f} GB:  " + "  ".join(f"{k} {ms:.0f} ms" for k, ms in out.items())


# -------------------------------------------------------------------- precision


def precision(shape: str) -> None:
    for mode in ("fp32", "fp32 + autocast", "bf16", "LoRA on bf16 + autocast"):
        print(f"precision {shape} {mode:24}", train(shape, mode), flush=True)


def train(shape: str, mode: str, rows: int = 8, steps: int = 20) -> str:
    width = 64 if shape == "tiny" else 512
    model = make_model(shape, torch.bfloat16 if "bf16" in mode else torch.float32)
    model = with_lora(model) if mode.startswith("LoRA") else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    ids = torch.arange(rows * width, device=DEVICE).view(rows, width) % min(997, TOKENS[shape])
    losses: list[Tensor] = []
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = milliseconds(lambda: losses.append(train_step(model, optimizer, ids, "autocast" in mode)), steps)
    peak = torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0
    speed = f"{took:7.1f} ms  {rows * width / took * 1000:8.0f} tokens/s  peak {peak:5.1f} GiB"
    return f"{speed}  loss {float(losses[0]):.3f} -> {float(losses[-1]):.3f}"


def with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for p in made.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return made


def train_step(model: Any, optimizer: torch.optim.Optimizer, ids: Tensor, casts: bool) -> Tensor:
    with torch.autocast(DEVICE, dtype=torch.bfloat16) if casts else nullcontext():
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# -------------------------------------------------------------------- moves


def moves(shape: str) -> None:
    """fp32 masters: the bf16 weights that an engine or a broadcast would see; bf16: the weights themselves."""
    rows, width = (2, 64) if shape == "tiny" else (8, 256)
    for dtype in (torch.float32, torch.bfloat16):
        for lr in (1e-6, 1e-5, 1e-4):
            model = make_model(shape, dtype)
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
            ids = torch.randint(0, TOKENS[shape], (rows, width), device=DEVICE)
            begin = before = rounded(model)
            shares: dict[int, float] = {}
            for t in range(1, 65):
                train_step(model, optimizer, ids, dtype == torch.float32)
                now = rounded(model)
                if t in (1, 8, 64):
                    shares[t] = moved(begin, now)
                last, before = moved(before, now), now
            numbers = "  ".join(f"H={h} {share:.1%}" for h, share in shares.items())
            print(f"moves {shape} {str(dtype)[6:]:8} lr {lr:g}:  {numbers}  one step, the 64th {last:.1%}", flush=True)  # pyright: ignore[reportPossiblyUnboundVariable]
            del model, optimizer


def rounded(model: nn.Module) -> list[Tensor]:
    return [p.detach().to(torch.bfloat16, copy=True) for p in model.parameters()]


def moved(before: list[Tensor], after: list[Tensor]) -> float:
    changed = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return changed / sum(a.numel() for a in after)


PARTS: dict[str, Callable[[str], None]] = {"outer": outer, "precision": precision, "moves": moves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=["all", *PARTS])
    parser.add_argument("shape", nargs="?", default="0.5B" if DEVICE == "cuda" else "tiny", choices=list(SHAPES))
    given = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}", flush=True)
    for part, run in PARTS.items():
        if given.part in ("all", part):
            run(given.shape)


if __name__ == "__main__":
    main()
