"""Handles the signals that ask a process to end, in this process alone.

    SIGTERM   a platform, the supervisor            SIGHUP   a closed terminal, unless it is ignored already (`nohup`)
    SIGINT    Ctrl-C

    fork ──▶ parent: this process's handlers        child: Python's own handlers, so that SIGTERM ends it
      └ a signal that comes between the fork and the child's handlers waits for them

Not promised: processes that a C library forks; Python's hooks do not run there.
"""

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any


def asking_signals() -> list[signal.Signals]:
    """Return the signals by which a user, a platform or a closed terminal asks a process to end."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *[signal.SIGHUP] * hangs_up]


def hear_asking(act: Callable[[], object], numbers: Iterable[int] | None = None) -> dict[int, Any]:
    """Call act() at a signal that asks this process to end; return the earlier handlers.   numbers: default: all.

    A forked child has Python's own handlers: a reward's multiprocessing.Pool ends its workers with SIGTERM.
    """
    _ours.append(lambda *_: act())
    numbers = asking_signals() if numbers is None else numbers
    return {number: signal.signal(number, _ours[-1]) for number in numbers}


def _mask(how: int) -> None:
    if _ours:
        signal.pthread_sigmask(how, asking_signals())


def _forget_in_child() -> None:
    for number in asking_signals():
        if signal.getsignal(number) in _ours:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    _mask(signal.SIG_UNBLOCK)  # a signal that came after the fork meets these handlers


_ours = list[Any]()
_let_through = partial(_mask, signal.SIG_UNBLOCK)
os.register_at_fork(
    before=partial(_mask, signal.SIG_BLOCK), after_in_parent=_let_through, after_in_child=_forget_in_child
)
