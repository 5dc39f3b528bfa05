"""Ensures one supervisor per run: a supervisor claims the slot "supervisor" as a replica claims its slot.

    replicas/supervisor/{g}   by put_once: the highest generation may launch
    alive/supervisor          its heartbeat; if it stops changing, or its process is gone, another process takes over

Not promised: exclusion by time.  So a supervisor that was paused looks for a newer claim before it acts.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from diloco.process import processes
from diloco.process.processes import host_name, host_words, mark_run, works_for
from diloco.runlog.reader import SUPERVISOR
from rendezvous import layout
from rendezvous.agreement.membership import REQUESTS, claim, claims_above, newest_claim, read_beat
from rendezvous.clock import Clock
from rendezvous.errors import Fenced, StoreError, StoreRefused
from rendezvous.machine import machine_name
from rendezvous.records.records import Beat, Claim
from rendezvous.store import Readable, Store

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
        if (holder := living_supervisor(store, clock, fresh_s)) is not None:
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


def supervisor_of(store: Readable) -> Claim | None:
    """Return the claim of the present supervisor; do not wait to see whether its heartbeat changes."""
    return still_holding(store.url, newest_claim(store, SUPERVISOR), read_beat(store, SUPERVISOR))


def still_holding(run: str, holder: Claim | None, beat: Beat | None) -> Claim | None:
    """Return the newest claim, unless its supervisor's last heartbeat is "left" or its process is known to be dead."""
    if holder is None or _has_left(holder, beat) or _known_dead(run, holder):
        return None
    return holder


def living_supervisor(store: Store, clock: Clock, fresh_s: float = FRESH_S) -> Claim | None:
    """Return the claim of a live supervisor: its process runs here, or its heartbeat changes within `fresh_s`.

    A claim alone does not show a live supervisor: its process may have been killed long ago.
    """
    holder = newest_claim(store, SUPERVISOR)
    return holder if holder is not None and _is_alive(store, clock, holder, fresh_s) else None


def _is_alive(store: Store, clock: Clock, holder: Claim, fresh_s: float) -> bool:
    fresh_s += REQUESTS * timed_request_s(store, clock)
    first = read_beat(store, SUPERVISOR)
    until = clock.now() + fresh_s
    while not (_has_left(holder, first) or _known_dead(store.url, holder)):
        if _is_on_this_machine(holder) and works_for(holder.pid, store.url):
            return True
        if read_beat(store, SUPERVISOR) != first:
            return True
        if clock.now() >= until:
            return False
        clock.sleep(0.05)
    return False


def timed_request_s(store: Readable, clock: Clock) -> float:
    """Make one request, and return its seconds: REQUESTS of them may delay the next heartbeat of a process."""
    began = clock.now()
    store.get(layout.RUN)
    return clock.now() - began


def _has_left(holder: Claim, beat: Beat | None) -> bool:
    return beat is not None and beat.generation == holder.generation and beat.phase == "left"


def _is_on_this_machine(holder: Claim) -> bool:
    """Whether the claim names a process of this machine, this boot and this pid namespace."""
    return bool(holder.started) and holder.host == host_name() == machine_name()


def _known_dead(run: str, holder: Claim) -> bool:
    """Whether the claim's process was here, and has ended or works for another run, of which this run is a copy."""
    if not _is_on_this_machine(holder):
        return False
    return not processes.is_alive(holder.pid, holder.started) or works_for(holder.pid, run) is False
