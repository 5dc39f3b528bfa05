"""Everything that was ever launched for a run, wherever, with no local state.

    control: places ──▶ executors ──find──┐
    log: launched, lost, ended ──open─────┴──▶ launches ──poll──▶ who has not ended

Not promised: launches of a platform that cannot be asked; `out_of_reach` says so.
"""

from collections.abc import Iterable
from contextlib import suppress

from diloco.report import read_report
from diloco.runlog.scope import COSTS
from executors.base import ExecutorError, Handle, ServerlessExecutor, State, Status, unanswered
from executors.mixed import build
from executors.track import here, past
from rendezvous.salvage import readable
from rendezvous.store import Store


class Launches:
    """executor: where they live (default: as the run's control records say)."""

    def __init__(self, store: Store, executor: ServerlessExecutor | None = None) -> None:
        self._store, self._own, self._executor = store, executor is None, executor
        self.statuses: dict[tuple[str, int], Status] = {}
        self._booked: set[tuple[str, int]] = set()
        self.out_of_reach = ""
        self.refresh()

    def refresh(self) -> None:
        """Look for more."""
        booked = {(h.slot, h.attempt): h for p in past(read_report(self._store, COSTS).events).values() for h in p.open}
        self._booked |= set(booked)
        found: list[Handle] = []
        try:
            wanted, lost = readable(self._store)
            logged = [{"executor": h.executor} for h in booked.values()] if lost else []  # a lost record may name them
            self._executor = self._executor or build(wanted.places, (*wanted.former, *logged))
            found, self.out_of_reach = self._executor.find(self._store.url), ""
        except (ExecutorError, ImportError) as error:
            self.out_of_reach = str(error)
        known = booked | {(h.slot, h.attempt): h for h in found}
        self._ask(h for key, h in known.items() if key not in self.statuses and here(h))

    def look(self) -> list[Handle]:
        """-> those that have not ended."""
        self._ask(self.there)
        return self.there

    @property
    def there(self) -> list[Handle]:
        """Those that had not ended at the last look."""
        return [s.handle for s in self.statuses.values() if not _over(s)]

    @property
    def waiting(self) -> list[Handle]:
        """Those that wait for a machine."""
        return [h for h in self.there if self.statuses[h.slot, h.attempt].state is State.PENDING]

    @property
    def unbooked(self) -> list[Status]:
        """Ends that no supervisor has written down."""
        return [s for key, s in self.statuses.items() if key in self._booked and _over(s)]

    @property
    def ended_places(self) -> set[str]:
        """What the claims of launches that have ended on a platform give as their host."""
        return {s.handle.place for s in self.statuses.values() if s.handle.place and _over(s)}

    def cancel(self, handles: Iterable[Handle], grace_s: float) -> None:
        handles = list(handles)
        if self._executor is not None and handles:
            with suppress(ExecutorError):  # not heard: the next look shows it
                self._executor.cancel(handles, grace_s)

    def close(self) -> None:
        if self._own and self._executor is not None:
            self._executor.close()

    def _ask(self, handles: Iterable[Handle]) -> None:
        handles = list(handles)
        if self._executor is None:  # all that we know is that they were launched
            statuses = [unanswered(Status(h, State.RUNNING, self.out_of_reach), self.out_of_reach) for h in handles]
        else:
            statuses = self._executor.poll(handles) if handles else []
        for handle, status in zip(handles, statuses, strict=True):
            self.statuses[handle.slot, handle.attempt] = status


def _over(status: Status) -> bool:
    return status.state.ended and not status.stale
