"""Opens the run that a command names, and waits a while for a bucket that does not answer.

    503, time-out, no route  ──▶ repeated for PATIENCE_S ──▶ StoreUnclear or GaveUp: exit code 75, try again later
    403, no such bucket      ──▶ raised at once: only the user can repair it

Users type the first URL of a run that was created again.  A view finds the present URL with its first requests
(diloco/runlog/opening.py); all other commands call `present_url`.

Not promised: that the bucket answers later requests; each later request is repeated for PATIENCE_S, too.
"""

import shlex
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from executors.cli.answers import Act, Answer, say
from executors.preflight import run_url
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import StoreUnclear

if TYPE_CHECKING:
    from diloco.run.record import Run
    from rendezvous.store import Store

PATIENCE_S = 20.0
PAUSE_S = 0.5
T = TypeVar("T")


def ask_again(request: Callable[[], T], clock: Clock | None = None) -> T:
    """Return `request()`, repeated after each StoreUnclear for PATIENCE_S; then raise the last StoreUnclear."""
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
                say(f"{error}; asking again for {PATIENCE_S:.0f} s")
            said = True
        clock.sleep(PAUSE_S)


def patient(act: Act) -> Act:
    """Return the act, repeated while the bucket does not answer; the act must write only after it has read all."""
    return lambda args: ask_again(lambda: act(args))


def opened(act: "Callable[[Namespace, Run], Answer]") -> Act:
    """Return an act that opens its run first, so that a missing run raises before heavy imports."""
    return lambda args: act(args, reach_run(args.run))


def present_url(url: str) -> str:
    """Return the present URL of the run that users call `url`.   Raise UsageError if `url` is not valid."""
    from diloco.run.record import current_url

    checked = run_url.checked_url(url)
    return ask_again(lambda: current_url(checked))


def reach_run(url: str) -> "Run":
    """Return the run that users call `url`, with a patient store.   Raise ConfigError without a run."""
    from diloco.run.record import read_run

    present = present_url(url)
    run = ask_again(lambda: read_run(present))
    return replace(run, store=patient_store(run.store))


def reach_store(url: str) -> "Store":
    """Return the store of the run at `url`, even if its run.json is damaged."""
    from diloco.run.record import store_of

    return patient_store(ask_again(lambda: store_of(url)))


def patient_store(store: "Store") -> "Store":
    """Return the store with retries.  A local folder gets no retries: its own errors say more than a time-out."""
    if getattr(store, "near", False):
        return store
    from rendezvous.store import PatientStore

    return PatientStore(store, SystemClock(), PATIENCE_S, waits_on_refusal=False)


def finished_words(store: "Store", url: str, steps: int | None = None) -> str:
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
