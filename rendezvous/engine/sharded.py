"""The mean of the present step, reduced in shards: each replica computes one part and fetches the other parts.

    up    S (the offer) + S/N (its part's mean)     down   (N−1)/N·S (its range of the other bodies) + (N−1)/N·S (parts)

    own part:     GET its range of every body ─▶ mean ─▶ PUT ─▶ mean/{j}.json (put_once)
    other parts:  poll mean/{j}.json ─▶ GET
                  its owner is gone, or takes longer than `_owner_patience` ─▶ compute the part here: the bits are
                  the same, and the first record under mean/{j}.json counts
    bad blob:     its writer uploads it again, or computes the part; if no writer can ─▶ Corrupt, after `dead_after`

Not promised: that a part is computed once.  mean/{j}.json names the copy that readers fetch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rendezvous.agreement.membership import Membership
from rendezvous.agreement.rules import Timing
from rendezvous.agreement.step_wait import StepWait
from rendezvous.clock import Clock
from rendezvous.errors import Corrupt
from rendezvous.means.bodies import OwnBody, Shard
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit

_PATIENCE = 0.4  # part of the time between two syncs that an owner may take
_LEAST = 0.3  # seconds that an owner may always take, because a part made twice costs a third of a sync's download


@dataclass(eq=False, repr=False)
class ShardedMean:
    """One replica's share of a sharded reduction.

    pause(wait, normal): pauses between two looks; a wait of `normal` seconds is normal; may raise.
    on_bad_body(commit, error): called for a bad listed body; returns whether its writer may still put it back.
    """

    clock: Clock
    reducer: Reducer
    members: Membership
    timing: Timing
    pause: Callable[[StepWait, float], None]
    on_bad_body: Callable[[Commit, Corrupt], bool]
    _took: float = math.inf  # seconds for the last part that this replica made
    _needed: float = 0.0  # the smaller of the last two times, so that one slow request does not count

    def mean(self, commit: Commit, out: np.ndarray, mine: OwnBody | None) -> None:
        """Write the commit's mean into `out`, and announce the parts that this replica owns.

        A replica that finds a bad blob leaves the part to other replicas: the blob's writer has the bytes in memory,
        and puts them back or computes the part.  If no writer has the bytes any more and the part is not announced,
        raise Corrupt after `dead_after`.
        """
        parts = self.reducer.parts.split(commit, out.size)
        missing = set(range(len(parts)))
        wait = StepWait(self.clock, self.timing)
        ours = {j for j in missing if commit.owners[j] == self.members.slot}

        def made_here(j: int) -> bool:
            return self._make_part(commit, j, parts[j], out, mine, wait.idle)

        while True:
            wait.count_time()
            missing -= {j for j in sorted(ours & missing) if made_here(j)}
            missing -= {j for j in sorted(missing) if self.reducer.parts.take(commit, j, parts[j], out)}
            missing -= {j for j in sorted(missing - ours) if self._is_overdue(commit, j, wait.idle) and made_here(j)}
            if not missing:
                return
            self._read_owner_beats(commit, missing, wait.idle)
            self.pause(wait, _PATIENCE * commit.pace)

    def _make_part(
        self, commit: Commit, j: int, part: list[Shard], out: np.ndarray, mine: OwnBody | None, waited: float
    ) -> bool:
        began = self.clock.now()
        try:
            if part:
                body = self.reducer.parts.make(commit, part, out, mine)
                self.reducer.announcements.announce(commit.t, j, body)
        except Corrupt as error:
            if self.reducer.parts.take(commit, j, part, out):
                return True
            if waited > (self.timing.give_up if self.on_bad_body(commit, error) else self.timing.dead_after):
                raise
            return False
        if part:
            took = self.clock.now() - began
            self._needed = min(took, self._took)
            self._took = took
        return True

    def _read_owner_beats(self, commit: Commit, missing: set[int], waited: float) -> None:
        """Read the beats of owners, at most every two beats, if they take longer than this replica did."""
        owners = {commit.owners[j] for j in missing} - {self.members.slot}
        if waited > min(self._needed + 4 * self.timing.poll, self._owner_patience(commit) / 2):
            self.members.read_beats(owners, apart=2 * self.timing.beat)

    def _is_overdue(self, commit: Commit, j: int, waited: float) -> bool:
        """Whether this replica should compute a part of another owner.

        Every replica that waits for the part computes it.  In a trial, taking turns saved 2 % of the bytes, but all
        other replicas waited for the first replica.
        """
        return self._will_not_announce(commit.owners[j], commit.t) or waited > self._owner_patience(commit)

    def _owner_patience(self, commit: Commit) -> float:
        """Return the seconds that an owner may take for a part before other replicas compute it."""
        return max(_LEAST, 4 * self.timing.poll, _PATIENCE * commit.pace, 3 * self._needed)

    def _will_not_announce(self, slot: str, t: int) -> bool:
        """Whether that slot will announce no more parts of step t.

        True if the slot is dead, or is at a later step: then it has announced its parts, or has replayed step t.
        """
        peer = self.members.peers.get(slot)
        return peer is not None and (peer.is_dead(self.timing.dead_after) or peer.beat.step > t)
