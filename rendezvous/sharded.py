"""A live step reduced in shards: do your part, fetch the others', take over for the dead.

    up    S (the offer) + S/N (your part's mean)     down   (N−1)/N·S (your range of the others) + (N−1)/N·S (parts)

    my part:      GET my range of every body ─▶ mean ─▶ PUT ─▶ mean/{j}.json (put_once)
    the others':  poll mean/{j}.json ─▶ GET
                  its owner is dead, or we waited (longer by rank, at most 2 × patience) ─▶ compute it here: same bits

Not promised: that a part is computed once.  Its register says which copy is fetched.
"""

from collections.abc import Callable

import numpy as np

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.closing import Vigil
from rendezvous.errors import Corrupt
from rendezvous.membership import Membership
from rendezvous.records import Commit
from rendezvous.reduce import Mine, Reducer, Shard
from rendezvous.rules import Timing


class Sharer:
    """One replica's share of a sharded reduction.   alert: called before every pause; may raise."""

    def __init__(
        self, clock: Clock, reducer: Reducer, members: Membership, timing: Timing, alert: Callable[[], None]
    ) -> None:
        self._clock, self._reducer, self._members, self._timing, self._alert = clock, reducer, members, timing, alert
        self._needed = 0.0  # seconds for the last part that was ours

    def mean(self, commit: Commit, out: np.ndarray, mine: Mine | None) -> None:
        """The commit's mean into `out`; on the way, what this replica owes to the others.

        Who meets a bad blob leaves the part to others: its writer has the bytes in memory, and takes over.  He also
        looks whether his own is still there: two writers would wait for each other.
        """
        parts = self._reducer.parts(commit, out.size)
        missing = list(range(len(parts)))
        vigil = Vigil(self._clock, self._timing)
        while True:
            vigil.look()
            for j in list(missing):
                due = commit.owners[j] == self._members.slot or self._turn(commit, j, vigil.idle)
                if due and self._make(commit, j, parts[j], out, mine, vigil.idle):
                    missing.remove(j)
            missing = [j for j in missing if not self._reducer.take_part(commit, j, parts[j], out)]
            if not missing:
                return
            self._alert()
            vigil.sleep()

    def _make(
        self, commit: Commit, j: int, part: list[Shard], out: np.ndarray, mine: Mine | None, waited: float
    ) -> bool:
        began = self._clock.now()
        try:
            if part:
                self._reducer.announce_part(commit, j, self._reducer.make_part(commit, part, out, mine))
        except Corrupt:
            if waited > self._timing.give_up:
                raise
            if mine is not None:
                self._reducer.mend_mine(mine)
            return False
        self._needed = self._clock.now() - began
        return True

    def _turn(self, commit: Commit, j: int, waited: float) -> bool:
        """Is it on us to compute a part that somebody else owns and has not announced?"""
        owner = commit.owners[j]
        peer = self._members.peers.get(owner)
        apart = layout.slot_index(self._members.slot) - layout.slot_index(owner)
        rank = max(1, apart % max(2, self._members.wanted.universe))
        patience = max(4 * self._timing.poll, 0.4 * commit.pace, 2 * self._needed)
        gone = peer is not None and peer.dead(self._timing.dead_after)
        return waited > patience * min(2.0, 0.75 + rank / 4) or (gone and rank == 1)
