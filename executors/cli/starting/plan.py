"""`diloco plan`: shows what `train` would start and what that costs; starts nothing.

    CONFIG, options, the bucket if it has the run ──▶ the quote · sizes · the learning rate · notes

Not promised: that a platform has a free machine, or its present price.
"""

from dataclasses import replace

from diloco.process import exitcodes
from diloco.run.config import RunConfig
from executors.cli.answers import Answer
from executors.preflight import outlook, quote, run_url
from executors.preflight.checks import Checked
from executors.supervision.costs import Costs


def look_for_run(typed_url: str) -> outlook.Bucket:
    """Return the bucket's knowledge of the run.   typed_url: "" if you gave no URL."""
    url = run_url.shareable_url(typed_url) if typed_url else ""
    if url:
        run_url.refuse_foreign_files(url)
    return outlook.look_into_bucket(url)


def plan(config: RunConfig, asked: quote.StartRequest, bucket: outlook.Bucket, checked: Checked) -> Answer:
    """Return an answer that describes the processes that `train` would start, and their price."""
    places = quote.wanted_places(asked.places, bucket.wanted.places)
    named = replace(asked, url=outlook.stand_in_url(asked.url, places))
    spent = None if bucket.url and not bucket.note else Costs()
    offer = quote.quote_start(named, config, config.fleet.replicas, wanted=bucket.wanted, spent=spent)
    replicas = asked.fleet.replicas or config.fleet.replicas
    steps = asked.fleet.steps or config.fleet.steps
    devices = min(place.devices for place in places if not place.actors)  # the most bytes per device
    sizes = outlook.size_lines(config, checked.model, replicas, steps, devices)
    rate = outlook.rate_line(config, replicas)
    notes = [note for note in (*checked.notes, bucket.note) if note]
    data = {"run": asked.url, **offer.to_dict(), "learning_rate": rate, "sizes": sizes, "notes": notes}
    lines = [*offer.lines(), rate, *sizes, *notes, "nothing was started"]
    if not (unreached := [what for what in (bucket.unreached, checked.unreached) if what]):
        return Answer(data, lines)
    note = f"diloco plan: it could not be started now: {' and '.join(unreached)} cannot be reached from here"
    return Answer(data, lines, exitcodes.GAVE_UP, note)
