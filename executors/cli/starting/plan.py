"""`diloco plan`: shows the processes that `train` would start, and their price; starts nothing.

    CONFIG, options, the bucket if it has the run ──▶ the quote · sizes · the learning rate · notes
    the run there ──▶ refused as `train` refuses it: other mathematics, more steps taken, a lost run.json, other files,
                      a folder without write access

Not promised: that a platform has a free machine, or its present price.
"""

import os
from dataclasses import replace

from diloco.process import exitcodes
from diloco.run.config import RunConfig
from diloco.run.founding import TRAINED, refuse_another, refuse_fewer_steps, refuse_headless, refuse_nested
from executors.cli.answers import Answer
from executors.cli.opening import finished_words, notice_of_silence
from executors.cli.starting.again import both_records
from executors.preflight import outlook, quote, run_url
from executors.preflight.checks import Checked
from rendezvous import layout
from rendezvous.agreement.membership import read_control
from rendezvous.stores.open import folder_of
from rendezvous.stores.run_key import open_signed


def look_for_run(typed_url: str) -> outlook.Bucket:
    """Return the bucket's knowledge of the run.   typed_url: "" if you gave no URL."""
    return outlook.look_into_bucket(run_url.shareable_url(typed_url) if typed_url else "")


def plan(config: RunConfig, asked: quote.StartRequest, bucket: outlook.Bucket, checked: Checked) -> Answer:
    """Return an answer that describes the processes that `train` would start, and their price."""
    places = quote.wanted_places(asked.places, bucket.wanted.places)
    named = replace(asked, url=outlook.stand_in_url(asked.url, places))
    is_new = not bucket.url or bool(bucket.note)
    with notice_of_silence("the platform"):
        offer = quote.quote_start(named, config, config.fleet.replicas, wanted=bucket.wanted, is_new=is_new)
    replicas = asked.fleet.replicas or config.fleet.replicas
    steps = asked.fleet.steps or config.fleet.steps
    devices = min(place.devices for place in places if not place.actors)  # fewest devices: most bytes per device
    sizes = outlook.size_lines(config, replicas, steps, devices)
    rate = outlook.rate_line(config, replicas)
    there = existing_run(config, asked.url, steps) if not is_new else []
    notes = [note for note in (*checked.notes, bucket.note, *there) if note]
    data = {"run": asked.url, **offer.to_dict(), "learning_rate": rate, "sizes": sizes, "notes": notes}
    lines = [*offer.lines(), rate, *sizes, *notes, "nothing was started"]
    if not (unreached := [what for what in (bucket.unreached, checked.unreached) if what]):
        return Answer(data, lines)
    if bucket.refused:
        why = bucket.note.removeprefix("not checked: ")
        return Answer(data, lines, exitcodes.USER_ERROR, f"diloco plan: it could not be started: {why}")
    note = f"diloco plan: it could not be started now: {' and '.join(unreached)} cannot be reached from here"
    return Answer(data, lines, exitcodes.GAVE_UP, note)


def existing_run(config: RunConfig, url: str, steps: int | None) -> list[str]:
    """Return a note on the run at this URL, [] without a run.   steps: outer steps that you ask for, if any.

    Raise the error with which `train` would refuse to continue there, or to found a run."""
    store = open_signed(url)
    refuse_unwritten(url)
    is_new, is_trained = store.get(layout.RUN) is None, store.get(layout.commit_key(0)) is not None
    if is_new:
        run_url.refuse_foreign_files(url)
        refuse_headless(store, (layout.control_key(0), layout.claim_key(layout.slot_name(0), 1), *TRAINED))
        refuse_nested(store.url)
    if is_new or (config.script is not None and not is_trained):  # `launch` founds a corrected script again
        return []
    refuse_another(url, *both_records(config, store), untouched=not is_trained)
    if steps not in (None, read_control(store).steps):
        refuse_fewer_steps(store, steps)
    return [finished_words(store, url, steps) or f"it continues with the run in {url}"]


def refuse_unwritten(url: str) -> None:
    """Raise UsageError if this user cannot write into the run's folder, or make it."""
    if (folder := folder_of(url)) is None:
        return
    folder = folder.absolute()
    above = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        raise run_url.UsageError(f"cannot write into {above}, so {url} can hold no run. Use another one for --run")
