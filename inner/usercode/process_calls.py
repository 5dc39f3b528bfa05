"""The user's process reward as a replica of a fleet calls it: an error in it costs one batch its scores, and no more.

    score(rollouts) ── raises, or answers what cannot be read ──▶ no scores, and an event for the host, once a minute
                       └ the first TRIES batches of a session, all of them ──▶ InnerError: this session ends

Not promised: an end of a process reward that hangs; the watchdog ends that session.
"""

import math
from collections.abc import Callable, Sequence

from inner.channels.lessons import Rollout
from inner.channels.process_reward import ProcessReward, ScoredSpan, score_steps
from inner.errors import InnerError
from inner.host import Host

EMIT_EVERY_S = 60.0
TRIES = 3  # batches of a session that may fail before any has worked


class ForgivingProcess:
    """steps(rollouts) as `score_steps` has them; [] where the user's code failed.

    Raises InnerError at the third batch of a session if none has worked: such a run costs money without its scores."""

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
                    f"{type(error).__name__}: {error}\n  next: mend it and start another --run, or leave "
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
