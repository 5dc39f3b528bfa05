"""One outer sync through a folder in memory, against torch.distributed's Gloo on the same vector.

    python -m tests.benchmarks.bench_sync [MILLIONS=50] [REPLICAS=4] [ROUNDS=5]

A round is timed from "the vector is ready" to "the mean is in the buffer", polling included; θ digests and snapshots
are not in it, the int8 codec is.  Gloo and our rounds alternate in the same processes; medians of the slowest replica.
After each round what is written in the background is waited for, and the blobs are deleted.  Two cores and four
processes: every byte that is moved costs CPU time of all.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import Worker, together_on
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.stores.open import open_store
from tests.support.ticking import tick_until

FORMS = {"fp32": Rules(codec="fp32"), "fp32 direct": Rules(shard_from=1 << 60), "int8": Rules(codec="int8")}


class Opaque:
    """A state whose digest costs nothing: the θ digest is not part of the comparison."""

    def __init__(self, n: int) -> None:
        self.n = n

    def size(self, fragment: int) -> int:
        return self.n

    def apply(self, fragment: int, mean: np.ndarray) -> None: ...
    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {"x": np.zeros(1, np.float32)}

    def load(self, arrays: Any) -> None: ...


def life(root: str, form: str, rank: int, count: int, n: int) -> Rendezvous:
    import threading

    store, clock = open_store(f"{root}/{form.replace(' ', '-')}"), SystemClock()
    if rank == 0:
        write_control(store, clock, replicas=count, min_replicas=count)
    while store.get("control/000000.json") is None:
        time.sleep(0.01)
    rv = Rendezvous(
        store, clock, f"r{rank:02d}", FORMS[form], Timing(poll=0.005), background=Worker(), together=together_on(store)
    )
    rv.claim()
    threading.Thread(target=tick_until, args=(rv.members, lambda: False), daemon=True).start()
    rv.join(Opaque(n))
    return rv


def ours(rv: Rendezvous, vector: np.ndarray) -> None:
    rv.offer(vector, 1)
    commit = rv.settle()
    rv.mean(commit, vector)
    rv.advance(commit)


def replica(rank: int, count: int, n: int, rounds: int, root: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/gloo", rank=rank, world_size=count)
    lives = {form: life(root, form, rank, count, n) for form in FORMS}
    source = np.random.default_rng(rank).standard_normal(n, dtype=np.float32)
    vector = torch.from_numpy(source).clone().numpy()  # aligned as tensors are
    for r in range(rounds + 1):  # the first round warms up
        for form in ["gloo", *FORMS]:
            vector[:] = source
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            if form == "gloo":
                dist.all_reduce(torch.from_numpy(vector))
            else:
                ours(lives[form], vector)
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            if form != "gloo":
                lives[form]._background.drain()  # a mean that is announced is not in the next form's time
            dist.barrier()
            if r:
                results.put((form, r, took, cpu))
            if rank == 0 and form != "gloo":
                shutil.rmtree(f"{root}/{form.replace(' ', '-')}/steps/{r:010d}/delta", ignore_errors=True)
                for blob in open_store(f"{root}/{form.replace(' ', '-')}").list(f"steps/{r:010d}/mean/"):
                    if blob.endswith(".bin"):
                        os.unlink(f"{root}/{form.replace(' ', '-')}/{blob}")
    dist.barrier()
    results.close()
    results.join_thread()
    os._exit(0)


def main() -> None:
    import torch.multiprocessing as mp

    millions, count, rounds = (int(a) for a in [*sys.argv[1:], "50", "4", "5"][:3]) if len(sys.argv) > 3 else (
        int(sys.argv[1]) if len(sys.argv) > 1 else 50, int(sys.argv[2]) if len(sys.argv) > 2 else 4, 5)  # fmt: skip
    n = millions * 1_000_000
    root = tempfile.mkdtemp(prefix="bench-sync-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    context = mp.get_context("spawn")
    results = context.Queue()
    try:
        fleet = [context.Process(target=replica, args=(i, count, n, rounds, root, results)) for i in range(count)]
        for p in fleet:
            p.start()
        slowest: dict[tuple[str, int], float] = {}
        busy: dict[str, list[float]] = {}
        for _ in range(count * rounds * (1 + len(FORMS))):
            form, r, took, cpu = results.get(timeout=300)
            slowest[form, r] = max(took, slowest.get((form, r), 0.0))
            busy.setdefault(form, []).append(cpu)
        for p in fleet:
            p.join()
    finally:
        shutil.rmtree(root, ignore_errors=True)
    median = {f: statistics.median(slowest[f, r] for r in range(1, rounds + 1)) for f in ["gloo", *FORMS]}
    print(f"{millions} M parameters, {count} replicas, median of {rounds} rounds")
    for form, seconds in median.items():
        ratio, cpu = seconds / median["gloo"], statistics.median(busy[form])
        print(f"  {form:12s} {seconds:7.3f} s   {ratio:5.2f} x Gloo   CPU {cpu:6.3f} s per replica")


if __name__ == "__main__":
    main()
