"""`diloco launch SCRIPT`: reads the script, shows the files to send and the price, and creates the run.

    SCRIPT ─▶ read_script ─▶ notes ─▶ the quote, agreed? ─▶ run.json ─▶ the caller supervises it as any run ─▶ end_of
                                        └ --dry-run ends here  └ founded again with a corrected script or argument,
                                                                 if nothing was trained in it (again.py)

Not promised: that the script trains; this command only reads it, and the replicas execute it.
"""

import shlex
from dataclasses import dataclass, replace

from diloco.process import exitcodes
from diloco.run.combinations import refuse_actors
from diloco.run.config import FleetConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.runlog.reader import Reader
from diloco.runlog.scope import STATUS
from diloco.runlog.sessions import LOST_LATER
from executors.cli.answers import DECLINED, Answer, agree_on_price, say
from executors.cli.opening import finished_words
from executors.cli.starting.again import found_again
from executors.cli.starting.plan import existing_run
from executors.preflight import quote, run_url
from executors.preflight.checks import check_places
from executors.preflight.quote import StartRequest
from executors.preflight.script import read_script
from executors.supervision.supervisor import FAILED, Outcome
from rendezvous import layout
from rendezvous.agreement.membership import read_control
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store


@dataclass(frozen=True)
class ScriptRequest:
    """The typed script.   files: further files to send.   checked: refuse a script that never joins a run."""

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    files: tuple[str, ...]
    checked: bool
    dry_run: bool


def found_script(typed: ScriptRequest, asked: StartRequest) -> Run | Answer:
    """Found the run of a script, or return an answer that ends the command.   Raises UsageError."""
    clock = SystemClock()
    fleet = FleetConfig(**{k: v for k, v in vars(asked.fleet).items() if v})
    found = read_script(
        typed.name, typed.arguments, is_module=typed.is_module, more=typed.files, fleet=fleet, checked=typed.checked
    )
    if asked.places.actors:
        refuse_actors(found.config)
    places = quote.wanted_places(asked.places, read_control(open_store(asked.url)).places)
    unchecked = check_places(found.config, typed.name, asked.url, places) if typed.checked else []
    told = [*found.notes, *unchecked]
    for note in told:
        say(note)
    offer = quote.quote_start(asked, found.config, fleet.replicas)
    if typed.dry_run:
        there = existing_run(found.config, asked.url, asked.fleet.steps)
        notes = {"notes": [*told, *there]}
        return Answer({**offer.to_dict(), **notes}, [*offer.lines(), *there, "nothing was started"])
    over = finished_words(open_store(asked.url), asked.url, asked.fleet.steps)
    if not over and not agree_on_price(offer, asked.yes):
        return Answer(code=DECLINED)
    is_trained = open_store(asked.url).get(layout.commit_key(0)) is not None
    url = asked.url if is_trained else found_again(found.config, asked.url, clock, say)
    run_url.make_folder(url)
    run = open_run(found.config, url, clock, **vars(asked.fleet))
    if over:
        say(over)
    else:
        quote.write_quote(run.store, clock, offer)
    return run


def end_of(run: Run, outcome: Outcome) -> Outcome:
    """Return the outcome of a script's finished run: a failure if the script failed after its training in all replicas.

    A failure no longer counts once a later session has ended well."""
    newest = {x.slot: x for x in sorted(Reader(run.store, STATUS).refresh().sessions, key=lambda x: x.generation)}
    repeated = max((x.claimed for x in newest.values() if x.how == "done"), default=0.0)
    failed = [x for x in newest.values() if x.how == LOST_LATER["done"] and (x.ended or repeated) >= repeated]
    if outcome.code != exitcodes.DONE or not failed:
        return outcome
    text = (
        f"{outcome.text}; after its training, the script failed in {', '.join(x.slot for x in failed)} "
        f"({failed[0].why}). Correct the script. `DILOCO_RUN={shlex.quote(run.url)} DILOCO_SLOT={failed[0].slot} "
        f"python {run.config.script}` then repeats this part with the run's weights"
    )
    return replace(outcome, text=text, code=outcome.code if "done" in {x.how for x in newest.values()} else FAILED)
