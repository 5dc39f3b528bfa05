"""A snapshot at the closer: memory, CPU time, and how late it is for the next step.

    python -m tests.benchmarks.bench_snapshot [MILLIONS=20] [FRAGMENTS=1] [ROUND_S=0: as long as 20 memcpys]

A replica alone (m = 1, so it closes every step) on a folder, with a snapshot every 4 steps and none in the first two.

memory     peak resident bytes per parameter above the imports, over all steps: θ 4 + momentum 4 + Δ 4 + body 4 + …
CPU        CPU-seconds of all threads in the steps with a snapshot beyond those of the steps without, per snapshot; also
           in memcpys: copies of θ and momentum into memory that was touched before
lateness   seconds from "the mean is decided" until the next inner step, with a snapshot and without (medians)

Also runs on older releases of this code, to compare.   Not promised: times on a machine that does something else.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time

import numpy as np
import torch

from diloco.outer.optimizer import Nesterov, OuterState
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import Worker
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.stores.open import open_store

EVERY, STEPS = 4, 13


def resident() -> tuple[int, int]:
    """-> bytes now, and at the peak."""
    with open("/proc/self/status") as f:
        found = {line.split()[0]: 1024 * int(line.split()[1]) for line in f if line.startswith(("VmRSS", "VmHWM"))}
    return found["VmRSS:"], found["VmHWM:"]


def memcpy_seconds(n: int) -> float:
    """CPU-seconds to copy 8n bytes, best of three, 64 MiB at a time: the memory is not what is measured."""
    a = np.ones(1 << 24, np.float32)
    b, best = a.copy(), float("inf")
    for _ in range(3):
        began = time.process_time()
        for _ in range(8):
            np.copyto(b, a)
        best = min(best, (time.process_time() - began) / (8 * a.nbytes))
    return best * 8 * n


def life(root: str, n: int, fragments: int) -> tuple[Rendezvous, OuterState]:
    store, clock = open_store(root), SystemClock()
    write_control(store, clock, replicas=1, min_replicas=1)
    thetas = [torch.nn.Parameter(torch.zeros(n // fragments)) for _ in range(fragments)]
    state = OuterState([t.data for t in thetas], [Nesterov(t, lr=0.7, momentum=0.5) for t in thetas])
    new = {"uploads": Worker()} if "uploads" in (Rendezvous.__init__.__kwdefaults__ or {}) else {}
    rules = Rules(fragments, fragments, snapshot_every=EVERY)
    rv = Rendezvous(store, clock, "r00", rules, Timing(), background=Worker(), **new)  # type: ignore[arg-type]
    rv.claim()
    rv.join(state)
    return rv, state


def drain(rv: Rendezvous) -> None:
    rv._background.drain()
    getattr(rv, "_uploads", rv._background).drain()


def main(millions: float = 20, fragments: int = 1, round_s: float = 0.0) -> None:
    n = int(millions * 1_000_000) // fragments * fragments
    copy = memcpy_seconds(n)
    base, _ = resident()
    root = tempfile.mkdtemp(prefix="bench-snapshot-")
    try:
        rv, state = life(root, n, fragments)
        delta = np.random.default_rng(0).standard_normal(n // fragments, np.float32)
        cpu, late = list[float](), list[float]()
        for _ in range(STEPS):
            drain(rv) if rv.step % EVERY == 2 else None  # each snapshot's work is over before the next is due
            began = time.process_time()
            time.sleep(round_s or 20 * copy)  # the inner steps, on a device of their own
            rv.offer(delta, fragments)
            commit = rv.settle()
            decided = time.perf_counter()
            rv.mean(commit, delta)
            state.apply(commit.t % fragments, delta)
            rv.advance(commit)
            late.append(time.perf_counter() - decided)
            drain(rv) if commit.t % EVERY in (0, 2) else None
            cpu.append(time.process_time() - began)
        _, peak = resident()
        taken = [t for t in range(1, STEPS) if rv.store.get(layout.snapshot_key(t)) is not None]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    groups = [sum(cpu[t - 1 : t + 1]) for t in range(EVERY, STEPS, EVERY)]  # round t−1 ends where a snapshot may begin
    plain = [sum(cpu[t - 1 : t + 1]) for t in range(EVERY - 2, STEPS, EVERY)]
    spent = statistics.median(groups) - statistics.median(plain)
    with_one = statistics.median(late[t] for t in range(EVERY, STEPS, EVERY))
    without = statistics.median(late[t] for t in range(2, STEPS, EVERY))
    print(f"{n / 1e6:g} M parameters, F = {fragments}, snapshots at {taken}; memcpy of 8 B each: {copy:.3f} CPU-s")
    print(f"  peak at the closer   {(peak - base) / n:6.1f} B per parameter ({(peak - base) / 2**30:.2f} GiB)")
    print(f"  CPU per snapshot     {spent:6.3f} s = {spent / copy:.1f} x memcpy")
    print(f"  decided to next step {with_one:6.3f} s with a snapshot, {without:.3f} s without")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    given = [float(a) for a in sys.argv[1:]]
    main(*given[:1], *map(int, given[1:2]), *given[2:3])
