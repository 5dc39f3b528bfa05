"""Call the user's process reward in a replica: an error in it costs only the scores of one batch.

    score(rollouts) ── raises, or returns what cannot be read ──▶ no scores, and an event for the host, once a minute
                       └ in all of a session's first TRIES batches ──▶ InnerError: this session ends

Not promised: to end a process reward that hangs; the watchdog ends that session.
"""

import math
from collections.abc import Callable, Sequence

from inner.channels.lessons import Rollout
from inner.channels.process_reward import ProcessReward, ScoredSpan, score_steps
from inner.errors import InnerError
from inner.host import Host

EMIT_EVERY_S = 60.0
TRIES = 3  # this many failed batches end a session without a success


class ForgivingProcess:
    """Score rollouts like `score_steps`; return [] if the user's code fails.

    Raises InnerError at a session's third failed batch if none has worked: the run would cost money without scores."""

    def __init__(self, process: ProcessReward, host: Host, clock: Callable[[], float]) -> None:
        self._process = process
        self._host = host
        self._clock = clock
        self._last_emit_at = -math.inf
        self._failures = 0
        self._failed_first = 0
        self._worked = False

    def __call__(self, rollouts: Sequence[Rollout]) -> list[ScoredSpan]:
        try:
            steps = score_steps(self._process, rollouts)
        except Exception as error:
            self._emit_failure(error)
            self._failed_first += not self._worked
            if self._failed_first == TRIES:
                raise InnerError(
                    f"the process reward {self._process.name} failed for the first {TRIES} batches of this session: "
                    f"{type(error).__name__}: {error}\n  next: correct it and start another --run, or leave "
                    "[inner.process] out."
                ) from error
            return []
        self._worked = True
        return steps

    def _emit_failure(self, error: Exception) -> None:
        now = self._clock()
        self._failures += 1
        if now - self._last_emit_at >= EMIT_EVERY_S:
            what = f"the process reward {self._process.name} failed: {type(error).__name__}: {error}"
            text = f"{what} ({self._failures} since the last report); those batches learn from their rewards alone"
            self._host.emit("process_failed", text, failures=self._failures)
            self._last_emit_at = now
            self._failures = 0
