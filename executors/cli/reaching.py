"""Reaches an existing run for a command that looks at it or changes it; `train` finds its own way (opening.py).

Not promised: that the bucket answers later requests; each request is repeated for PATIENCE_S.
"""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from executors.cli import opening
from executors.cli.answers import Act, Answer
from rendezvous.clock import SystemClock

if TYPE_CHECKING:
    from diloco.run.record import Run
    from rendezvous.store import Store


def patient(act: Act) -> Act:
    """Return the act, repeated while the bucket does not answer; the act must write only after it has read all."""
    return lambda args: opening.ask_again(lambda: act(args))


def opened(act: "Callable[[Namespace, Run], Answer]") -> Act:
    """Return an act that opens its run first, so that a missing run raises before heavy imports."""
    return lambda args: act(args, reach_run(args.run))


def reach_run(url: str) -> "Run":
    """Return the run that users call `url`, with a patient store.   Raise ConfigError without a run."""
    from diloco.run.record import read_run

    present = opening.present_url(url)
    run = opening.ask_again(lambda: read_run(present))
    return replace(run, store=patient_store(run.store))


def reach_store(url: str) -> "Store":
    """Return the store of the run at `url`, even if its run.json is damaged."""
    from diloco.run.record import store_of

    return patient_store(opening.ask_again(lambda: store_of(url)))


def patient_store(store: "Store") -> "Store":
    """Return the store with retries.  A local folder gets no retries: its own errors say more than a time-out."""
    if getattr(store, "near", False):
        return store
    from rendezvous.store import PatientStore

    return PatientStore(store, SystemClock(), opening.PATIENCE_S, waits_on_refusal=False)
