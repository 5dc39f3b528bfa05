"""An inner loop's words about the user's code, passed on: to the heartbeat, to the log.

    inner/host.py: Host  ◀── LifeHost ──▶ life.rv.members.status · life.tell · life.watchdog

Each note shows the watchdog that nothing hangs: a reward that is tried again with pauses has time limits of its own.

Not promised: that a note is seen. The next phase of the replica writes over it.
"""

from typing import Any

from diloco.life import Life

STEP_S = 0.5  # between two looks whether this replica is asked to leave


class LifeHost:
    """An inner.host.Host."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def note(self, text: str) -> None:
        self._life.rv.members.status.note = text
        self._life.watchdog.resume()

    def tell(self, event: str, text: str, **fields: Any) -> None:
        self._life.tell(event, step=self._life.rv.step, text=text, **fields)
        self._life.flush_soon()

    def pause(self, seconds: float) -> None:
        clock = self._life.clock
        until = clock.now() + seconds
        while (left := until - clock.now()) > 0 and not self._life.rv.leaving:
            clock.sleep(min(STEP_S, left))
