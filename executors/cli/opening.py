"""A command opens its run, and waits a while for a bucket that gives no answer.

    503, time-out, no route  ──▶ asked again for PATIENCE_S ──▶ StoreUnclear or GaveUp: exit code 75, say it again later
    403, no such bucket      ──▶ said at once: only a person can mend it

People call a run that was founded again by its first URL; a view finds the present one out with its first requests
(diloco/runlog/opening.py), all others ask `present_url`.

Not promised: that the bucket answers later requests; each of them is waited for as long.
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
                say(f"{error}; asking again for {PATIENCE_S:.0f} s")
            said = True
        clock.sleep(PAUSE_S)


def patient(act: Act) -> Act:
    """The act, asked again while the bucket gives no answer: it writes nothing before it has read all."""
    return lambda args: ask_again(lambda: act(args))


def opened(act: "Callable[[Namespace, Run], Answer]") -> Act:
    """The act, which is given its run: one that is not there is told before anything heavy is imported."""
    return lambda args: act(args, reach_run(args.run))


def present_url(url: str) -> str:
    """The URL of the run that people call `url`.   Raises UsageError where it cannot be one."""
    from diloco.run.superseded import current_url

    checked = run_url.checked_url(url)
    return ask_again(lambda: current_url(checked))


def reach_run(url: str) -> "Run":
    """The run that people call `url`, whose store is asked patiently.   Raises ConfigError where there is none."""
    from diloco.run.record import read_run

    present = present_url(url)
    run = ask_again(lambda: read_run(present))
    return replace(run, store=patient_store(run.store))


def reach_store(url: str) -> "Store":
    """The store of the run at `url`, also where its run.json is damaged."""
    from diloco.run.record import store_of

    return patient_store(ask_again(lambda: store_of(url)))


def patient_store(store: "Store") -> "Store":
    """The store, with patience.  A folder of this machine stays as it is: it has no bad moments, and its errors say
    more."""
    if getattr(store, "near", False):
        return store
    from rendezvous.store import PatientStore

    return PatientStore(store, SystemClock(), PATIENCE_S, waits_on_refusal=False)


def finished_words(store: "Store", url: str, steps: int | None = None) -> str:
    """The message for a run that has all its outer steps; "" for another run, and where other `steps` are asked for."""
    from diloco.run.founding import is_finished
    from rendezvous.agreement.membership import read_control

    wanted = read_control(store)
    if steps not in (None, wanted.steps) or not is_finished(store, wanted):
        return ""
    more = f"diloco resume {shlex.quote(url)} --steps {2 * wanted.steps}"
    return f"the run is finished, all {wanted.steps} outer steps are committed; nothing was changed. For more: {more}"
