"""Bytes on the wire and peak memory of one outer sync, counted in real processes.

    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.bench_bytes [MILLIONS=16] [REPLICAS=4] [ROUNDS=3]

S      bytes of one body.   its nominal size: bits per element of the codec's name, without scales
up     sharded: S + S/N            direct: S; the closer also writes the mean down once (fp32, "announced")
down   sharded: 2(N−1)/N·S         direct: (N−1)·S, for a replica that keeps its own body in memory
rest   registers, beats and polls, all keys that are no blob
extra  VmHWM during a sync − VmRSS before the first one, without the flat vectors (a lossy codec's residual is one):
       a·S + b, from syncs of two sizes.  b: fixed buffers

Bytes are means over replicas and rounds of the store's own counters; memory is the replica with the most.
Goals: bytes within 2 % of the minimum, S within 2 % of nominal, a ≤ 1.5.   Counts do not depend on the load.

Not promised: what a cloud client adds (headers, TLS, retried requests).
"""

import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from rendezvous import codecs
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import together_on
from rendezvous.clock import SystemClock
from rendezvous.engine.allreduce import NoState
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.records.wire import Encoder
from rendezvous.store import Buffer
from rendezvous.stores.files import FileStore
from tests.support.ticking import tick_until

BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
FORMS = [(codec, sharded) for codec in ("fp32", "int8") for sharded in (False, True)]


class Counting(FileStore):
    """A folder that counts what goes up and down, by kind of key."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.counts = Counter[tuple[str, str]]()

    def put(self, key: str, body: Buffer) -> None:
        super().put(key, body)
        self._count("up", key, memoryview(body).nbytes)

    def create(self, key: str, body: Buffer) -> None:
        super().create(key, body)
        self._count("up", key, memoryview(body).nbytes)

    def get(self, key: str) -> bytes | None:
        body = super().get(key)
        self._count("down", key, len(body or b""))
        return body

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        done = super().get_into(key, out, start)
        self._count("down", key, out.nbytes)
        return done

    def _count(self, way: str, key: str, size: int) -> None:
        kind = key.split("/")[2] if key.endswith(".bin") else "rest"
        self.counts[way, kind] += size


def memory(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field}:")[2].split()[0]) * 1024


def sync(rv: Rendezvous, vector: np.ndarray) -> int:
    """One outer sync; -> peak RSS during it."""
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    rv.offer(vector, 1)
    commit = rv.settle()
    rv.mean(commit, vector)
    peak = memory("VmHWM")
    rv.advance(commit)
    mine = rv.own_blobs
    while any(mine.may_be_missed(body) for body in mine.bodies):  # elsewhere inner steps last longer than a beat
        rv.members.tick()
        time.sleep(0.01)
    return peak


def replica(rank: int, count: int, n: int, rounds: int, form: tuple[str, bool], root: str, results: Any) -> None:
    import torch

    torch.set_num_threads(1)
    store, clock, (codec, sharded) = Counting(root), SystemClock(), form
    rules = Rules(2, codec=codec, shard_from=1 if sharded else 1 << 60, snapshot_every=1 << 30)
    rv = Rendezvous(
        store, clock, f"r{rank:02d}", rules, Timing(poll=0.01, start_patience=60.0), together=together_on(store)
    )
    rv.claim()
    threading.Thread(target=tick_until, args=(rv.members, lambda: False), daemon=True).start()
    rv.join(NoState())
    source = np.random.default_rng(rank).standard_normal(n, dtype=np.float32)
    vectors, totals, sizes, peaks = [source[: n // 4].copy(), source.copy()], Counter[tuple[str, str]](), [], []
    warm_up(codec)
    before = memory("VmRSS")
    for _ in range(rounds):
        for vector in vectors:  # each is a fragment of its own: the first is small
            vector[:] = source[: vector.size]
            store.counts.clear()
            peak = sync(rv, vector)
            before += vector.nbytes if codec != "fp32" and len(peaks) < 2 else 0  # its residual, from now on
            peaks.append(peak - before)
            sizes.append(rv.last_offer.size if rv.last_offer else 0)
        totals += store.counts
    results.put((totals, peaks[:2], sizes[:2]))
    results.close()
    results.join_thread()
    os._exit(0)


def warm_up(codec: str) -> None:
    """Make a codec allocate the buffers that do not depend on the size of its input."""
    body = Encoder(codec).encode(0, np.ones(1 << 20, np.float32))
    if codec != "fp32":
        codecs.get_codec(codec).accumulate(body, 1.0, np.zeros(1 << 20, np.float32), True)


def measure(form: tuple[str, bool], count: int, n: int, rounds: int) -> list[Any]:
    import torch.multiprocessing as mp

    root = tempfile.mkdtemp(prefix="bench-bytes-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    context = mp.get_context("spawn")
    results = context.Queue()
    fleet = [
        context.Process(target=replica, args=(i, count, n, rounds, form, root, results)) for i in range(count)
    ]  # fmt: skip
    try:
        write_control(FileStore(root), SystemClock(), replicas=count, min_replicas=count)
        for p in fleet:
            p.start()
        return list(collected(results, fleet))
    finally:
        for p in fleet:
            p.kill()
            p.join()
        shutil.rmtree(root, ignore_errors=True)


def collected(results: Any, fleet: list[Any]) -> Iterator[Any]:
    left = len(fleet)
    while left:
        try:
            yield results.get(timeout=1)
            left -= 1
        except queue.Empty:
            if any(p.exitcode for p in fleet):
                raise SystemExit("a replica failed; its reason stands above") from None


def row(form: tuple[str, bool], found: list[Any], rounds: int) -> str:
    (codec, sharded), count, (small, s) = form, len(found), found[0][2]

    def moved(way: str, *kinds: str) -> float:
        return mean(sum(c.get((way, k), 0) for k in kinds) for c, _, _ in found) / rounds

    up, down = moved("up", "delta", *(["mean"] if sharded else [])), moved("down", "delta", "mean")
    least_up, least_down = (s + s / count, 2 * (count - 1) / count * s) if sharded else (s, (count - 1) * s)
    announced = "" if sharded else f"   announced {moved('up', 'mean') * count / s:.2f} S"
    few, many = max((peaks for _, peaks, _ in found), key=lambda peaks: peaks[1])
    extra = (many - few) / (s - small)
    misses = [name for name, bad in [
        ("up", abs(up / least_up - 1) > 0.02), ("down", down / least_down - 1 > 0.02), ("extra", extra > 1.5),
    ] if bad]  # fmt: skip
    return (
        f"  {codec:5s} {'sharded' if sharded else 'direct ':7s}   "
        f"up {up / least_up:6.3f} ×   down {down / least_down:6.3f} × least   "
        f"rest {moved('up', 'rest') / 1e3:5.1f} kB up {moved('down', 'rest') / 1e3:6.1f} kB down   "
        f"extra {extra:5.2f} S + {(few - extra * small) / 1e6:.0f} MB{announced}"
        f"{'   MISSED: ' + ', '.join(misses) if misses else ''}"
    )


def main() -> None:
    given = [int(a) for a in sys.argv[1:]]
    millions, count, rounds = given + [16, 4, 3][len(given) :]
    n, began = millions * 1_000_000, time.monotonic()
    print(f"{millions} M elements, {count} replicas, {rounds} rounds")
    for form in FORMS:
        print(row(form, measure(form, count, n, rounds), rounds), flush=True)
    vector = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
    sizes = {codec: Encoder(codec).encode(0, vector).nbytes / (n * bits / 8) for codec, bits in BITS.items()}
    print("  S / nominal:  " + "   ".join(f"{codec} {size:.3f}" for codec, size in sizes.items()))
    print(f"  ({time.monotonic() - began:.0f} s)")


if __name__ == "__main__":
    main()
