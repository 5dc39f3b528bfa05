"""Durations of a replica's outer steps, and of its waits for them.

    began ──── inner steps, upload ────▶ offered ──── StepWait ────▶ decided          StepTimes: the whole of it
                                            idle ────────────────▶
                                                 m offers ─ waited ─▶

A replica polls ever more seldom, but often around the moment at which the step is due: as if it lasted as long as the
shorter of the last two.

Not promised: wall-clock time.  Sleep does not count as waiting, so a replica that slept does not think the others late.
"""

from rendezvous.agreement.rules import ROUNDS, Timing
from rendezvous.clock import Clock


class StepTimes:
    """Durations of this replica's last outer steps, from the first inner step to the decision.

    round_s: seconds that a full round takes, by the inner steps of the last one; a pseudogradient may have those of
    earlier rounds inside, too.   slow: `rules.slowness` of the last ones.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.began = clock.now()  # seconds, of the work for the open step
        self._lasted: list[float] = []  # seconds, of the last two steps whose decision it waited for
        self.round_s = 0.0
        self.slow: list[float] = []

    @property
    def took(self) -> float:
        """Seconds since the work for the open step began."""
        return self._clock.now() - self.began

    def begin(self) -> None:
        self.began = self._clock.now()

    def note_round(self, inner: int, full: int) -> None:
        """Note that `inner` inner steps of `full` are done; 0: not known."""
        self.round_s = self.took * full / inner if inner else 0.0

    def note_slowness(self, factor: float) -> None:
        self.slow = [*self.slow, factor][-ROUNDS:]

    def note_decision(self) -> None:
        self._lasted = [*self._lasted[-1:], self.took]

    def due_in(self) -> float:
        """Seconds until the open step is decided, if it lasts as long as the shorter of the last two; 0: not known."""
        return max(0.0, self.began + min(self._lasted, default=0.0) - self._clock.now())


class StepWait:
    """A replica's wait for one step.  A standstill of its process counts for four polls at most.

    due: seconds until the decision, as `StepTimes.due_in` expects it; 0 if that is not known.
    idle: seconds since it began to look.   waited: since it saw m fresh offers.
    next_attempt: `idle` before which it does not try to close.   why: reason against closing at the last attempt.
    """

    def __init__(self, clock: Clock, timing: Timing, due: float = 0.0) -> None:
        self._clock = clock
        self._timing = timing
        self._due = due
        self._looked_at = clock.now()
        self._elapsed = 0.0
        self._since: float | None = None  # `idle` when m fresh offers were last seen
        self._ripe_since: float | None = None  # `idle` since when nothing speaks against closing
        self._overdue_at = 0.0  # `idle` when `is_overdue` was last true
        self.idle = 0.0
        self.waited = 0.0
        self.next_attempt = 0.0
        self.why = "waits"

    @property
    def pause_s(self) -> float:
        """Seconds to the next poll: an eighth of the wait so far, so it adds little to any wait, with few requests.

        Where the time of the decision is known: half of the time left until then, and then twice as often.
        """
        poll = self._timing.poll
        often = self.idle / 16 if self._due > 0 else self.idle / 8
        pause = min(4 * poll, max(poll / 8, often, (self._due - self.idle) / 2))
        return min(pause, max(poll / 8, self.next_attempt - self.idle)) if self.next_attempt > self.idle else pause

    @property
    def least_pause_s(self) -> float:
        """The shortest pause in seconds after a look for offers that found nothing: an eighth of the wait so far."""
        return max(self._timing.poll, self.idle / 8)

    def attempt_in(self, seconds: float, at_most: float) -> None:
        """Set `next_attempt`; 0 seconds: the time of the next change is not known."""
        self.next_attempt = self.idle + min(max(seconds or self.least_pause_s, self._timing.poll / 8), at_most)

    def ripe_for(self, seconds: float) -> bool:
        """Whether there was no reason against closing for so many seconds; if not, set `next_attempt` to that time."""
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
        """Whether the wait is long: True once in every `dead_after`, or `normal` if that is more."""
        if self.idle - self._overdue_at <= max(self._timing.dead_after, normal):
            return False
        self._overdue_at = self.idle
        return True

    def sleep(self) -> None:
        self._clock.sleep(self.pause_s)
