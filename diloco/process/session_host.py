"""An inner loop's words about the user's code, passed on: to the heartbeat, to the log.

    inner/host.py: Host  ◀── SessionHost ──▶ session.rv.members.status · session.emit · session.watchdog

Each note shows the watchdog that nothing hangs: a reward that is tried again with pauses has time limits of its own.

Not promised: that a note is seen. The next phase of the replica writes over it.
"""

from typing import Any

from diloco.process.session import Session

STEP_S = 0.5  # between two looks whether this replica is asked to leave


class SessionHost:
    """An inner.host.Host."""

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
