"""Passes of one outer sync over a vector by several threads, against the same passes by one thread.

    python -m tests.benchmarks.bench_threads [MILLIONS=48] [THREADS=2] [ROUNDS=15]

    encode      Δ ─▶ body, with digests; int8 also with its residual       digest    θ and momentum ─▶ digest
    mean        four bodies in a folder in memory ─▶ their mean

In each round every pass runs once with one thread and once with several, in turns which is first.  Nanoseconds for each
parameter, medians; a share is the median over rounds of several / one.

    wall      on a machine whose cores are busy it says what is left there, and not what threads give
    CPU       of all threads: what threads cost
    longest   CPU of the caller and of the thread that had most: the wall time if each thread had a core at once.  It is
              computed and not seen
"""

import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import ClassVar, TypeVar

import numpy as np

from rendezvous.agreement.rules import Rules
from rendezvous.background import no_emit
from rendezvous.clock import SystemClock
from rendezvous.means.by_threads import by_threads
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Listed
from rendezvous.records.state import Digests
from rendezvous.records.wire import Encoder, as_bytes, codec_alignment, shard_grid
from rendezvous.stores.files import FileStore
from rendezvous.threads import Threads
from tests.support.fakes import VectorState

BODIES = 4
KINDS = ("wall", "CPU", "longest")
PAUSE_S = 0.1  # before each pass: a scheduler gives its cores to a process that has slept
Pass = Callable[[], object]
T = TypeVar("T")
R = TypeVar("R")


class Timed(Threads):
    """Threads that keep the CPU seconds of each."""

    spent: ClassVar[defaultdict[int, float]] = defaultdict(float)

    def map(self, work: Callable[[T], R], pieces: Sequence[T], size: int) -> list[R]:
        def counted(piece: T) -> R:
            began = time.thread_time()
            try:
                return work(piece)
            finally:
                Timed.spent[threading.get_ident()] += time.thread_time() - began

        return super().map(counted, pieces, size)


def averaged(store: FileStore, codec: str, x: np.ndarray) -> Commit:
    """Upload the bodies of a step.   Return its commit."""
    ranges = shard_grid(x.size, codec_alignment(codec), Rules().shard_elements)
    listed = list[Listed]()
    for i in range(BODIES):
        written = Encoder(codec).encode_in_shards(0, x, ranges)
        key = f"steps/0000000000/delta/r{i:02d}-1-{codec}.bin"
        store.put(key, as_bytes(written.body))
        listed.append(
            Listed(0, f"r{i:02d}", 1, "n", key, written.body.size, written.digest, 1, 1.0, shards=written.shards)
        )
    return Commit(0, None, "b", tuple(listed), {}, 1, 1.0, 0, "r00-1", "n", 0.0, "direct", ())


def passes(store: FileStore, threads: Threads, x: np.ndarray, out: np.ndarray, state: VectorState) -> dict[str, Pass]:
    """Return each pass over x by these threads, by name."""
    found: dict[str, Pass] = {}
    for codec in ("fp32", "int8"):
        encoder, rules = Encoder(codec), Rules(codec=codec)
        reducer = by_threads(threads, encoder, Reducer(store, SystemClock(), no_emit, rules), near=True)
        commit, ranges = averaged(store, codec, x), shard_grid(x.size, codec_alignment(codec), rules.shard_elements)
        found[f"encode {codec}"] = lambda e=encoder, r=ranges: e.encode_in_shards(0, x, r)
        found[f"mean {codec}"] = lambda m=reducer, c=commit: m.mean_of_shards(c, m.bodies.grid(x.size), out, None)
    digests = Digests(state, 1)
    digests.map = threads.map
    return found | {"digest": lambda: digests.renew_fragment(0)}


def timed(run: Pass, n: int) -> tuple[float, float, float]:
    """Return wall, CPU and longest nanoseconds of this pass for each of n parameters."""
    time.sleep(PAUSE_S)
    Timed.spent.clear()
    wall, cpu, own = time.perf_counter(), time.process_time(), time.thread_time()
    run()
    wall, cpu, own = time.perf_counter() - wall, time.process_time() - cpu, time.thread_time() - own
    others = max((s for thread, s in Timed.spent.items() if thread != threading.get_ident()), default=0.0)
    return wall / n * 1e9, cpu / n * 1e9, (own + others) / n * 1e9


def main() -> None:
    given = [int(a) for a in sys.argv[1:]]
    millions, count, rounds = [*given, *(48, 2, 15)[len(given) :]]
    n = millions * 1_000_000
    x, out = np.random.default_rng(1).standard_normal(n, dtype=np.float32) / 100, np.empty(n, np.float32)
    state = VectorState(n)
    state.arrays = lambda fragment: {"theta.0": state.theta, "momentum.0": x}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        store = FileStore(folder)
        by = {k: passes(store, Timed(k), x, out, state) for k in (1, count)}
        took = {(name, k): list[tuple[float, ...]]() for name in by[1] for k in by}
        for r in range(rounds + 1):  # the first one warms up
            for name in by[1]:
                for k in [*by][:: -1 if r % 2 else 1]:
                    spent = timed(by[k][name], n)
                    took[name, k] += [spent] if r else []
    print(f"{millions} M parameters, {count} threads and 1, {rounds} rounds; ns for each parameter")
    for name in by[1]:
        pairs = [*zip(took[name, 1], took[name, count], strict=True)]
        print(f"  {name:12s} " + "    ".join(column(kind, i, pairs) for i, kind in enumerate(KINDS)))


def column(kind: str, i: int, pairs: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> str:
    one, more = (median(pair[k][i] for pair in pairs) for k in (0, 1))
    return f"{kind} {one:6.2f} ─▶ {more:6.2f}, share {median(b[i] / a[i] for a, b in pairs):5.2f}"


if __name__ == "__main__":
    main()
