"""Plan of the next snapshot: every snapshot_every steps, or sooner if the budget of bytes requires it.

    the budget has room for snapshot_every steps   ●─────────────●─────────────●     every snapshot_every steps
    it has room for p < snapshot_every of them     ●──p──●──p──●──p──●──p──●         p: budget.snapshot_period
    it has room for less than one step             ●─●─●─●─●─●─●─●─●─●─●─●─●─●       at every step

    planned ●  the closer begins ─▶ the next commit confirms it ─▶ visible     planned + RETRY: a closer looks for it,
                                                                               and begins one itself if it is missing

Every replica computes p from the commits that it applies, so all plan the same steps without communication.  The closer
of the step before writes the snapshot.  Only the writer knows that it has begun; the others assume it until RETRY steps
have passed.  If two replicas plan different steps (one has just joined), both snapshots are written.  Each has its own
step and manifest, so this costs only bytes.

Not promised: the budget, if the upload of a snapshot takes longer than a round of training.
"""

from collections.abc import Callable

from rendezvous.keeping.budget import Sizes, snapshot_period

RETRY = 2  # steps: one to write the snapshot, one for its manifest


class SnapshotPace:
    """One replica's plan.   every: the rules' snapshot_every.   budget: bytes; 0: `every` alone decides.

    planned: the newest step for which a snapshot was due.   period: steps from one snapshot to the next.
    """

    def __init__(self, every: int, budget: int) -> None:
        self._every = every
        self._budget = budget
        self.planned = 0
        self.period = every
        self._largest = Sizes(0, 0)  # the largest sizes of a step since the planned one

    def take_step(self, t: int, step: Sizes, *, snapshot: int, newest: int) -> None:
        """Note that commit t was applied.

        step: bytes that it left in the bucket.   snapshot: bytes of a snapshot.   newest: step of the newest known one.
        """
        if newest > self.planned:
            self._plan(newest)
        self._largest = Sizes(max(self._largest.deltas, step.deltas), max(self._largest.mean, step.mean))
        self.period = snapshot_period(self._budget, self._every, snapshot, self._largest)
        if self._is_period_over(t + 1):
            self._plan(t + 1)

    def _is_period_over(self, t: int) -> bool:
        """Whether a snapshot is due at step t.

        If the period is `every`, snapshots are due at its multiples, so that one late snapshot does not delay the next.
        """
        if self.period < self._every:
            return t - self.planned >= self.period
        return t // self._every > self.planned // self._every

    def _plan(self, t: int) -> None:
        self.planned = t
        self._largest = Sizes(0, 0)

    def is_due(self, t: int, newest: int, *, closed: bool, owes: bool, stands: Callable[[int], bool]) -> bool:
        """Whether this replica must write θ_t.

        newest: step of the newest known snapshot.   closed: this replica wrote commit t − 1.   owes: it gave up the
        last snapshot that it began.   stands(step): whether that snapshot exists (a request).

        If there was no snapshot for 2·every steps, every replica writes one.
        """
        if t - newest >= 2 * self._every:
            return True
        if newest >= self.planned:
            return False
        is_missing = closed and t - self.planned >= RETRY and not stands(self.planned)
        return owes or is_missing or (closed and t == self.planned)
