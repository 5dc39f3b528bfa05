"""The mean of a commit, for a running replica: it waits for a bad body, and repairs its own bodies for other replicas.

    listed bodies ──▶ Reducer ──▶ mean                                 direct
                      ShardedMean: our part ─▶ others' parts ─▶ mean   sharded
                         │ Corrupt
                         ├─ a writer still has the bytes in memory ──▶ repair our own bodies, pause, read again
                         ├─ there is a newer snapshot              ──▶ Collected: heal from it
                         └─ else                                   ──▶ Corrupt

    the closer of a direct step announces the mean (announcements.py) after the step

Not promised: that the wait ends before `give_up` while a writer of the bad body lives.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rendezvous import layout
from rendezvous.agreement.membership import Membership
from rendezvous.agreement.rules import Timing
from rendezvous.agreement.step_wait import StepWait
from rendezvous.background import Job
from rendezvous.clock import Clock
from rendezvous.engine.own_blobs import OwnBlobs
from rendezvous.errors import Corrupt
from rendezvous.keeping.budget import sizes_of
from rendezvous.means.bodies import OwnBody
from rendezvous.means.reduce import Reducer, refuse_misweighed
from rendezvous.records.records import Commit
from rendezvous.store import Store

if TYPE_CHECKING:
    from rendezvous.engine.sharded import ShardedMean


@dataclass(eq=False, repr=False)
class Averager:
    """One replica's means.

    check_before_pause(): raises if the replica must leave instead of waiting.
    refuse_lost(): raises RecordsLost if the run's store was replaced; a missing body would never appear there.
    """

    store: Store
    clock: Clock
    reducer: Reducer
    members: Membership
    own_blobs: OwnBlobs
    timing: Timing
    check_before_pause: Callable[[], None]
    refuse_lost: Callable[[], None]
    _announcement: Job | None = None

    @cached_property
    def _sharded_mean(self) -> "ShardedMean":
        from rendezvous.engine.sharded import ShardedMean

        return ShardedMean(self.clock, self.reducer, self.members, self.timing, self._pause, self._on_bad_body)

    def mean(self, commit: Commit, out: np.ndarray) -> None:
        """Write the mean of a step in which this replica takes part into `out`."""
        refuse_misweighed(commit, self.reducer.rules)
        mine = self.own_blobs.body_of(commit.t)
        with self._or_collected(commit):
            if commit.mode == "sharded":
                self._sharded_mean.mean(commit, out, mine)
            else:
                self._mean_when_mended(commit, out, mine)
        left = sizes_of(commit, out.size, self.reducer.rules)
        if commit.mode == "direct" and commit.by == self.members.name and left.mean:
            self._announcement = self._prepare_announcement(commit, out, mine)

    def mean_of_past(self, commit: Commit, out: np.ndarray) -> None:
        """Write the mean of a step that was decided without this replica into `out`."""
        refuse_misweighed(commit, self.reducer.rules)
        with self._or_collected(commit):
            self._mean_when_mended(commit, out, None)

    def take_announcement(self) -> Job | None:
        """Return the job that announces the newest mean, once; None if this replica need not announce it."""
        job = self._announcement
        self._announcement = None
        return job

    def _prepare_announcement(self, commit: Commit, mean: np.ndarray, mine: OwnBody | None) -> Job:
        copy = self.own_blobs.lend_memory(mine, mean)

        def announce() -> None:
            self.reducer.announcements.announce(commit.t, 0, copy)
            self.own_blobs.return_memory(copy)

        return announce

    # ------------------------------------------------------------------ bad bodies

    def _mean_when_mended(self, commit: Commit, out: np.ndarray, mine: OwnBody | None) -> None:
        """Write the mean as soon as its blobs are intact.   Raise Corrupt if no writer can help, or after `give_up`."""
        began = self.clock.now()
        while True:
            try:
                return self.reducer.mean(commit, out, mine)
            except Corrupt as error:
                if not self._on_bad_body(commit, error) or self.clock.now() - began > self.timing.give_up:
                    raise
                self.check_before_pause()

    def _on_bad_body(self, commit: Commit, error: Corrupt) -> bool:
        """Repair our own bodies after a listed body was found bad; else two replicas could wait for each other.

        Return whether a writer may still put the bad body back.
        """
        self.members.status.note = str(error)
        self.refuse_lost()
        self.own_blobs.mend_all()
        return self._writers_hold(commit)

    def _writers_hold(self, commit: Commit) -> bool:
        """Whether a writer of a listed body lives and may still hold the body in memory: until step t + 2 is closed."""
        self.members.read_beats(o.slot for o in commit.offers)
        peers = [self.members.peers.get(o.slot) for o in commit.offers]
        alive = any(p and p.is_beating(self.timing.dead_after) for p in peers)
        return alive and self.store.get(layout.commit_key(commit.t + 2)) is None

    def _pause(self, wait: StepWait, normal: float) -> None:
        """Pause between two looks for a decided step's missing parts.   normal: seconds of a normal wait."""
        self.check_before_pause()
        if wait.is_overdue(normal):
            self.refuse_lost()
            self.own_blobs.mend_missed()
        wait.sleep()

    @contextmanager
    def _or_collected(self, commit: Commit) -> Generator[None]:
        try:
            yield
        except Corrupt:
            from rendezvous.keeping.collected import refuse_collected

            refuse_collected(self.store, commit.t)
            raise
