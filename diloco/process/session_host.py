"""Pass the inner loop's messages about the user's code to the heartbeat and to the log.

    inner/host.py: Host  ◀── SessionHost ──▶ session.rv.members.status · session.emit · session.watchdog

Each note resets the watchdog, because a reward that is retried with pauses has time limits of its own.

Not promised: that a note is seen. The next phase of the replica overwrites it.
"""

from typing import Any

from diloco.process.session import Session

STEP_S = 0.5  # between two checks whether this replica was asked to leave


class SessionHost:
    """The inner.host.Host of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def note(self, text: str) -> None:
        self._session.rv.members.status.note = text
        self._session.watchdog.resume()

    def emit(self, event: str, text: str, **fields: Any) -> None:
        self._session.emit(event, step=self._session.rv.step, text=text, **fields)
        self._session.flush_soon()

    def pause(self, seconds: float) -> None:
        clock = self._session.clock
        until = clock.now() + seconds
        while (left := until - clock.now()) > 0 and not self._session.rv.is_leaving:
            clock.sleep(min(STEP_S, left))
