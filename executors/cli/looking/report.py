"""`diloco report`: writes a run's page as one file that opens from disk, and optionally a picture.

    report, store ─▶ costs (executors) ┐
                   ─▶ rollouts         ┴─▶ page_data ─▶ report.html        --png: report.png, by matplotlib

Not promised: an up-to-date page of a running run; `diloco watch RUN --web` has it.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from diloco.runlog.reader import Report
from diloco.views.page.data import Beside, encode_chunks, json_bytes, page_data
from diloco.views.page.freeze import Publisher, write_frozen
from diloco.views.page.rollouts import RolloutEnds
from diloco.views.troubles import Spending, find_troubles
from executors.cli.looking.status import cost_status, costs_dict
from executors.preflight.run_url import UsageError
from executors.supervision.money.bills import costs
from rendezvous.errors import GaveUp, RendezvousError, StoreUnclear
from rendezvous.store import Readable, Store


def write_page(report: Report, store: Readable, to: Path, now: float) -> Path:
    """Write the page; return its path.   to: the same as in write_frozen.   now: Unix time.   Raises UsageError."""
    try:
        return write_frozen(whole_page(report, store, now), to)
    except OSError as error:
        raise UsageError(
            f"the page cannot be written to {to}: {error.strerror}. Name another folder: --to FOLDER"
        ) from None


def whole_page(report: Report, store: Readable, now: float) -> dict[str, Any]:
    """Return all data of a page, read once."""
    ends = RolloutEnds(store)
    ends.read(report)
    return page_data(report, now, page_beside(report, ends, now))


def page_beside(report: Report, rollouts: RolloutEnds, now: float) -> Beside:
    """Return costs, troubles and rollouts.   For an ended run, these are the troubles at its last sign of life."""
    spent = costs(report, now)
    found = {**costs_dict(spent), **cost_status(spent, report.wanted)}  # as in `diloco costs --json`
    at = report.last_sign if report.done or report.stopped else now
    troubles = find_troubles(report, at, Spending(spent.usd, spent.hours, spent.rate))
    return Beside(
        costs={**found, "bills": len(found["bills"])},
        early=rollouts.early,
        late=rollouts.late,
        troubles=[asdict(trouble) for trouble in troubles],
    )


def publish_page(report: Report, store: Store, now: float) -> str:
    """Write the page into the run's bucket; return its URL.

    Raise UsageError if the bucket cannot be written: it is read-only, full or gone.
    """
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
    """Return the message about a bucket that cannot be written."""
    return (
        f"the page cannot be written into the bucket: {' '.join(str(error).split())}. "
        "What needs no writing still works: diloco watch RUN --web, diloco report RUN"
    )


def late_rewards_of(report: Report, store: Store, run: str = "") -> dict[str, dict[str, Any]]:
    """Return the counts of late rewards by name; {} if the run records no rollouts, so that no rollout can be rewarded.

    run: nonce of run.json."""
    if not report.setting("fleet", "record_rollouts", False):
        return {}
    from diloco.model.late_rewards import count_late_rewards

    return count_late_rewards(store, run)


def late_lines(late: dict[str, dict[str, Any]]) -> list[str]:
    """Return lines that compare judges' later rewards of rollouts with the rewards that the run trained on."""
    text = "  late rewards by {name}: rollouts {rollouts}, mean {mean:.3g}; in training they had {before}"
    words = lambda mean: "no reward" if mean is None else f"a mean of {mean:.3g}"  # noqa: E731
    return [text.format(name=name, before=words(one["trained_on"]), **one) for name, one in late.items()]
