"""A command opens its run, and waits a while for a bucket that gives no answer.

    503, time-out, no route  ──▶ asked again for PATIENCE_S ──▶ StoreUnclear or GaveUp: exit code 75, say it again later
    403, no such bucket      ──▶ said at once: only a person can mend it

Not promised: that the bucket answers later requests; each of them is waited for as long.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from diloco.run.record import Run, read_run, store_of
from executors.preflight import run_url
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import StoreUnclear
from rendezvous.store import PatientStore, Store

PATIENCE_S = 20.0
PAUSE_S = 0.5
T = TypeVar("T")


def ask_again(request: Callable[[], T], clock: Clock | None = None) -> T:
    """Return `request()`, asked again after each StoreUnclear for PATIENCE_S; then the last one is raised."""
    clock = clock or SystemClock()
    until = clock.now() + PATIENCE_S
    said = False
    while True:
        try:
            return request()
        except StoreUnclear as error:
            if clock.now() >= until:
                raise
            if not said:
                print(f"{error}; asking again for {PATIENCE_S:.0f} s", file=sys.stderr, flush=True)
            said = True
        clock.sleep(PAUSE_S)


def reach_run(url: str) -> Run:
    """The run at `url`, whose store is asked patiently.   Raises ConfigError where there is none."""
    checked = run_url.checked_url(url)
    run = ask_again(lambda: read_run(checked))
    return replace(run, store=patient_store(run.store))


def reach_store(url: str) -> Store:
    """The store of the run at `url`, also where its run.json is damaged."""
    return patient_store(ask_again(lambda: store_of(url)))


def patient_store(store: Store) -> Store:
    """The store, with patience.  A folder of this machine stays as it is: it has no bad moments, and its errors say
    more."""
    if getattr(store, "near", False):
        return store
    return PatientStore(store, SystemClock(), PATIENCE_S, waits_on_refusal=False)
