"""Call a function in the main thread, and interrupt it when its time is over.

    call_within(300, act)      main thread:   act() ───────────────────▶ its result
                          watcher:       ── 30 s: remind ── 300 s: SIGURG ──▶ TimedOut, raised inside act()

The user's reward runs in the main thread, because some calls work only there: signal.alarm (math_verify's time-out),
connections of sqlite3, torch's thread count. Such code uses SIGALRM, so this file uses SIGURG, which a process ignores
by default (Go's runtime also interrupts with SIGURG). We send the signal again each second, for code that catches all
exceptions, or waits for its threads before it returns.

Not promised: to end code that never returns to the interpreter (the watchdog ends such a session), or code outside the
main thread. A request or a thread that the interrupted code has started continues.
"""

import signal
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
REMIND_S = 30.0  # longest wait, in seconds, before `diloco status` shows that the replica waits for the reward
AGAIN_S = 1.0  # seconds between two interruptions


class TimedOut(Exception):
    """The call took longer than its limit."""


class _Interrupted(BaseException):
    """Raised inside the call. Not an Exception, because `except Exception` in the user's code would catch it."""


def is_end(error: BaseException) -> bool:
    """Whether this exception (Ctrl-C, or the end of a coroutine) ends the process, whichever code raised it.

    A replica handles Ctrl-C without an exception, so there a KeyboardInterrupt comes from the user's code."""
    if isinstance(error, KeyboardInterrupt):
        return signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, GeneratorExit)


def remind_after(seconds: float) -> float:
    """Return the seconds after which a call with this limit (0: no limit) is reported as waiting."""
    return min(REMIND_S, seconds / 3) if seconds else REMIND_S


def call_within(seconds: float, act: Callable[[], T], remind: Callable[[float], None] = lambda waited: None) -> T:
    """Call `act` and return its result.   remind: another thread calls it once, with the seconds waited so far.

    Raises TimedOut, but never with seconds = 0. Outside the main thread there is no limit.
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
