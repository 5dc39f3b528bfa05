"""Finds the run that a command names, and waits a while for a bucket that does not answer.

    503, time-out, no route  ──▶ repeated for PATIENCE_S ──▶ StoreUnclear or GaveUp: exit code 75, try again later
    silence of NOTICE_S      ──▶ a line on stderr, once
    403, no such bucket      ──▶ raised at once: only the user can repair it

Users type the first URL of a run that was created again.  A view finds the present URL with its first requests
(diloco/runlog/opening.py); all other commands call `present_url`.

Not promised: that the bucket answers later requests; each later request is repeated for PATIENCE_S, too.
"""

import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from executors.cli.answers import say
from executors.preflight import run_url
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import StoreUnclear
from rendezvous.store import Store

PATIENCE_S = 20.0
PAUSE_S = 0.5
NOTICE_S = 10.0
T = TypeVar("T")


def ask_again(request: Callable[[], T], clock: Clock | None = None) -> T:
    """Return `request()`, repeated after each StoreUnclear for PATIENCE_S; then raise the last StoreUnclear."""
    clock = clock or SystemClock()
    until = clock.now() + PATIENCE_S
    said = False
    with notice_of_silence():
        while True:
            try:
                return request()
            except StoreUnclear as error:
                if clock.now() >= until:
                    raise
                if not said:
                    say(f"{error}; asking again for {PATIENCE_S:.0f} s")
                said = True
            clock.sleep(PAUSE_S)


@contextmanager
def notice_of_silence(of: str = "the bucket") -> Iterator[None]:
    """Print a line if the block takes longer than NOTICE_S.   of: the server that the block asks."""
    words = f"waiting for {of}: {NOTICE_S:.0f} s without a result; it is slow, gives no answer, or has much to read"
    notice = threading.Timer(NOTICE_S, say, [words])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def present_url(url: str) -> str:
    """Return the present URL of the run that users call `url`.   Raise UsageError if `url` is not valid."""
    from diloco.run.record import current_url

    return ask_again(lambda: current_url(run_url.checked_url(url)))


def finished_words(store: Store, url: str, steps: int | None = None) -> str:
    """Return the message for a run that has all its outer steps; "" for other runs, or if you ask for other `steps`."""
    from diloco.run.founding import is_finished
    from rendezvous.agreement.membership import read_control

    wanted = read_control(store)
    if steps not in (None, wanted.steps) or not is_finished(store, wanted):
        return ""
    from diloco.runlog.reached import FOLDERS, refuse_lost

    refuse_lost(store, 0, FOLDERS)
    more = f"diloco resume {shlex.quote(url)} --steps {2 * wanted.steps}"
    return f"the run is finished, all {wanted.steps} outer steps are committed; nothing was changed. For more: {more}"
