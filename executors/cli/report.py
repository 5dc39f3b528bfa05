"""`diloco report`: a run's page in one file that opens from disk, and a picture of it where one is asked for.

    report, store ─▶ costs (executors) ┐
                   ─▶ rollouts         ┴─▶ page_data ─▶ report.html        --png: report.png, by matplotlib

Not promised: that a page of a run that goes on is newer than the moment it was made; `diloco watch RUN --web` is.
"""

from pathlib import Path
from typing import Any

from diloco.runlog.page.data import Beside, page_data
from diloco.runlog.page.freeze import write_frozen
from diloco.runlog.page.rollouts import RolloutEnds
from diloco.runlog.report import Report
from executors.cli.status import cost_status
from executors.supervision.costs import costs
from rendezvous.store import Readable


def write_page(report: Report, store: Readable, folder: Path, now: float) -> Path:
    """folder/report.html; -> its path.   now: Unix time."""
    return write_frozen(whole_page(report, store, now), folder)


def whole_page(report: Report, store: Readable, now: float) -> dict[str, Any]:
    """Everything that a page shows, read once."""
    ends = RolloutEnds(store)
    ends.read(report)
    return page_data(report, now, Beside(costs=cost_data(report, now), early=ends.early, late=ends.late))


def cost_data(report: Report, now: float) -> dict[str, Any]:
    """Costs as `diloco costs --json` says them, but for its bills, of which a page needs the number alone."""
    spent = costs(report, now)
    found = {**spent.to_dict(), **cost_status(spent, report.wanted)}
    return {**found, "bills": len(found["bills"])}
