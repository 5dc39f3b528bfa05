"""How fast the codecs are on one CPU thread, as a share of copying the same fp32 bytes in the same run.

    PYTHONPATH=. python tests/benchmarks/bench_codecs.py [--mi-elements 16] [--rounds 9] [--device cuda] [name …]

Every round runs each kernel once, right after a copy of its own; a share is the median over rounds of copy time /
kernel time.  GB/s are of fp32 input, medians.  With --device cuda, x and the residual lie there and the copy is
between two vectors on the device; the body goes to the CPU in all cases.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from rendezvous.codecs import NAMES, codec

WANTED = {"bf16": 0.9, "int8": 0.36, "int4": 0.18}  # with a residual 0.7 of that


def seconds(f: Callable[[], object], device: str) -> float:
    began = perf_counter()
    f()
    if device != "cpu":
        torch.cuda.synchronize()
    return perf_counter() - began


def kernels(name: str, n: int, device: str) -> tuple[dict[str, Callable[[], object]], float]:
    """What to time, and bytes of fp32 per byte of body."""
    g = torch.Generator().manual_seed(0)
    x, theta = torch.randn(n, generator=g), torch.randn(n, generator=g)
    if name == "bf16-gate":
        x *= 5e-5  # about 1 % of the bf16 model changes
    x, theta, c = x.to(device), theta.to(device), codec(name)
    residual, total = torch.zeros_like(x), torch.zeros(n)
    out = torch.zeros(c.bound(n), dtype=torch.uint8, pin_memory=device != "cpu")
    used = c.encode(x, out, None, theta)
    body = out[:used].clone()
    return {
        "encode": lambda: c.encode(x, out, None, theta),
        "encode, residual": lambda: c.encode(x, out, residual, theta),
        "accumulate": lambda: c.accumulate(body, 0.5, total, False),
    }, 4 * n / used


def table(names: list[str], n: int, rounds: int, device: str) -> None:
    source = torch.randn(n).to(device)
    target = torch.zeros_like(source)
    for name in names:
        timed, ratio = kernels(name, n, device)
        took = {what: list[tuple[float, float]]() for what in timed}
        for _ in range(rounds + 1):
            for what, f in timed.items():
                took[what].append((seconds(lambda: target.copy_(source), device), seconds(f, device)))
        for what, pairs in took.items():
            copy, own = (4 * n / 1e9 / median(p[i] for p in pairs[1:]) for i in (0, 1))
            share = median(c / s for c, s in pairs[1:])
            wanted = WANTED.get(name, 0) * {"encode": 1, "encode, residual": 0.7}.get(what, 0)
            verdict = (
                ""
                if not wanted or device != "cpu"
                else f"   wanted {wanted:.2f} {'ok' if share >= wanted else 'MISSED'}"
            )
            print(
                f"{name:10} {ratio:6.1f}x  {what:17} {own:6.2f} GB/s   copy {copy:6.2f}   share {share:.2f}{verdict}",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--mi-elements", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    table(args.names, args.mi_elements << 20, args.rounds, args.device)
