"""Check that this machine can write to the trackers of [log], because its supervisor writes there.

Not promised: that a tracker takes the run's numbers later.
"""

from collections.abc import Iterable

from diloco.views.trackers.make import check_tracker
from diloco.views.trackers.tracker import TrackerError
from executors.preflight.run_url import UsageError


def check_trackers(trackers: Iterable[str], name: str) -> None:
    """Raise UsageError for a tracker that cannot be written to.   name: the config file's name."""
    for tracker in trackers:
        try:
            check_tracker(tracker)
        except TrackerError as error:
            raise UsageError(
                f"{name}: log.to has {tracker}: {error}. Or leave it out, and run `diloco track` on another machine"
            ) from None
