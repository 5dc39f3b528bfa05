"""Finds all launches of a run, on all platforms, without local state.

    control: places ──▶ executors ──find──┐
    log: launched, lost, ended ──open─────┴──▶ launches ──poll──▶ launches not ended
    platform: the run's label ──sweep──▶ live launches that no record has

Not promised: launches on a platform that does not answer (see `out_of_reach`), or a job that its platform lists
later than `LAG_S` after the launch.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

from diloco.events import LAUNCH_BEGINS
from diloco.runlog.reader import SUPERVISOR, Report, read_report
from diloco.runlog.scope import COSTS
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, State, Status, require_fleet, unanswered
from executors.platforms.places import build_executor
from executors.supervision.outage import launch_name
from executors.supervision.slots.slot_state import can_be_asked, past
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.errors import StoreUnclear
from rendezvous.store import Store

BEGUN = ("launching", *LAUNCH_BEGINS)
LAG_S = 30.0  # seconds until a platform lists a new job


class Launches:
    """All launches of a run.   executor: their platforms (default: those in the control records)."""

    def __init__(self, store: Store, executor: FleetExecutor | None = None) -> None:
        if executor is not None:
            require_fleet(executor)
        self._store = store
        self._own = executor is None
        self._executor = executor
        self.statuses: dict[tuple[str, int], Status] = {}
        self._opened: set[Handle] = set()  # launches that had no end in the log at some look
        self._unended: set[Handle] = set()  # launches without an end in the log at the last look
        self.seen_alive: set[tuple[str, int]] = set()  # slot, attempt
        self.strangers: set[Handle] = set()  # live processes that the log does not name
        self.out_of_reach = ""
        self.begun_at = float("-inf")  # Unix time of the log's newest launch, or of its request
        self.begun = 0
        self.refresh()

    def refresh(self) -> None:
        """Find launches that were not known before."""
        report = self.read_log()
        begun = [e["at"] for e in report.of_kind(*BEGUN) if e["who"].startswith(SUPERVISOR)]
        self.begun = len(begun)
        self.begun_at = max(begun, default=float("-inf"))
        booked = {(h.slot, h.attempt): h for h in self._opened}
        found: list[Handle] = []
        try:
            wanted, lost = read_standing_control(self._store)
            logged = [{"executor": h.executor} for h in booked.values()] if lost else []  # the lost record had places
            self._executor = self._executor or build_executor(wanted.places, (*wanted.former, *logged))
            found = self._executor.find(self._store.url)
            self.out_of_reach = ""
        except (ExecutorError, ImportError, StoreUnclear) as error:
            self.out_of_reach = str(error)
        known = booked | {(h.slot, h.attempt): h for h in found}
        self._update_statuses(h for key, h in known.items() if key not in self.statuses and can_be_asked(h))
        self._note_strangers()

    def _note_strangers(self) -> None:
        own = [*self._opened, *(s.handle for s in self.statuses.values()), *self.strangers]
        try:
            alive = [] if self._executor is None else self._executor.orphans(self._store.url, own)
            self.strangers |= {h for h in alive if h.slot != SUPERVISOR}
        except ExecutorError as error:
            self.out_of_reach = str(error)

    def read_log(self) -> Report:
        """Read the log, and remember the launches that have no end in it."""
        report = read_report(self._store, COSTS)
        self._unended = {h for p in past(report.events, self._store.url).values() for h in p.open}
        self._opened |= self._unended
        return report

    def look(self) -> list[Handle]:
        """Poll all launches; return the handles that have not ended."""
        self._update_statuses(self.there)
        return self.there

    @property
    def there(self) -> list[Handle]:
        """Handles of processes that had not ended at the last look."""
        return [s.handle for s in self.statuses.values() if not _has_ended(s)]

    @property
    def waiting(self) -> list[Handle]:
        """Handles of processes that wait for a machine."""
        return [h for h in self.there if self.statuses[h.slot, h.attempt].state is State.PENDING]

    @property
    def unbooked(self) -> list[Status]:
        """Ends that no supervisor has logged."""
        ends = [(h, self.statuses.get((h.slot, h.attempt))) for h in sorted(self._unended, key=launch_name)]
        return [replace(s, handle=h) for h, s in ends if s is not None and _has_ended(s)]

    @property
    def labelled(self) -> bool:
        """Whether a platform lists the run's processes by label."""
        return self._executor is not None and self._executor.labelled

    @property
    def ended_places(self) -> set[str]:
        """The hosts of ended launches on platforms, as their claims name them."""
        return {s.handle.place for s in self.statuses.values() if s.handle.place and _has_ended(s)}

    def lag_s(self, now: float) -> float:
        """Return the seconds from `now` (Unix time) during which a list may still lack the newest launch."""
        return min(LAG_S, max(0.0, self.begun_at + LAG_S - now))

    def sweep(self) -> list[str]:
        """End all live processes with the run's label, of any launcher; return a description of each."""
        if self._executor is None:
            return []
        try:
            return self._executor.sweep(self._store.url)
        except ExecutorError as error:
            self.out_of_reach = str(error)
            return []
        finally:
            self._note_strangers()

    def cancel(self, handles: Iterable[Handle], grace_s: float) -> None:
        handles = list(handles)
        if self._executor is not None and handles:
            with suppress(ExecutorError):  # if the cancel failed, the next look shows the process
                self._executor.cancel(handles, grace_s)

    def close(self) -> None:
        if self._own and self._executor is not None:
            self._executor.close()

    def _update_statuses(self, handles: Iterable[Handle]) -> None:
        handles = list(handles)
        if self._executor is None:  # without a platform we know only the launches
            statuses = [unanswered(Status(h, State.RUNNING, self.out_of_reach), self.out_of_reach) for h in handles]
        else:
            statuses = self._executor.poll(handles) if handles else []
        for handle, status in zip(handles, statuses, strict=True):
            self.statuses[handle.slot, handle.attempt] = status
            self.seen_alive |= set() if status.state.ended else {(handle.slot, handle.attempt)}


def _has_ended(status: Status) -> bool:
    return status.state.ended and not status.stale
