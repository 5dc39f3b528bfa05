"""A replica of three numbers in a process of its own: what it does when its store is taken away.

python -m tests.support.lost_replica URL SLOT STEPS REPORT      REPORT: a file, a line of JSON per step
"""

import json
import sys
import threading
import time
from collections.abc import Mapping

import numpy as np

from rendezvous.agreement.rules import Rules, Timing
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import RendezvousError
from rendezvous.stores.open import open_store
from tests.support.ticking import tick_until

TIMING = Timing(dead_after=2.0, give_up=20.0, store_patience=2.0)
INNER_S = 0.05  # of the one inner step of an outer step


class Three:
    """θ of three numbers; a plain outer step."""

    def __init__(self) -> None:
        self.theta = np.zeros(3, np.float32)

    def size(self, fragment: int) -> int:
        return 3

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        self.theta -= mean

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {"theta.0": self.theta}

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.theta = arrays["theta.0"].copy()


def live(rv: Rendezvous, report) -> None:
    state, number = Three(), float(rv.slot[1:]) + 1.0
    rv.claim()
    threading.Thread(target=tick_until, args=(rv.members, lambda: False), daemon=True).start()
    rv.join(state)
    while not rv.is_done:
        time.sleep(INNER_S)
        if rv.is_behind:
            rv.catch_up()
            continue
        rv.offer(np.full(3, number * (rv.step + 1), np.float32), 1)
        commit = rv.settle()
        mean = np.empty(3, np.float32)
        rv.mean(commit, mean)
        state.apply(0, mean)
        rv.advance(commit)
        print(json.dumps({"step": rv.step, "base": rv.base}), file=report, flush=True)
    rv.finish("done")


def main(url: str, slot: str, steps: str, path: str) -> None:
    store = open_store(url, make=False)
    rv = Rendezvous(store, SystemClock(), slot, Rules(sync_every=1, snapshot_every=2), TIMING)
    with open(path, "a") as report:
        try:
            live(rv, report)
            end = "done"
        except RendezvousError as error:
            end = type(error).__name__
            print(json.dumps({"why": str(error)}), file=report)
        print(json.dumps({"end": end}), file=report, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
