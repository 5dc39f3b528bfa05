"""A call in the main thread that is interrupted where it stands once its time is over.

    call_within(300, act)      main thread:   act() ───────────────────▶ its result
                          watcher:       ── 30 s: remind ── 300 s: SIGURG ──▶ TimedOut, raised where it hangs

The user's reward stays in the main thread, because many of its calls work nowhere else: signal.alarm (math_verify's own
time-out), connections of sqlite3, torch's thread count. SIGALRM is theirs, so the signal is SIGURG, which a process
ignores by default (Go's runtime interrupts with it for that reason). It is sent again each second, for code that
catches everything or waits for its threads on the way out.

Not promised: an end of code that never comes back to the interpreter (the watchdog ends such a session), nor any
outside of the main thread; a request or a thread that the interrupted code had started goes on.
"""

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
REMIND_S = 30.0  # at most, without an answer; then `diloco status` should show what the replica is waiting for
AGAIN_S = 1.0  # between two interruptions


class TimedOut(Exception):
    """The call was not over in time."""


class _Interrupted(BaseException):
    """Raised inside the call. No Exception, since `except Exception` around a slow request would swallow it."""


def remind_after(seconds: float) -> float:
    """Return the seconds after which a call with this limit (0: none) is reported as waited for."""
    return min(REMIND_S, seconds / 3) if seconds else REMIND_S


def call_within(seconds: float, act: Callable[[], T], remind: Callable[[float], None] = lambda waited: None) -> T:
    """Calls `act` and returns its result.   remind: called once by another thread, with the seconds waited so far.

    Raises TimedOut; with seconds = 0 never.
    """
    if threading.current_thread() is not threading.main_thread():
        return act()
    armed = seconds > 0

    def interrupt(*_: object) -> None:
        if armed:
            raise _Interrupted

    before = signal.signal(signal.SIGURG, interrupt)
    over = threading.Event()
    threading.Thread(target=_interrupt_when_late, args=(seconds, over, remind), name="deadline", daemon=True).start()
    try:
        try:
            return act()
        finally:
            armed = False
    except _Interrupted:
        raise TimedOut(f"no answer within {seconds:g} s") from None
    finally:
        over.set()
        signal.signal(signal.SIGURG, signal.SIG_DFL if before is None else before)


def _interrupt_when_late(seconds: float, over: threading.Event, remind: Callable[[float], None]) -> None:
    first = remind_after(seconds)
    if over.wait(first):
        return
    remind(first)
    if over.wait(seconds - first if seconds else threading.TIMEOUT_MAX):
        return
    while not over.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
        over.wait(AGAIN_S)
