"""Means of commits, made by several threads: each thread averages some shards, with the same bits as one thread.

    shards   │ 0 1 2 │ 3 4 5 │ …      each run of shards ──▶ its own Reducer (memory, reported bodies)
                 │       │
                 ▼       ▼
             all bodies as they should be ──▶ the mean
             a body is missing, damaged or poisoned, or there is a sample to keep ──▶ again, in one thread (reduce.py)

So one thread alone reports events, retries, and leaves out bodies.  This is for stores where a
request costs a copy.  Each thread holds one shard, at most a 64th, of every body.

Not promised: a gain if a body is bad; the pass is then made twice.
"""

import numpy as np

from rendezvous.codecs import load_mean_kernel
from rendezvous.means.bodies import OwnBody, Shard, elements_slice, has_shard_digests
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit
from rendezvous.records.wire import Encoder
from rendezvous.threads import Threads


def by_threads(threads: Threads, encoder: Encoder, reducer: Reducer, *, near: bool) -> Reducer:
    """Let these threads encode, and return a reducer for which they average.   near: whether a request costs a copy.

    A codec without C kernels stays as it is: torch has threads of its own.
    """
    if load_mean_kernel(encoder.name) is None:
        return reducer
    encoder.in_runs = threads.in_runs
    return ThreadedReducer(reducer, threads) if near else reducer


class ThreadedReducer(Reducer):
    """A Reducer that averages with several threads, for stores where a request costs a copy."""

    def __init__(self, like: Reducer, threads: Threads) -> None:
        at = like.announcements
        super().__init__(at.store, at.clock, like.emit, like.rules)
        self._threads = threads
        self._idle: list[Reducer] = []  # reducers of threads that have ended; their memory is reused
        self._flaws: list[str] = []  # why this pass needs one thread

    def mean_of_shards(
        self,
        commit: Commit,
        shards: list[Shard],
        out: np.ndarray,
        mine: OwnBody | None,
        packed: np.ndarray | None = None,
    ) -> str | None:
        size = out[elements_slice(shards)].nbytes * len(commit.offers) if shards else 0
        if self.sample is None and has_shard_digests(commit) and self._threads.pay(size):
            self._flaws.clear()

            def average(run: list[Shard]) -> tuple[()]:
                rows = None if packed is None else packed[self.bodies.place_in_part(shards, run)]
                self._average(commit, run, out, mine, rows)
                return ()

            self._threads.in_runs(average, shards, size)
            if not self._flaws:
                return None
            self._idle.clear()  # a reducer reports a bad body only once, so the next pass needs new reducers
        return super().mean_of_shards(commit, shards, out, mine, packed)

    def _average(
        self, commit: Commit, run: list[Shard], out: np.ndarray, mine: OwnBody | None, packed: np.ndarray | None
    ) -> None:
        """Write the mean of these shards, in a thread.   If the mean may be wrong, note a flaw."""
        if self._flaws:
            return
        try:
            reducer = self._idle.pop()
        except IndexError:
            at = self.announcements
            reducer = Reducer(at.store, at.clock, self._note_event, self.rules)
        if trouble := reducer.mean_of_shards(commit, run, out, mine, packed):
            self._flaws.append(trouble)
        self._idle.append(reducer)

    def _note_event(self, event: str, **_: object) -> None:
        self._flaws.append(event)
