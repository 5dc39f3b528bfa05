"""Wait for space on this machine's full disk, and report it in the heartbeat.

    retry_when_full(session, "the start model", fetch)
        ── ENOSPC ──▶ note "no space left on …: free some" ──▶ again … ──▶ GaveUp
    full_disk_words(error, "the start model")      for processes that do not wait: command, container, publishing child

Not promised: that free space stays free until it is used.
"""

import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from diloco.process.output import FULL
from rendezvous.errors import GaveUp

if TYPE_CHECKING:
    from diloco.process.session import Session

T = TypeVar("T")
AGAIN_S = 2.0  # between two tries


def retry_when_full(session: "Session", what: str, act: Callable[[], T], check: Callable[[], None] = lambda: None) -> T:
    """Call `act` until there is space for it, and return its result.   check: called before each wait; may raise.

    Raises GaveUp after the run's give_up_s without space."""
    began = session.clock.now()
    while True:
        try:
            return act()
        except OSError as error:
            if not is_full(error):
                raise
            _wait_for_space(session, what, error, session.clock.now() - began, check)


def is_full(error: OSError) -> bool:
    """Whether the error means a full disk. Python raises FileNotFoundError if no temporary folder has space."""
    return error.errno in FULL or (
        isinstance(error, FileNotFoundError) and "No usable temporary" in str(error.strerror)
    )


def full_disk_words(error: OSError, what: str) -> str:
    """Return the message that there is no space for `what`, and in which folder."""
    where = os.path.dirname(error.filename) if isinstance(error.filename, str) else _temporary_folder(error)
    return f"no space left on this machine's disk for {what} ({where})"


def _wait_for_space(session: "Session", what: str, error: OSError, waited: float, check: Callable[[], None]) -> None:
    text = f"{full_disk_words(error, what)}; free some, it goes on by itself"
    if waited > session.timing.give_up:
        raise GaveUp(f"{text}. That was {waited:.0f} s ago; then run the same command again") from error
    if session.rv.members.status.note != text:
        session.emit("disk_full", text=text)
        session.rv.members.status.note = text
    check()
    session.flush_soon()
    session.clock.sleep(AGAIN_S)


def _temporary_folder(error: OSError) -> str:
    """Return the folder of this process's temporary files, or the folders that tempfile tried."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return str(error.strerror).partition("[")[2].rstrip("]").replace("'", "")
