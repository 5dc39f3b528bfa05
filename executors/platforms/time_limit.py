"""A started process with a time limit: we ask it to leave before the limit, and end it by force at the limit.

    MARGIN of the time ─▶ SIGTERM: a replica offers its work, and ends        the full time ─▶ exit code RESUME

Not promised: the same end for all replicas of a fleet, because their limits are spread (staggered_s).
"""

import os
import signal
import sys
import threading
from collections.abc import Callable

from diloco.process import exitcodes
from rendezvous.layout import is_slot, slot_index

STAGGER, GOLDEN = 0.1, 0.6180339887498949  # for staggered_s: part of the limit over which ends are spread; 1/φ


MARGIN = 0.9  # fraction of the time after which the process is asked to leave; the rest is for a last offer


def staggered_s(timeout_s: float, slot: str) -> float:
    """Return one slot's time limit in seconds: the common limit of all replicas, less up to a tenth.

        slot i ends at  timeout_s · (1 - STAGGER · frac(i · golden ratio))

    The ends are spread evenly over that tenth, for any number of slots.  Otherwise replicas that start together
    would all leave in one outer step.
    """
    index = slot_index(slot) if is_slot(slot) else 0
    return timeout_s * (1.0 - STAGGER * (index * GOLDEN % 1.0))


def run_in_time(run: Callable[[], int], seconds: float) -> int:
    """Call `run`; after MARGIN of the time send SIGTERM to this process, and after `seconds` end it by force."""
    late = threading.Event()

    def ask() -> None:
        late.set()
        print("this replica's time limit is near. It leaves, to be started again", file=sys.stderr, flush=True)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            os._exit(exitcodes.RESUME)
        os.kill(os.getpid(), signal.SIGTERM)

    end = (os._exit, (exitcodes.RESUME,))
    timers = [threading.Timer(MARGIN * seconds, ask), threading.Timer(seconds, *end)]
    for timer in timers:
        timer.daemon = True
        timer.start()
    code = run()
    for timer in timers:
        timer.cancel()
    return exitcodes.RESUME if late.is_set() and code == exitcodes.LEFT else code
