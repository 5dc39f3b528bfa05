"""Our S3 path beside the bare obstore client on the same bytes, over loopback; and beside a busy Python loop.

    python -m tests.benchmarks.bench_s3 [MiB] [ROUNDS]        256 MiB, 7 rounds; the server is a process of its own

bare    the fastest of: one PUT, obstore's own multipart        one GET of everything, then a copy into the buffer
ours    CloudStore.put                                          CloudStore.get_into

thread    the main thread counts in pure Python meanwhile          process    another process does
Both take a core away; only the first one also holds the interpreter, so thread / process is what the GIL costs.

The variants take turns; the figures are medians of rounds.  Goals: ours ≥ 0.7 × bare, thread ≤ 1.5 × alone.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from obstore.store import S3Store

from rendezvous.stores.cloud.store import PART, PARTS_AT_ONCE, RANGE, CloudStore


@contextmanager
def server() -> Iterator[str]:
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, ignore_cleanup_errors=True) as root:
        command = [sys.executable, "-m", "tests.support.s3_server", "0", root]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait()


def beside_a_process(action: Callable[[], object]) -> float:
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        return seconds(action)
    finally:
        process.kill()
        process.communicate()


def beside_a_thread(action: Callable[[], object]) -> float:
    """Run `action` in a thread while this one never lets go of the interpreter of its own accord."""
    took = list[float]()
    thread = threading.Thread(target=lambda: took.append(seconds(action)))
    thread.start()
    n = 0
    while thread.is_alive():
        for _ in range(10_000):
            n += 1
    return took[0]


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def variants(endpoint: str, size: int) -> dict[str, Callable[[], object]]:
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    ours = CloudStore("s3://bucket/ours")
    bare = S3Store("bucket", prefix="bare", region="us-east-1", client_options={"allow_http": True, "timeout": "300s"})
    body, out = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20))), memoryview(bytearray(size))
    parts = {"use_multipart": True, "chunk_size": PART, "max_concurrency": PARTS_AT_ONCE}

    def get_bare() -> None:
        out[:] = memoryview(bare.get("k").bytes())

    def get_bare_ranges() -> None:
        starts = list(range(0, size, RANGE))
        lengths = [min(RANGE, size - s) for s in starts]
        for start, part in zip(starts, bare.get_ranges("k", starts=starts, lengths=lengths, coalesce=0), strict=True):
            out[start : start + len(part)] = memoryview(part)

    return {
        "PUT bare, single": lambda: bare.put("k", body, use_multipart=False),
        "PUT bare, parts": lambda: bare.put("k", body, **parts),
        "PUT ours": lambda: ours.put("k", body),
        "GET bare, whole": get_bare,
        "GET bare, ranges": get_bare_ranges,
        "GET ours": lambda: ours.get_into("k", out),
    }


def main(size: int, rounds: int) -> None:
    with server() as endpoint:
        calls = variants(endpoint, size)
        for name in ("PUT bare, single", "PUT ours", "GET ours"):
            calls[name]()
        times = {(name, how): list[float]() for name in calls for how in HOWS}
        for _ in range(rounds):
            for name, how in times:
                times[name, how].append(HOWS[how](calls[name]))
    middle = {key: median(t) for key, t in times.items()}
    print(f"{size >> 20} MiB, medians of {rounds} rounds   MiB/s   beside a thread   a process   thread / process")
    for name in calls:
        alone, thread, process = (middle[name, how] for how in HOWS)
        print(
            f"  {name:<20}{(size >> 20) / alone:>16.0f}{thread / alone:>14.2f} ×{process / alone:>12.2f} ×"
            f"{thread / process:>15.2f} ×"
        )
    for verb in ("PUT", "GET"):
        best = min(t for (n, how), t in middle.items() if n.startswith(f"{verb} bare") and how == "alone")
        print(f"{verb}: ours / best bare = {best / middle[f'{verb} ours', 'alone']:.2f}")


HOWS = {"alone": seconds, "thread": beside_a_thread, "process": beside_a_process}

if __name__ == "__main__":
    main(int((sys.argv[1:] or ["256"])[0]) << 20, int((sys.argv[2:] or ["7"])[0]))
