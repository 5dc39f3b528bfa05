"""Speed of the codecs, as a share of copying the same fp32 bytes in the same run.

    python -m tests.benchmarks.bench_codecs [--mi-elements 16] [--rounds 9] [name …]      one CPU thread, CPU time
    python -m tests.benchmarks.bench_codecs --cuda [--mi-elements 256] [name …]           CUDA events

Every round runs each kernel once, right after a copy of its own; a share is the median over rounds of copy time /
kernel time.  GB/s are of fp32 input, medians.  With --cuda everything lies on the device, the body too; then its
decoded values are compared, bit for bit, with a CPU's from the same body, and the way into pinned and into pageable
memory is timed against a plain copy of the same bytes into pinned memory.
"""

import argparse
from collections.abc import Callable
from statistics import median
from time import thread_time

import torch

from rendezvous.codecs import NAMES, get_codec
from rendezvous.codecs.pieces import load_kernels

WANTED = {"bf16": 0.9, "int8": 0.36, "int4": 0.18}  # with a residual 0.7 of that
CUDA_WANTED = {"int8": 0.5}
Timed = dict[str, Callable[[], object]]


def cpu_seconds(f: Callable[[], object]) -> float:
    began = thread_time()
    f()
    return thread_time() - began


def cuda_seconds(f: Callable[[], object]) -> float:
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    began.record()
    f()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / 1000


def kernels(name: str, n: int, device: str) -> tuple[Timed, float, torch.Tensor]:
    """The kernels to time, fp32 bytes per byte of body, the body."""
    g = torch.Generator(device).manual_seed(0)
    x, theta = torch.randn(n, generator=g, device=device), torch.randn(n, generator=g, device=device)
    if name == "bf16-gate":
        x *= 5e-5  # about 1 % of the bf16 model changes
    c, residual, total, back = get_codec(name), torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    at = "cpu" if name == "bf16-gate" else device
    out = torch.zeros(c.max_body_size(n), dtype=torch.uint8, device=at)
    used = c.encode(x, out, None, theta)
    body = out[:used].clone()
    timed: Timed = {
        "encode": lambda: c.encode(x, out, None, theta),
        "encode, residual": lambda: c.encode(x, out, residual, theta),
        "accumulate": lambda: c.accumulate(body, 0.5, total, False),
        "decode": lambda: c.decode(body, back),
    }
    return timed, 4 * n / used, body


def paired(
    timed: Timed, copy: Callable[[], object], rounds: int, seconds: Callable[..., float]
) -> dict[str, list[tuple[float, float]]]:
    took = {what: list[tuple[float, float]]() for what in timed}
    for _ in range(rounds + 1):
        for what, f in timed.items():
            took[what].append((seconds(copy), seconds(f)))
    return {what: pairs[1:] for what, pairs in took.items()}


def wanted(name: str, what: str, cuda: bool) -> float:
    if cuda:
        return CUDA_WANTED.get(name, 0)
    return WANTED.get(name, 0) * {"encode": 1, "encode, residual": 0.7}.get(what, 0)


def table(name: str, n: int, rounds: int, cuda: bool) -> None:
    device, seconds = ("cuda", cuda_seconds) if cuda else ("cpu", cpu_seconds)
    source = torch.randn(n, device=device)
    target = torch.zeros_like(source)
    timed, ratio, body = kernels(name, n, device)
    how = "one pass" if load_kernels(name, device) else "torch"
    for what, pairs in paired(timed, lambda: target.copy_(source), rounds, seconds).items():
        copy, own = (4 * n / 1e9 / median(p[i] for p in pairs) for i in (0, 1))
        share, goal = median(c / s for c, s in pairs), wanted(name, what, cuda)
        verdict = f"   wanted {goal:.2f} {'ok' if share >= goal else 'MISSED'}" if goal else ""
        print(
            f"{name:9} {ratio:6.1f}x {how:8} {what:17} {own:7.2f} GB/s   copy {copy:7.2f}   share {share:.2f}{verdict}",
            flush=True,
        )
    if cuda:
        across(name, n, rounds, body)


def across(name: str, n: int, rounds: int, body: torch.Tensor) -> None:
    """CUDA against a CPU, and the way to the host."""
    c, near, far = get_codec(name), torch.empty(n, device="cuda"), torch.empty(n)
    c.decode(body, near)
    c.decode(body.cpu(), far)
    same = torch.equal(near.cpu().view(torch.int32), far.view(torch.int32))
    print(f"{name:9} decodes to the CPU's bits: {same}")
    if name == "bf16-gate":
        return
    pinned, pageable = (
        torch.zeros(body.numel(), dtype=torch.uint8, pin_memory=True),
        torch.zeros_like(body, device="cpu"),
    )
    x, e = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    ways: Timed = {"pinned": lambda: c.encode(x, pinned, e), "pageable": lambda: c.encode(x, pageable, e)}
    for what, pairs in paired(ways, lambda: pinned.copy_(body), rounds, cuda_seconds).items():
        own, share = body.numel() / 1e9 / median(p[1] for p in pairs), median(a / b for a, b in pairs)
        print(f"{name:9} encode, residual, to {what:8} {own:6.2f} GB/s of body   share of a plain copy {share:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--mi-elements", type=int)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cuda", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.names:
        table(name, (args.mi_elements or (256 if args.cuda else 16)) << 20, args.rounds, args.cuda)
