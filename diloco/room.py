"""No space left on this machine's disk: say so in the heartbeat, wait for room, go on.

    in_room(life, "the start model", fetch) ── ENOSPC ──▶ note "no space left on …: free some" ──▶ again … ──▶ GaveUp

Not promised: room that is free when asked for and gone when used.
"""

import os
import tempfile
from collections.abc import Callable
from typing import TypeVar

from diloco.life import Life
from diloco.output import FULL
from rendezvous.errors import GaveUp

T = TypeVar("T")
AGAIN_S = 2.0  # between two tries


def in_room(life: Life, what: str, act: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """What `act` returns, once there is space for it.   check: called before each wait, and may raise.

    Raises GaveUp after the run's give_up_s without space."""
    began = life.clock.now()
    while True:
        try:
            return act()
        except OSError as error:
            if error.errno not in FULL:
                raise
            _wait(life, what, error, life.clock.now() - began, check)


def _wait(life: Life, what: str, error: OSError, waited: float, check: Callable[[], None]) -> None:
    where = os.path.dirname(error.filename) if error.filename else tempfile.gettempdir()
    text = f"no space left on this machine's disk for {what} ({where}); free some, it goes on by itself"
    if waited > life.timing.give_up:
        raise GaveUp(f"{text}. That was {waited:.0f} s ago; then run the same command again") from error
    if life.rv.members.status.note != text:
        life.tell("disk_full", text=text)
        life.rv.members.status.note = text
    check()
    life.flush_soon()
    life.clock.sleep(AGAIN_S)
