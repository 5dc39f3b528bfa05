"""`diloco resume RUN`: supervise a run again, with its bucket's state and your new options.

    control, leave records ─▶ all steps are there?  ─▶ a supervisor only logs the ends that no other has seen
                           └▶ new places: checked as before a start
                           └▶ a price, which you accept ─▶ new desired state, the quote ─▶ the run and that state

Not promised: the same places, if you name others.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.run.founding import refuse_fewer_steps, refuse_unfit
from diloco.run.record import Run, read_run
from executors.cli.answers import DECLINED, Answer, agree_on_price, say
from executors.cli.opening import finished_words
from executors.platforms.places import are_places
from executors.preflight import quote
from executors.preflight.run_url import UsageError
from rendezvous.agreement.membership import Wanted, read_control, refuse_lost, write_control
from rendezvous.clock import Clock, SystemClock
from rendezvous.stores.open import open_store

if TYPE_CHECKING:
    from executors.preflight.quote import StartRequest


def resume(asked: "StartRequest") -> Answer | tuple[Run, Wanted]:
    """Return the run and its desired state; an Answer if you declined the price.   Raises ConfigError."""
    run = read_run(asked.url)
    wanted = read_control(run.store)
    refuse_lost(run.store, wanted)
    if over := finished_words(run.store, asked.url, asked.fleet.steps):
        say(over)
        return run, wanted
    refuse_places(run, asked, wanted)
    refuse_unfit(open_store(asked.url), SystemClock())
    if asked.places.actors:
        from diloco.run.combinations import refuse_actors

        refuse_actors(run.config)
    offer = quote.quote_start(asked, run.config, wanted.replicas)
    if not agree_on_price(offer, asked.yes):
        return Answer(code=DECLINED)
    write_desired(run, SystemClock(), **asked.fleet.told())
    quote.write_quote(run.store, SystemClock(), offer)
    return run, read_control(run.store)


def refuse_places(run: Run, asked: "StartRequest", wanted: Wanted) -> None:
    """Raise UsageError for new places in which the run cannot continue."""
    places = quote.wanted_places(asked.places, wanted.places)
    if are_places(wanted.places, places):
        return
    from executors.preflight.place_faults import place_faults

    for fault in place_faults(run.config, asked.url, places, is_new=False):
        raise UsageError(fault)


def write_desired(run: Run, clock: Clock, **changed: int) -> None:
    """Write this desired state, and let the fleet continue: stopped and drained slots start again."""
    wanted = read_control(run.store)
    fleet = {"replicas": wanted.replicas, "steps": wanted.steps, "min_replicas": wanted.min_replicas, **changed}
    replace(run.config.fleet, **{k: v for k, v in fleet.items() if v})  # checks the values together
    news = {k: v for k, v in changed.items() if getattr(wanted, k) != v}
    if "steps" in news:
        refuse_fewer_steps(run.store, changed["steps"])
    if news or wanted.stop or wanted.drains:
        write_control(run.store, clock, **news, resume=wanted.stop or bool(wanted.drains))
