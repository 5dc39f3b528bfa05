"""Durations of a replica's outer steps, and of its waits for their decisions.

    began ──── inner steps, upload ────▶ offered ──── StepWait ────▶ decided          StepTimes: from began to decided
                                            idle ────────────────▶
                                                 m offers ─ waited ─▶

The pause between two polls grows with the wait, and is short again around the time when the decision is expected: after
the shorter duration of the last two steps.

Not promised: wall-clock time.  Time in which the process was suspended does not count as waiting; otherwise a resumed
replica would take the others for late.
"""

from rendezvous.agreement.rules import ROUNDS, Timing
from rendezvous.clock import Clock


class StepTimes:
    """Durations of this replica's last outer steps, from the first inner step to the decision.

    round_s: seconds of a full round, computed from the inner steps of the last round alone (a pseudogradient may
    include inner steps of earlier rounds).   slow: `rules.slowness` of the last rounds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began = clock.now()  # when the work for the open step began
        self._lasted: list[float] = []  # durations in seconds of the last two steps whose decision it waited for
        self.round_s = 0.0
        self.slow: list[float] = []

    @property
    def took(self) -> float:
        """Seconds since the work for the open step began."""
        return self._clock.now() - self.began

    def begin(self) -> None:
        self.began = self._clock.now()

    def note_round(self, inner: int, full: int) -> None:
        """Note that this round had `inner` inner steps (0: not known) of the `full` number."""
        self.round_s = self.took * full / inner if inner else 0.0

    def note_slowness(self, factor: float) -> None:
        self.slow = [*self.slow, factor][-ROUNDS:]

    def note_decision(self) -> None:
        self._lasted = [*self._lasted[-1:], self.took]

    def due_in(self) -> float:
        """Return the seconds until the decision if this step is as long as the shorter of two; 0: unknown."""
        return max(0.0, self.began + min(self._lasted, default=0.0) - self._clock.now())


class StepWait:
    """A replica's wait for the decision of one step.  If its process is suspended, at most four pauses count.

    due: seconds until the decision, by `StepTimes.due_in`; 0 if unknown.
    idle: seconds of this wait.   waited: seconds since the replica saw m fresh offers.
    next_attempt: the value of `idle` at which it tries to close again.   why: why it did not close at the last attempt.
    """

    def __init__(self, clock: Clock, timing: Timing, due: float = 0.0) -> None:
        self._clock = clock
        self._timing = timing
        self._due = due
        self._looked_at = clock.now()
        self._elapsed = 0.0
        self._since: float | None = None  # `idle` when m fresh offers were last seen
        self._ripe_since: float | None = None  # `idle` since which there is no reason against closing
        self._overdue_at = 0.0  # `idle` when `is_overdue` was last true
        self.idle = 0.0
        self.waited = 0.0
        self.next_attempt = 0.0
        self.why = "waits"

    @property
    def pause_s(self) -> float:
        """Seconds to the next poll: an eighth of the wait, at most 4 · poll, so that few requests add little delay.

        If the time of the decision is known: half of the remaining time, and after that time a sixteenth of the wait.
        """
        poll = self._timing.poll
        often = self.idle / 16 if self._due > 0 else self.idle / 8
        pause = min(4 * poll, max(poll / 8, often, (self._due - self.idle) / 2))
        return min(pause, max(poll / 8, self.next_attempt - self.idle)) if self.next_attempt > self.idle else pause

    @property
    def least_pause_s(self) -> float:
        """The shortest pause after a look for offers that found nothing, in seconds: an eighth of the wait so far."""
        return max(self._timing.poll, self.idle / 8)

    def attempt_in(self, seconds: float, at_most: float) -> None:
        """Set `next_attempt` to `seconds` from now.   seconds: 0 if the time of the next change is unknown."""
        self.next_attempt = self.idle + min(max(seconds or self.least_pause_s, self._timing.poll / 8), at_most)

    def ripe_for(self, seconds: float) -> bool:
        """Whether nothing has prevented the close for `seconds`.  Else set `next_attempt` to the end of that time."""
        if self._ripe_since is None:
            self._ripe_since = self.idle
        if self.idle < self._ripe_since + seconds:
            self.next_attempt = self._ripe_since + seconds
        return self.idle >= self._ripe_since + seconds

    def not_ripe(self) -> None:
        self._ripe_since = None

    def count_time(self) -> None:
        now = self._clock.now()
        self._elapsed = min(now - self._looked_at, 4 * max(self.pause_s, self._timing.poll))
        self._looked_at = now
        self.idle += self._elapsed

    def count_quorum(self, reached: bool) -> None:
        gap = self._elapsed if self._since is None else self.idle - self._since
        self.waited = self.waited + gap if reached else 0.0
        self._since = self.idle if reached else None

    def is_overdue(self, normal: float = 0.0) -> bool:
        """Return True once in every `dead_after` seconds of the wait, or in every `normal` seconds if that is more."""
        if self.idle - self._overdue_at <= max(self._timing.dead_after, normal):
            return False
        self._overdue_at = self.idle
        return True

    def sleep(self) -> None:
        self._clock.sleep(self.pause_s)
