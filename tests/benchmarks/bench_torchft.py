"""One outer sync beside stock torchft: its DiLoCo, Manager, Lighthouse and Gloo, as its users write it.

    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.bench_torchft [MILLIONS=50] [REPLICAS=4] [ROUNDS=5] [TENSORS=64]

The same model in the same processes, in turns: torchft's way, ours (StoreManager and make_diloco on a folder in
memory), and our engine alone; first with fp32, then with int8.  Inner steps are empty; noise moves the parameters
before each round.

    sync   from "Δ is computed" to "the mean is in its buffer".  torchft: allreduce … wait, without its quorum, which
           comes before Δ.  Ours: agreement, polling, codec and digests of θ.  Engine: the same without digests of θ
    hook   everything that optimizer.step() does: gather or Δ, quorum, sync, commit, outer step, scatter

Medians over rounds; each from when all replicas are ready to when all are done.  Goal: the engine's sync ≤ 0.5 ×
torchft's.  Needs about 10 GB of memory for 50 M.

Not promised: anything about a real network; Gloo and the folder both copy through memory here.
"""

import os
import queue
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn

from tests.benchmarks.bench_sync import life
from tests.benchmarks.bench_sync import ours as sync

Times = tuple[float, float]  # when it began and ended, on this machine's clock


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

    def take(self) -> tuple[float, float]:
        span, self.began = (self.began, self.ended), 0.0
        return span


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
    from rendezvous.agreement.rules import Timing

    manager = StoreManager(root, f"r{rank:02d}", replicas=count, min_replicas=count, timing=Timing(poll=0.005))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = make_diloco(
        model, inner, manager, sync_every=1, outer_momentum=0.9, codec=codec, snapshot_every=1 << 30
    )  # fmt: skip
    return loop, inner, (manager,)


class Engine:
    """Our rendezvous alone, with one flat vector as long as the model: what bench_sync measures."""

    def __init__(self, root: str, rank: int, count: int, n: int, codec: str) -> None:
        self._life = life(root, codec, rank, count, n)
        self._delta = np.random.default_rng(rank).standard_normal(n, dtype=np.float32)
        self._vector = torch.empty(n).numpy()

    def fill(self) -> None:
        self._vector[:] = self._delta

    def step(self) -> tuple[float, float]:
        """-> when Δ was there, and when the mean.   What is written in the background has been written then."""
        began = time.perf_counter()
        sync(self._life, self._vector)
        ended = time.perf_counter()
        self._life._background.drain()
        return began, ended


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
    barrier: Any,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = millions * 1_000_000 // tensors
    model = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.02) for _ in range(tensors))
    noise = torch.randn(size, generator=torch.Generator().manual_seed(rank)) * 1e-3
    made = {"torchft": stock(model, rank, count, lighthouse), codec: ours(model, rank, count, f"{root}/run", codec)}
    spans = {form: Span(managers[0]) for form, (_, _, managers) in made.items()}
    engine = Engine(root, rank, count, size * tensors, codec)
    for r in range(rounds + 1):  # the first round warms up
        for form, (loop, inner, _) in made.items():
            if r == 0:
                loop.__enter__()
            hook = inner_step(model, noise, inner, barrier)
            results.put((form, r, spans[form].take(), hook))
        engine.fill()
        barrier.wait()
        span = engine.step()
        barrier.wait()
        results.put((f"{codec} engine", r, span, span))
        if rank == 0:
            for blob in Path(root).glob("*/steps/*/*/*.bin"):
                blob.unlink()
    barrier.wait()
    results.close()
    results.join_thread()
    os._exit(0)


def inner_step(model: nn.ParameterList, noise: torch.Tensor, optimizer: Any, barrier: Any) -> Times:
    """Noise instead of a gradient; -> when the optimizer's hooks began and ended."""
    with torch.no_grad():
        for p in model:
            p.add_(noise)
            p.grad = None
    barrier.wait()
    began = time.perf_counter()
    optimizer.step()
    ended = time.perf_counter()
    barrier.wait()
    return began, ended


def measure(millions: int, count: int, rounds: int, tensors: int, codec: str) -> dict[str, tuple[float, ...]]:
    """form -> seconds of (sync, hook)."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=count, join_timeout_ms=60000)
    lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    root = tempfile.mkdtemp(prefix="bench-torchft-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    context = mp.get_context("spawn")
    results = context.Queue()
    common = count, millions, rounds, tensors, codec, lighthouse, root, results, context.Barrier(count)
    fleet = [context.Process(target=replica, args=(i, *common)) for i in range(count)]
    spans: dict[str, list[list[tuple[Times, Times]]]] = {}
    try:
        for p in fleet:
            p.start()
        for _ in range(count * (rounds + 1) * 3):
            form, r, *both = next_of(results, fleet)
            spans.setdefault(form, [[] for _ in range(rounds + 1)])[r].append(tuple(both))
        for p in fleet:
            p.join(30)
    finally:
        for p in fleet:
            p.kill()
        shutil.rmtree(root, ignore_errors=True)
        server.shutdown()
    return {
        form: tuple(statistics.median(together([both[i] for both in r]) for r in took[1:]) for i in (0, 1))
        for form, took in spans.items()
    }


def together(spans: list[Times]) -> float:
    """Seconds from when all were ready to when all were done; the clock is the machine's."""
    return max(ended for _, ended in spans) - max(began for began, _ in spans)


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
    print(f"{millions} M parameters in {tensors} tensors, {count} replicas, median of {rounds} rounds")
    print(f"  {'':12s} {'sync':>9s} {'× torchft':>10s} {'hook':>9s} {'× torchft':>10s}")
    for codec in ("fp32", "int8"):
        took = measure(millions, count, rounds, tensors, codec)
        base = took["torchft"]
        for form, (alone, hook) in took.items():
            whole = "" if form.endswith("engine") else f"{hook:7.3f} s {hook / base[1]:10.2f}"
            print(f"  {form:12s} {alone:7.3f} s {alone / base[0]:10.2f} {whole}", flush=True)


if __name__ == "__main__":
    main()
