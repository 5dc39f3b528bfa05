"""Ends a session for an error: the exit code, the last event, and exits that the user's code asks for.

    an error of the rendezvous ──▶ left, fenced, diverged, …; the supervisor reads the code
    sys.exit(2) in an environment's reset ──▶ SystemExit(2) ──▶ RuntimeError: the session crashes, and starts again

Without the RuntimeError, 2 would be the replica's own exit code, and would end the run as a mistake in its config.
Ctrl-C raises nothing in a replica (diloco/process/signals.py), so a KeyboardInterrupt also comes from the user's code.

Not promised: anything for os._exit, or for a library that ends the process in C.
"""

from diloco.process import exitcodes
from diloco.process.session import Session
from rendezvous.errors import (
    BadDelta,
    Diverged,
    Fenced,
    Forged,
    GaveUp,
    Leaving,
    RendezvousError,
    StoreRefused,
    WrongRun,
)
from rendezvous.keeping.garbage import Collected
from rendezvous.records.records import WireError


def as_error(raised: BaseException) -> Exception:
    """Return the exception, or a RuntimeError in place of one outside Exception."""
    if isinstance(raised, Exception):
        return raised
    how = f"called sys.exit({raised.code!r})" if isinstance(raised, SystemExit) else f"raised {type(raised).__name__}"
    error = RuntimeError(f"your code or a library {how}; the traceback in this session's log shows it")
    error.__cause__ = raised
    return error


def end_session(session: Session, error: RendezvousError) -> int:
    """Return the exit code for an error of the rendezvous, and log the session's last event."""
    codes: list[tuple[type[RendezvousError], int, str]] = [
        (Leaving, exitcodes.LEFT, "left"),
        (Fenced, exitcodes.FENCED, "fenced"),
        (Diverged, exitcodes.DIVERGED, "diverged"),
        (Collected, exitcodes.DIVERGED, "outdated"),
        (GaveUp, exitcodes.GAVE_UP, "gave_up"),
        (StoreRefused, exitcodes.GAVE_UP, "gave_up"),  # of an actor, which does not wait for the store
        (BadDelta, exitcodes.BAD_DELTA, "bad_delta"),
        (WrongRun, exitcodes.USER_ERROR, "refused"),
        (WireError, exitcodes.USER_ERROR, "refused"),
        (Forged, exitcodes.USER_ERROR, "refused"),
        (RendezvousError, exitcodes.CRASHED, "crashed"),
    ]
    code, event = next((code, event) for kind, code, event in codes if isinstance(error, kind))
    session.emit(event, step=session.rv.step, text=str(error))
    if not isinstance(error, Fenced):
        session.rv.members.write_leave_beat()
    session.end()
    return code
