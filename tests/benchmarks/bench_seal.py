"""Cost of the run key: seconds spent on tags as a share of an outer sync.

    python -m tests.benchmarks.bench_seal [--elements 1000000] [--replicas 4] [--rounds 9]

Replicas take turns in one thread, on a folder in memory-backed storage: the fastest store there is, so the share is
the largest.  Blobs have no tags, so it does not grow with the model, but for the digests of shards in the records.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.stores import signed as seal
from rendezvous.stores.files import FileStore
from tests.support.fakes import VectorState


class Watch:
    """Seconds inside some functions, and how often they were called."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - began
                self.calls += 1

        return timed


def sync(seats: list[Rendezvous], deltas: list[np.ndarray]) -> None:
    """One outer step of all."""
    for rv, delta in zip(seats, deltas, strict=True):
        rv.offer(delta, 1)
    for rv in seats:
        commit, mean = rv.settle(), np.empty(deltas[0].size, np.float32)
        rv.mean(commit, mean)
        rv.state.apply(0, mean)
        rv.advance(commit)


def seated(folder: Path, replicas: int, elements: int) -> list[Rendezvous]:
    clock = SystemClock()
    store = seal.under_key(FileStore(folder), clock, b"a key for the benchmark")
    write_control(store, clock, replicas=replicas, min_replicas=replicas, steps=1 << 30)
    rules, timing = Rules(snapshot_every=1 << 30, shard_from=1 << 60), Timing(poll=1e-4)
    seats = [Rendezvous(store, clock, f"r{i:02d}", rules, timing) for i in range(replicas)]
    for rv in seats:
        rv.claim()
        rv.join(VectorState(elements))
        rv.set_rules(rules, timing)
        rv.resume_at(rv.state, rv.step)
    return seats


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--elements", type=int, default=1_000_000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    watch = Watch()
    seal.sign_record, seal.verify_record = watch.around(seal.sign_record), watch.around(seal.verify_record)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as folder:
        seats = seated(Path(folder), args.replicas, args.elements)
        deltas = [np.random.default_rng(i).standard_normal(args.elements, np.float32) for i in range(args.replicas)]
        shares, seconds, calls = [], [], []
        for _ in range(args.rounds):
            before, began = (watch.seconds, watch.calls), time.perf_counter()
            sync(seats, deltas)
            seconds.append((time.perf_counter() - began) / args.replicas)
            shares.append((watch.seconds - before[0]) / args.replicas / seconds[-1])
            calls.append((watch.calls - before[1]) / args.replicas)
    print(f"{args.replicas} replicas, {args.elements:,} elements fp32, medians of {args.rounds}, per replica and sync")
    print(f"  a sync       {1e3 * statistics.median(seconds):8.2f} ms")
    print(f"  tags         {statistics.median(calls):8.1f} made or checked")
    print(f"  their share  {100 * statistics.median(shares):8.2f} %")


if __name__ == "__main__":
    main()
