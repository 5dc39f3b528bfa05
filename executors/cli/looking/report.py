"""`diloco report`: a run's page in one file that opens from disk, and a picture of it where one is asked for.

    report, store ─▶ costs (executors) ┐
                   ─▶ rollouts         ┴─▶ page_data ─▶ report.html        --png: report.png, by matplotlib

Not promised: that a page of a run that goes on is newer than the moment it was made; `diloco watch RUN --web` is.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.runlog.reader import Report
from diloco.views.page.data import Beside, encode_chunks, json_bytes, page_data
from diloco.views.page.freeze import write_frozen
from diloco.views.page.publish import Publisher
from diloco.views.page.rollouts import RolloutEnds
from diloco.views.troubles import Spending, find_troubles
from executors.cli.looking.status import cost_status
from executors.preflight.run_url import UsageError
from executors.supervision.money.bills import costs
from rendezvous.errors import GaveUp, RendezvousError, StoreUnclear
from rendezvous.store import Readable, Store


def write_page(report: Report, store: Readable, folder: Path, now: float) -> Path:
    """Write folder/report.html; -> its path.   now: Unix time."""
    return write_frozen(whole_page(report, store, now), folder)


def whole_page(report: Report, store: Readable, now: float) -> dict[str, Any]:
    """Everything that a page shows, read once."""
    ends = RolloutEnds(store)
    ends.read(report)
    return page_data(report, now, page_beside(report, ends, now))


def page_beside(report: Report, rollouts: RolloutEnds, now: float) -> Beside:
    """Costs, troubles and rollouts.   A run that is over is looked at as of its last sign."""
    spent = costs(report, now)
    found = {**spent.to_dict(), **cost_status(spent, report.wanted)}  # as `diloco costs --json`, its bills counted
    at = report.last_sign if report.done or report.stopped else now
    troubles = find_troubles(report, at, Spending(spent.usd, spent.hours, spent.rate))
    return Beside(
        costs={**found, "bills": len(found["bills"])},
        early=rollouts.early,
        late=rollouts.late,
        troubles=[asdict(trouble) for trouble in troubles],
    )


def publish_page(report: Report, store: Store, now: float) -> str:
    """Write the page into the run's bucket; -> its URL.   Raises UsageError where the bucket may only be read."""
    data = whole_page(report, store, now)
    chunks = {f"{n}.json": body for n, body in encode_chunks(data["chunks"]).bodies.items()}
    publisher = Publisher(store, report.name)
    try:
        publisher.publish({**chunks, "head.json": json_bytes(data["head"])})
    except (StoreUnclear, GaveUp):
        raise
    except (RendezvousError, OSError) as error:
        raise UsageError(publish_refused(error)) from None
    return publisher.url


def publish_refused(error: Exception) -> str:
    """The message about a bucket that may only be read."""
    return (
        f"the page cannot be written into the bucket: {' '.join(str(error).split())}. "
        "What needs no writing still works: diloco watch RUN --web, diloco report RUN"
    )
