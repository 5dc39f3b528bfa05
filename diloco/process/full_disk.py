"""This machine's full disk: words about it, and the pause before the next try.  Local runs seldom import it.

    wait_for_space(session, "the start model", error, …)   note, event ──▶ pause; GaveUp after give_up_s
    full_disk_words(error, "the start model")              for processes that do not wait: container, publishing child

Not promised: that an error without a file's name means the folder of temporary files.
"""

import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

from rendezvous.errors import GaveUp

if TYPE_CHECKING:
    from diloco.process.session import Session

AGAIN_S = 2.0  # seconds between two tries


def full_disk_words(error: Exception, what: str) -> str:
    """Return the message that a folder has no space left.   what: the thing that needs the space."""
    name = getattr(error, "filename", None)
    where = os.path.dirname(name) if isinstance(name, str) else _temporary_folder(error)
    return f"no space left on this machine's disk for {what} ({where})"


def wait_for_space(session: "Session", what: str, error: OSError, waited: float, check: Callable[[], None]) -> None:
    """Report the full disk, then pause.   waited: seconds since the first try.   Raise GaveUp after give_up_s."""
    full = full_disk_words(error, what)
    if waited > session.timing.give_up:
        more = f"The process waited {waited:.0f} s. Free some space, then run the same command again"
        raise GaveUp(f"{full}. {more}") from error
    text = f"{full}; free some space, and it continues by itself"
    if session.rv.members.status.note != text:
        session.emit("disk_full", text=text)
        session.rv.members.status.note = text
    check()
    session.flush_soon()
    session.clock.sleep(AGAIN_S)


def _temporary_folder(error: Exception) -> str:
    """Return the folder of this process's temporary files, or the folders that tempfile tried."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return str(getattr(error, "strerror", "")).partition("[")[2].rstrip("]").replace("'", "")
