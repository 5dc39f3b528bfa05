"""Tracks platforms that do not answer: since when, for which reason, when to ask again, and the events for the log.

    executor ──poll──▶ fresh statuses ──▶ over
                    └▶ stale statuses ──▶ asked again after 1, 2, 4 s          (refused: after 1, 2, … 15 s)
                                          └─▶ log: a refusal (401, 403) at once, a lost answer after a minute;
                                              then once a minute, and once when the platform answers again

    log: platform_silent … platform_answers ──▶ `diloco status`          ──▶ the note of the supervisor's beat

The same rules hold for a launch that a platform refuses while the run continues; its outage is named "launch".

Not promised: the state of processes on a silent platform; but heartbeats still show which replicas work.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from executors.platforms.base import LAUNCH, FleetExecutor, Handle, Refused, Status
from rendezvous.clock import Clock

if TYPE_CHECKING:
    from executors.supervision.silence import Outage


class Outages:
    """One supervisor's polls of all platforms of a run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[str, Outage] = {}
        self._last: dict[Handle, Status] = {}  # last statuses of launches whose platform is not asked now
        self._over: list[dict[str, Any]] = []

    def poll(self, executor: FleetExecutor, handles: Iterable[Handle]) -> list[Status]:
        """Poll as `executor.poll` does, but ask a silent platform again only when its pause is over.

        handles: all handles of interest; an outage that concerns no handle of these is over.
        """
        handles = list(handles)
        asked = [h for h in handles if h not in self._last or not self.waits(h.executor)]
        found = dict(zip(asked, executor.poll(asked) if asked else [], strict=True))
        stale = {h: s for h, s in found.items() if s.stale}
        self._last = {h: s for h, s in self._last.items() if h in handles and h not in found} | stale
        for name in {h.executor for h in asked} | set(self._open) - {LAUNCH}:
            self._note_poll(name, [s for h, s in stale.items() if h.executor == name])
        return [found[h] if h in found else self._last[h] for h in handles]

    def waits(self, name: str) -> bool:
        """Whether it is too early to ask this platform again."""
        outage = self._open.get(name)
        return outage is not None and self._clock.now() < outage.ask_at

    def failed(self, name: str, slots: Iterable[str], error: Exception) -> None:
        """Record that a request other than a poll has failed."""
        outage = self._opened(name)
        now = self._clock.now()
        for slot in slots:
            outage.since.setdefault(slot, now)
        outage.again(now, str(error), isinstance(error, Refused))

    def answered(self, name: str) -> None:
        """Record that a platform answers again, or is not needed any more."""
        outage = self._open.pop(name, None)
        if outage is not None and outage.reported_at is not None:
            seconds = round(self._clock.now() - outage.began, 1)
            self._over.append({"event": "platform_answers", "platform": name, "seconds": seconds})

    def _note_poll(self, name: str, stale: Sequence[Status]) -> None:
        """Record the result of a poll.   stale: the statuses that this platform could not renew."""
        silent = [launch_name(h) for h in self._last if h.executor == name]
        if not silent:
            return self.answered(name)
        outage = self._opened(name)
        now = self._clock.now()
        outage.since = {launch: outage.since.get(launch, now) for launch in silent}
        if stale:
            trouble = next((s for s in stale if s.refused), stale[0])
            outage.again(now, trouble.trouble or trouble.reason, trouble.refused)

    def _opened(self, name: str) -> "Outage":
        from executors.supervision.silence import Outage

        return self._open.setdefault(name, Outage())

    # ------------------------------------------------------------------ reports

    def news(self) -> list[dict[str, Any]]:
        """Return the events for the log that are due now."""
        now, (over, self._over) = self._clock.now(), (self._over, [])
        for name, outage in self._open.items():
            if outage.due(now):
                outage.reported_at = now
                over.append(outage.event(name, now))
        return over

    @property
    def note(self) -> str:
        """The note for the supervisor's heartbeat: outages that were reported and are not over."""
        now = self._clock.now()
        told = [(name, outage) for name, outage in self._open.items() if outage.reported_at is not None]
        return "; ".join(outage.in_words(name, now) for name, outage in told)


def launch_name(handle: Handle) -> str:
    return f"{handle.slot}.{handle.attempt}"
