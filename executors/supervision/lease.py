"""Ensures one supervisor per run: a supervisor claims the slot "supervisor" as a replica claims its slot.

    replicas/supervisor/{g}   by put_once: the highest generation may launch
    alive/supervisor          its heartbeat; if that stops changing, or its process is gone, another process takes over

Not promised: exclusion by time.  So a supervisor that was paused looks for a newer claim before it acts.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from diloco.process import processes
from diloco.process.processes import host_name, host_words, mark_run
from diloco.runlog.reader import SUPERVISOR
from rendezvous import layout
from rendezvous.agreement.membership import claim, claims_above, newest_claim
from rendezvous.clock import Clock
from rendezvous.errors import Fenced, StoreError, StoreRefused
from rendezvous.records.records import Beat
from rendezvous.store import Store

FRESH_S = 10.0  # a live supervisor may be silent for some seconds while it imports heavy modules
BEAT_S = 2.0  # seconds between heartbeats during a slow call to a platform
WATCHING = "watching"  # a supervisor's phase after its first look and the actions that follow

T = TypeVar("T")


class Supervised(RuntimeError):
    """Another process supervises this run."""


@dataclass
class Lease:
    """The right to launch replicas of one run.   trouble: why the store refused the last heartbeat, or ""."""

    store: Store
    clock: Clock
    generation: int
    beats: int = 0
    trouble: str = ""

    @classmethod
    def take(cls, store: Store, clock: Clock, fresh_s: float = FRESH_S) -> "Lease":
        """Take the lease.  Raise Supervised if another supervisor is alive, or claims the slot at the same moment."""
        if (holder := newest_claim(store, SUPERVISOR)) is not None:
            from executors.supervision.holder import is_alive

            if is_alive(store, clock, holder, fresh_s):
                raise Supervised(f"process {holder.pid} on {host_words(holder.host)} supervises this run already")
        try:
            return cls.seize(store, clock)
        except Fenced as lost_race:
            raise Supervised(str(lost_race)) from None

    @classmethod
    def seize(cls, store: Store, clock: Clock) -> "Lease":
        """Take the lease from any holder.  Raise Fenced if another process takes it at the same moment."""
        mark_run(store.url)
        pid, started = os.getpid(), processes.start_ticks(os.getpid()) or 0
        lease = cls(store, clock, claim(store, clock, SUPERVISOR, host=host_name(), pid=pid, started=started))
        lease.beat("starting")
        return lease

    def beat(self, phase: str, note: str = "") -> None:
        """Write a heartbeat.   note: a problem, in words for the user."""
        self.beats += 1
        body = Beat(
            slot=SUPERVISOR, generation=self.generation, n=self.beats, phase=phase, step=0, inner=0, rate=0.0,
            at=self.clock.wall(), host=host_name(), pid=os.getpid(), note=note,
        )  # fmt: skip
        try:
            self.store.put(layout.beat_key(SUPERVISOR), body.encode())
            self.trouble = ""
        except StoreError as error:  # heartbeats are advisory: a missing heartbeat does no harm
            self.trouble = str(error) if isinstance(error, StoreRefused) else ""

    def keep_while(self, act: Callable[[], T]) -> T:
        """Call `act`, which may take minutes on a platform, and write heartbeats meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(act)
            while not wait([future], timeout=BEAT_S).done:
                self.beat("launching")
            return future.result()

    @property
    def lost(self) -> bool:
        """Whether another supervisor has taken over."""
        return any(True for _ in claims_above(self.store, SUPERVISOR, self.generation))
