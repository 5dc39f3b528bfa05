"""One outer sync beside stock torchft: its DiLoCo, Manager, Lighthouse and Gloo, as its users write it.

    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.bench_torchft [MILLIONS=50] [REPLICAS=4] [ROUNDS=5] [TENSORS=64]

The same model in the same processes, in turns: torchft's way and ours (StoreManager and make_diloco on a folder in
memory), first with fp32, then with int8.  Inner steps are empty; noise moves the parameters before each round.

    sync   from "Δ is computed" to "the mean is in its buffer": torchft's allreduce … wait; ours with agreement, digests
           of θ, polling and codec inside, torchft's without its quorum (it comes before Δ)
    hook   everything that optimizer.step() does: gather or Δ, quorum, sync, commit, outer step, scatter

Medians over rounds of the slowest replica.  Goal: sync ≤ 0.5 × torchft's.  Needs about 10 GB of memory for 50 M.

Not promised: anything about a real network; Gloo and the folder both copy through memory here.
"""

import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn


class Span:
    """Wraps a manager's allreduce: began at its first call, ended with the last wait."""

    def __init__(self, manager: Any) -> None:
        self.began, self.ended, self._real = 0.0, 0.0, manager.allreduce
        manager.allreduce = self._allreduce

    def _allreduce(self, *args: Any, **options: Any) -> Any:
        self.began = self.began or time.perf_counter()
        work = self._real(*args, **options)
        wait = work.wait

        def timed(*a: Any) -> Any:
            done = wait(*a)
            self.ended = time.perf_counter()
            return done

        work.wait = timed
        return work

    def take(self) -> float:
        took, self.began = self.ended - self.began, 0.0
        return took


def stock(model: nn.Module, rank: int, count: int, lighthouse: str) -> tuple[Any, Any, Any]:
    """torchft as in its own train_diloco.py, on the CPU."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=60))
    manager = Manager(
        group, None, None, count, use_async_quorum=False, init_sync=False, rank=0, world_size=1, hostname="127.0.0.1",
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse, replica_id=f"replica_{rank}",
    )  # fmt: skip
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(manager, [model], inner, outer, sync_every=1), inner, (manager, store)


def ours(model: nn.Module, rank: int, count: int, root: str, codec: str) -> tuple[Any, Any, Any]:
    from diloco import StoreManager, make_diloco
    from rendezvous.rules import Timing

    manager = StoreManager(root, f"r{rank:02d}", replicas=count, min_replicas=count, timing=Timing(poll=0.005))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = make_diloco(
        model, inner, manager, sync_every=1, outer_momentum=0.9, codec=codec, snapshot_every=1 << 30
    )  # fmt: skip
    return loop, inner, (manager,)


def replica(
    rank: int,
    count: int,
    millions: int,
    rounds: int,
    tensors: int,
    codec: str,
    lighthouse: str,
    root: str,
    results: Any,
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    barrier_store = dist.FileStore(f"{root}/barrier", count)
    size = millions * 1_000_000 // tensors
    model = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.02) for _ in range(tensors))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 1e-3
    made = {"torchft": stock(model, rank, count, lighthouse), codec: ours(model, rank, count, f"{root}/run", codec)}
    spans = {form: Span(managers[0]) for form, (_, _, managers) in made.items()}
    barrier = barrier_of(barrier_store, rank, count)
    for r in range(rounds + 1):  # the first round warms up
        for form, (loop, inner, _) in made.items():
            with torch.no_grad():
                for p in model:
                    p.add_(noise)
                    p.grad = None
            if r == 0:
                loop.__enter__()
            barrier(f"{r}{form}")
            began = time.perf_counter()
            inner.step()
            hook = time.perf_counter() - began
            barrier(f"{r}{form}-")
            if r:
                results.put((form, r, spans[form].take(), hook))
            else:
                spans[form].take()
            if rank == 0 and form != "torchft":
                for blob in Path(f"{root}/run/steps").glob("*/*/*.bin"):
                    blob.unlink()
    barrier("end")
    results.close()
    results.join_thread()
    os._exit(0)


def barrier_of(store: Any, rank: int, count: int) -> Callable[[str], None]:
    def barrier(name: str) -> None:
        store.add(name, 1)
        while store.add(name, 0) < count:
            time.sleep(0.002)

    return barrier


def measure(millions: int, count: int, rounds: int, tensors: int, codec: str) -> dict[str, tuple[float, float]]:
    """form -> seconds of (sync, hook)."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=count, join_timeout_ms=60000)
    lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    root = tempfile.mkdtemp(prefix="bench-torchft-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    context = mp.get_context("spawn")
    results = context.Queue()
    fleet = [
        context.Process(target=replica, args=(i, count, millions, rounds, tensors, codec, lighthouse, root, results))
        for i in range(count)
    ]
    slowest: dict[tuple[str, int], tuple[float, float]] = {}
    try:
        for p in fleet:
            p.start()
        for _ in range(count * rounds * 2):
            form, r, sync, hook = next_of(results, fleet)
            was = slowest.get((form, r), (0.0, 0.0))
            slowest[form, r] = max(sync, was[0]), max(hook, was[1])
        for p in fleet:
            p.join(30)
    finally:
        for p in fleet:
            p.kill()
        shutil.rmtree(root, ignore_errors=True)
        server.shutdown()
    return {
        form: (
            statistics.median(slowest[form, r][0] for r in range(1, rounds + 1)),
            statistics.median(slowest[form, r][1] for r in range(1, rounds + 1)),
        )
        for form in ("torchft", codec)
    }


def next_of(results: Any, fleet: list[Any]) -> Any:
    """The next result; a replica that fails ends the wait."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if any(p.exitcode for p in fleet):
                raise SystemExit("a replica failed; its reason stands above") from None


def main() -> None:
    given = [int(a) for a in sys.argv[1:]]
    millions, count, rounds, tensors = given + [50, 4, 5, 64][len(given) :]
    print(f"{millions} M parameters in {tensors} tensors, {count} replicas, median of {rounds} rounds, slowest replica")
    print(f"  {'':10s} {'sync':>9s} {'× torchft':>10s} {'hook':>9s} {'× torchft':>10s}")
    for codec in ("fp32", "int8"):
        took = measure(millions, count, rounds, tensors, codec)
        base = took["torchft"]
        for form, (sync, hook) in took.items():
            print(f"  {form:10s} {sync:7.3f} s {sync / base[0]:10.2f} {hook:7.3f} s {hook / base[1]:10.2f}", flush=True)


if __name__ == "__main__":
    main()
