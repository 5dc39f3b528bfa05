"""A live step reduced in shards: do your part, fetch the others', take over for the dead.

    up    S (the offer) + S/N (your part's mean)     down   (N−1)/N·S (your range of the others) + (N−1)/N·S (parts)

    my part:      GET my range of every body ─▶ mean ─▶ PUT ─▶ mean/{j}.json (put_once)
    the others':  poll mean/{j}.json ─▶ GET
                  its owner is gone, or silent for longer than `patience` ─▶ compute it here: same bits, and the first
                  register counts
    bad blob:     its writer puts it back or takes over; no replica left that could ─▶ Corrupt, after `dead_after`

Not promised: that a part is computed once.  Its register says which copy is fetched.
"""

import math
from collections.abc import Callable

import numpy as np

from rendezvous.agreement.membership import Membership
from rendezvous.agreement.rules import Timing
from rendezvous.agreement.step_wait import StepWait
from rendezvous.clock import Clock
from rendezvous.errors import Corrupt
from rendezvous.means.bodies import OwnBody, Shard
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit

_PATIENCE = 0.4  # of the time between two syncs
_LEAST = 0.3  # seconds; a part that is made twice costs a third of a sync's download


class ShardedMean:
    """One replica's share of a sharded reduction.

    pause(wait, normal): pauses between two looks, where `normal` seconds of waiting are not trouble; may raise.
    on_bad_body(commit, error): called where a listed body is bad; -> whether it may yet be put back.
    """

    def __init__(
        self,
        clock: Clock,
        reducer: Reducer,
        members: Membership,
        timing: Timing,
        pause: Callable[[StepWait, float], None],
        on_bad_body: Callable[[Commit, Corrupt], bool],
    ) -> None:
        self._clock = clock
        self._reducer = reducer
        self._members = members
        self._timing = timing
        self._pause = pause
        self._on_bad_body = on_bad_body
        self._took = math.inf  # seconds for the last part that this replica made
        self._needed = 0.0  # … or for the one before, if that was less: a slow request or a sleep is not a measure

    def mean(self, commit: Commit, out: np.ndarray, mine: OwnBody | None) -> None:
        """Write the commit's mean into `out`, and on the way the parts that this replica owes to the others.

        A replica that meets a bad blob leaves the part to others: its writer has the bytes in memory, and puts them
        back or takes over.  Where no writer has them any more, and no part was announced, this replica ends after
        `dead_after`.
        """
        parts = self._reducer.split_into_parts(commit, out.size)
        missing = set(range(len(parts)))
        wait = StepWait(self._clock, self._timing)
        ours = {j for j in missing if commit.owners[j] == self._members.slot}

        def made_here(j: int) -> bool:
            return self._make_part(commit, j, parts[j], out, mine, wait.idle)

        while True:
            wait.count_time()
            missing -= {j for j in sorted(ours & missing) if made_here(j)}
            missing -= {j for j in sorted(missing) if self._reducer.take_part(commit, j, parts[j], out)}
            missing -= {j for j in sorted(missing - ours) if self._is_overdue(commit, j, wait.idle) and made_here(j)}
            if not missing:
                return
            self._read_owner_beats(commit, missing, wait.idle)
            self._pause(wait, _PATIENCE * commit.pace)

    def _make_part(
        self, commit: Commit, j: int, part: list[Shard], out: np.ndarray, mine: OwnBody | None, waited: float
    ) -> bool:
        began = self._clock.now()
        try:
            if part:
                body = self._reducer.make_part(commit, part, out, mine)
                self._reducer.announcements.announce(commit.t, j, body)
        except Corrupt as error:
            if self._reducer.take_part(commit, j, part, out):
                return True
            if waited > (self._timing.give_up if self._on_bad_body(commit, error) else self._timing.dead_after):
                raise
            return False
        if part:
            took = self._clock.now() - began
            self._needed = min(took, self._took)
            self._took = took
        return True

    def _read_owner_beats(self, commit: Commit, missing: set[int], waited: float) -> None:
        """Read the beats of owners that need longer than we did: every two beats, or when one may have died."""
        owners = {commit.owners[j] for j in missing} - {self._members.slot}
        if waited > min(self._needed + 4 * self._timing.poll, self._owner_patience(commit) / 2):
            self._members.read_beats(owners, apart=2 * self._timing.beat)

    def _is_overdue(self, commit: Commit, j: int, waited: float) -> bool:
        """Whether a part of another owner is to be computed here.

        Every replica that waits for it computes it: turns saved a fiftieth of the bytes, and made all wait for the
        first.
        """
        return self._will_not_announce(commit.owners[j], commit.t) or waited > self._owner_patience(commit)

    def _owner_patience(self, commit: Commit) -> float:
        """Seconds that an owner may take for a part before others do it."""
        return max(_LEAST, 4 * self._timing.poll, _PATIENCE * commit.pace, 3 * self._needed)

    def _will_not_announce(self, slot: str, t: int) -> bool:
        """Whether that slot will announce no part of step t any more.

        A dead one will not; nor one at a later step: it announced its parts before, or replayed t from its bodies.
        """
        peer = self._members.peers.get(slot)
        return peer is not None and (peer.is_dead(self._timing.dead_after) or peer.beat.step > t)
