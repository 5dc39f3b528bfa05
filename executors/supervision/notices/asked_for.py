"""Makes the alerts and trackers of a supervisor, or a stand-in `Nothing` if the run asks for none.

    `--alert URL`  ──▶ Alerts (alerts.py)            log.to ──▶ TrackerChild (tracking.py)
    none           ──▶ Nothing                       none   ──▶ Nothing

Not promised: that an address answers, or that a tracker accepts a row.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco.process import exitcodes
from diloco.run.record import Run
from executors.supervision.lease import Lease
from executors.supervision.slots.slot_state import LOST_LEASE
from rendezvous.clock import Clock

if TYPE_CHECKING:
    from executors.supervision.notices.alerts import Alerts
    from executors.supervision.notices.tracking import TrackerChild

Emit = Callable[..., None]


class Nothing:
    """A stand-in for alerts and trackers, in a run without them; it does nothing."""

    def tick(self, *_: Any, last: bool = False) -> None: ...
    def close(self) -> None: ...
    def end(self, done: bool) -> None: ...


def alerts_of(url: str, clock: Clock, emit: Emit) -> "Alerts | Nothing":
    """Make a supervisor's alerts.  An invalid address only causes a warning, because the run must not end."""
    if not url:
        return Nothing()
    from executors.supervision.notices.alerts import Alerts

    try:
        return Alerts(url, clock, emit)
    except ValueError as error:
        emit("warning", kind="alerts", text=f"{error}; no alert is sent")
        return Nothing()


def tracker_child(run: Run, clock: Clock, warn: Callable[[str], None]) -> "TrackerChild | Nothing":
    """Make the tracker process that the run's log.to asks for; it starts at the first `tick`."""
    if not run.config.log.to:
        return Nothing()
    from executors.supervision.notices.tracking import tracker_child as made

    return made(run, clock, warn)


def end_with_run(child: "TrackerChild | Nothing", lease: Lease, code: int) -> None:
    """End the tracker's process. The last rows may take a while, so renew the supervisor's lease meanwhile, unless the
    lease is lost.   code: the supervisor's exit code."""
    end = lambda: child.end(done=code == exitcodes.DONE)  # noqa: E731
    return end() if code == LOST_LEASE else lease.keep_while(end)
