"""How long training stands still for a sync over a link of 100 Mbit/s, with τ and without.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_overlap [THOUSANDS=3000] [ROUNDS=8] [PACE_MS=80] [FRAGMENTS=1]

         replica 0 ── 12.5 MB/s ── S3 server ──┐
                                               ├── one folder in memory
         replica 1 ── 12.5 MB/s ── S3 server ──┘

Each replica has a link (and a server process) of its own; both directions share its 12.5 MB/s, and a request waits
50 ms before it is answered.  An inner step is a real batch, then pure Python that never lets go of the GIL, then a wait
until PACE_MS are over, as if for an accelerator, then AdamW.  H and τ follow from the sizes: τ steps take 1.2 × as long
as a fragment takes up and down, plus 20 requests.

    hooks     seconds per round inside the hooks of optimizer.step(): gather, Δ, join, outer step, scatter, journal
    sync      of that, inside the manager's allreduce and the wait for it: with τ, what is left of a round that is late
    blocked   what of the hooks is more than the same hooks, in the same form, take without a limit (medians)
    share     of the wall time of the whole round
    step      an inner step without its hooks: what a transfer under way costs the training beside it

Medians over rounds; the worse replica.  Two more rounds warm up.  Goal: with τ, blocked < 2 % of wall time.

Not promised: anything where the link is busy with more than this run; α is 0.5, as Streaming DiLoCo has it.
"""

import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

RATE, LATENCY, WARM, REPLICAS = 12.5e6, 0.05, 2, 2


Row = tuple[float, float, float, float]  # hooks, wall, step, sync


@dataclass(frozen=True)
class Case:
    """One run of both replicas."""

    delay: int
    sync_every: int
    fragments: int
    limited: bool
    rounds: int
    pace: float
    width: int


class Hooks:
    """Seconds inside all hooks that come between this one's two, step by step."""

    def __init__(self) -> None:
        self.inside, self._began = list[float](), 0.0

    def first(self, *_: object) -> None:
        self._began = time.perf_counter()

    def last(self, *_: object) -> None:
        self.inside.append(time.perf_counter() - self._began)


class Span:
    """Seconds inside a manager's allreduce and the wait for it."""

    def __init__(self, manager: Any) -> None:
        self.seconds, self._allreduce = 0.0, manager.allreduce
        manager.allreduce = self._timed(self._started)

    def _started(self, *args: Any, **options: Any) -> Any:
        work = self._allreduce(*args, **options)
        work.wait = self._timed(work.wait)
        return work

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - began

        return timed

    def take(self) -> float:
        took, self.seconds = self.seconds, 0.0
        return took


@contextmanager
def servers(folder: str) -> Iterator[list[str]]:
    """A server for each replica, over the same objects."""
    command = [sys.executable, "-m", "tests.support.s3_server", "0", folder]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(REPLICAS)]
    try:
        yield [p.stdout.readline().strip() for p in started if p.stdout]
    finally:
        for p in started:
            p.terminate()
            p.wait()


def limit(endpoint: str, limited: bool) -> None:
    wish = json.dumps({"rate": RATE if limited else None, "latency_s": LATENCY if limited else 0.0})
    request = urllib.request.Request(f"{endpoint}/-/control", wish.encode(), method="POST")
    with urllib.request.urlopen(request) as answer:
        answer.read()


def model_of(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(width, width, bias=False), nn.Tanh())))


def inner_step(model: nn.Module, inner: torch.optim.Optimizer, pace: float) -> float:
    """-> seconds before optimizer.step(); half of a step is work."""
    began = time.perf_counter()
    x = torch.randn(16, model[0].in_features)  # pyright: ignore
    inner.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    n = 0
    while time.perf_counter() - began < pace / 2:
        n += 1
    time.sleep(max(0.0, pace - (time.perf_counter() - began)))
    return time.perf_counter() - began


def replica(rank: int, endpoint: str, url: str, case: Case, results: Any) -> None:
    from diloco import StoreManager, make_diloco

    torch.set_num_threads(1)
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    model, hooks = model_of(case.width), Hooks()
    manager = StoreManager(url, f"r{rank:02d}", replicas=REPLICAS, min_replicas=REPLICAS)
    span = Span(manager)
    torch.manual_seed(1 + rank)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inner.register_step_post_hook(hooks.first)
    alpha = 0.5 if case.delay else 0.0
    each = case.sync_every // case.fragments
    with make_diloco(
        model, inner, manager, sync_every=case.sync_every, fragments=case.fragments,
        fragment_sync_delay=case.delay, fragment_update_alpha=alpha,
    ):  # fmt: skip
        inner.register_step_post_hook(hooks.last)
        for r in range(WARM + case.rounds):
            began, at = time.perf_counter(), len(hooks.inside)
            steps: list[float] = []
            for _ in range(each):
                work = inner_step(model, inner, case.pace)
                before = time.perf_counter()
                inner.step()
                steps.append(work + time.perf_counter() - before - hooks.inside[-1])
            row = rank, sum(hooks.inside[at:]), time.perf_counter() - began, median(steps), span.take()
            if r >= WARM:
                results.put(row)
    manager.shutdown()


def measure(case: Case, url: str, endpoints: list[str]) -> list[Row]:
    """Medians over rounds, for each replica."""
    for endpoint in endpoints:
        limit(endpoint, case.limited)
    context = mp.get_context("spawn")
    results = context.Queue()
    fleet = [context.Process(target=replica, args=(i, e, url, case, results)) for i, e in enumerate(endpoints)]
    try:
        for p in fleet:
            p.start()
        found = [next_of(results, fleet) for _ in range(REPLICAS * case.rounds)]
        for p in fleet:
            p.join(60)
    finally:
        for p in fleet:
            p.kill()
    mine = [[f[1:] for f in found if f[0] == rank] for rank in range(REPLICAS)]
    return [tuple(median(column) for column in zip(*rows, strict=True)) for rows in mine]  # pyright: ignore


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
    thousands, rounds, pace_ms, fragments = given + [3000, 8, 80, 1][len(given) :]
    width, pace = round(math.sqrt(thousands * 1000 / 4)), pace_ms / 1000
    size = 4 * 4 * width * width // fragments
    delay = math.ceil((1.2 * 2 * size / RATE + 20 * LATENCY) / pace)
    sync_every = fragments * math.ceil(1.5 * delay)
    print(
        f"{4 * width * width / 1e6:.1f} M parameters, {fragments} fragment(s) of {size / 1e6:.1f} MB, "
        f"H = {sync_every}, τ = {delay}, {pace_ms} ms per step, {rounds} rounds; worse replica"
    )
    heads = f"{'hooks':>9s} {'share':>7s} {'sync':>9s} {'share':>7s} {'blocked':>9s} {'share':>7s} {'step':>8s}"
    print(f"  {'':20s} {'round':>8s} {heads}")
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as folder:
        for tau in (0, delay):
            with servers(os.path.join(folder, f"{tau}")) as endpoints:
                free: list[Row] = []
                for limited in (False, True):
                    case = Case(tau, sync_every, fragments, limited, rounds, pace, width)
                    took = measure(case, f"s3://bucket/{tau}-{limited:d}", endpoints)
                    free = free or took
                    show(case, took, free)


def show(case: Case, took: list[Row], free: list[Row]) -> None:
    rows = [
        (hooks / wall, wall, hooks, sync, max(0.0, hooks - base[0]), step)
        for (hooks, wall, step, sync), base in zip(took, free, strict=True)
    ]
    share, wall, hooks, sync, blocked, step = max(rows)
    name = f"τ = {case.delay}, {'100 Mbit/s' if case.limited else 'no limit'}"
    print(
        f"  {name:20s} {wall:6.2f} s {hooks * 1000:6.0f} ms {share:7.2%} {sync * 1000:6.0f} ms {sync / wall:7.2%} "
        f"{blocked * 1000:6.0f} ms {blocked / wall:7.2%} {step * 1000:5.0f} ms",
        flush=True,
    )


if __name__ == "__main__":
    main()
