"""Threads for passes over vectors in memory, whose pieces do not depend on each other.

    map(work, pieces)    piece 0 ─▶ │ thread 1 │ ─▶ result 0
                         piece 1 ─▶ │ thread 2 │ ─▶ result 1        results in the order of the pieces
                         piece 2 ─▶ │ the first that is free        the error of the first piece that has one, after
                                                                    all threads have ended

Each pass starts its own threads (0.1 ms), so no thread is idle between passes: a fork would lose an idle thread.
Python's lock is free while C code (the codecs' kernels, xxhash, the copy of a file) works on a piece.

Not promised: a gain.  The memory may limit a pass, and threads of other processes may have the cores.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

THREAD_BYTES = 4 << 20  # minimum of bytes per thread in a pass: about a millisecond, ten times a thread's start
MOST_THREADS = 8  # more threads gain little from one CPU's memory, and each thread holds a shard of every body
_CUTS = 4  # runs of pieces per thread, so that a thread on a busy core takes fewer


@dataclass(frozen=True)
class Threads:
    """At most `count` threads for one pass; 1 runs all in the caller's thread."""

    count: int

    def pay(self, size: int) -> bool:
        """Whether a pass over so many bytes is long enough for two threads."""
        return self.count > 1 and size >= 2 * THREAD_BYTES

    def map(self, work: Callable[[T], R], pieces: Sequence[T], size: int) -> list[R]:
        """Return work(piece) for each piece, in order.   size: bytes of the pass.

        Raise the error of the first piece that failed, when all threads have ended.
        """
        count = min(self.count, len(pieces), size // THREAD_BYTES)
        if count < 2:
            return [work(piece) for piece in pieces]
        with ThreadPoolExecutor(count, "pass") as pool:
            return [*pool.map(work, pieces)]

    def in_runs(self, work: Callable[[list[T]], Sequence[R]], pieces: list[T], size: int) -> list[R]:
        """Return the results of work(run) of all runs, in order: one for each piece.   size: bytes of the pass.

        A run has several pieces: a few runs for each thread.
        """
        step = max(1, -(-len(pieces) // (_CUTS * self.count)))
        runs = [pieces[at : at + step] for at in range(0, len(pieces), step)]
        return [*chain.from_iterable(self.map(work, runs, size))]


def threads_here(environ: Mapping[str, str]) -> Threads:
    """Return a thread per core that this process may use, at most OMP_NUM_THREADS and MOST_THREADS."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    told = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "4,2": OpenMP's nested levels
    return Threads(min(int(told) if told.isdecimal() and int(told) else cores, cores, MOST_THREADS))
