"""Combines several executors into one: it routes launches by slot, and all other calls by handle.

    launch r00 ──▶ the executor of r00's place          poll, cancel, logs of a handle ──▶ the executor that has it

Not promised: that a slot moves at once when the places change; its process continues at the old place until it ends.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, TypeVar

from executors.platforms.base import (
    ExecutorError,
    FleetExecutor,
    Handle,
    LaunchPlan,
    Refused,
    ReplicaSpec,
    Result,
    State,
    Status,
    Unavailable,
    require_fleet,
    unanswered,
)
from executors.platforms.executor import total_price
from executors.platforms.short_form import rank_specs
from rendezvous.clock import Clock, SystemClock

T = TypeVar("T")


class Mixed(FleetExecutor):
    """Several executors as one.   executors: one per place, in the same order; an executor may occur twice.

    place_index(slot): the position of the slot's place.
    others: executors of former places: they launch nothing new, but still have processes.
    """

    name = "mixed"

    def __init__(
        self,
        executors: Sequence[FleetExecutor],
        place_index: Callable[[str], int],
        others: Sequence[FleetExecutor] = (),
        clock: Clock | None = None,
    ) -> None:
        for executor in (*executors, *others):
            require_fleet(executor)
        self._executors = tuple(executors)
        self._place_index = place_index
        self._clock = clock or SystemClock()
        self._all = list({id(e): e for e in (*executors, *others)}.values())
        self._failed: dict[Handle, Status] = {}
        self._silent: set[FleetExecutor] = set()  # former places that could not be asked
        self.labelled = any(e.labelled for e in self._all)

    def _for_slot(self, slot: str) -> FleetExecutor:
        return self._executors[self._place_index(slot)]

    def _for_handle(self, handle: Handle) -> FleetExecutor:
        """Return the slot's executor if the handle has its name; else another executor of that name."""
        own = self._for_slot(handle.slot)
        named = [e for e in (own, *self._all) if e.name == handle.executor]
        if not named:
            raise ExecutorError(
                f"{handle.slot} runs on {handle.executor}, which is not one of the run's places "
                f"({', '.join(e.name for e in self._all)}); add the place to reach it"
            )
        return named[0]

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        plans = [executor.plan(part) for executor, part in _shared_out(specs, lambda s: self._for_slot(s.slot))]
        total = total_price(p.usd_per_hour for p in plans)
        refused = tuple(why for p in plans for why in p.refused)
        return LaunchPlan(tuple(line for p in plans for line in p.lines), total, refused)

    def launch_replicas(self, specs: Sequence[ReplicaSpec] | None = None, **short: Any) -> list[Handle]:
        """Launch at all places in parallel.  Raise ExecutorError only if all places raise it."""
        specs = rank_specs(self.name, **short) if specs is None else specs
        parts = list(_shared_out(specs, lambda s: self._for_slot(s.slot)))
        if not parts:
            return []
        with ThreadPoolExecutor(len(parts)) as pool:
            launched = list(pool.map(lambda part: _try_launch(*part), parts))
        errors = [found for found in launched if isinstance(found, ExecutorError)]
        if len(errors) == len(parts):
            raise errors[0]
        handles: dict[tuple[str, int], Handle] = {}
        for (executor, part), found in zip(parts, launched, strict=True):
            got = self._none_of(executor, part, found) if isinstance(found, ExecutorError) else found
            handles |= {(h.slot, h.attempt): h for h in got}
        return [handles[s.slot, s.attempt] for s in specs]

    def _none_of(self, executor: FleetExecutor, specs: list[ReplicaSpec], error: ExecutorError) -> list[Handle]:
        """Return handles for the specs of a place that raised, while other places could launch.

        The handles are LOST, and not FAILED, if the error does not blame the specs.
        """
        state = State.LOST if isinstance(error, Unavailable | Refused) else State.FAILED
        handles = [
            Handle(s.run, s.slot, s.attempt, executor.name, launched_at=self._clock.wall(), usd_per_hour=0.0)
            for s in specs
        ]
        self._failed |= {h: Status(h, state, str(error)) for h in handles}
        return handles

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        for executor, part in _shared_out(specs, lambda s: self._for_slot(s.slot)):
            executor.expect(part)

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        handles = list(handles)
        found = {h: self._failed[h] for h in handles if h in self._failed}
        for handle in handles:
            try:
                self._for_handle(handle)
            except ExecutorError as error:
                found.setdefault(handle, unanswered(Status(handle, State.RUNNING, str(error)), str(error)))
        for executor, part in _shared_out([h for h in handles if h not in found], self._for_handle):
            found |= dict(zip(part, executor.poll(part), strict=True))
        return [found[h] for h in handles]

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        started = [h for h in handles if h not in self._failed]
        trouble: ExecutorError | None = None
        for executor, part in _shared_out(started, self._for_handle):
            try:
                executor.cancel(part, grace_s)
            except ExecutorError as error:  # the other platforms are asked, too
                trouble = error
        if trouble is not None:
            raise trouble

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        began = self._clock.now()
        found = dict[Handle, Result]()
        for handle in handles:
            if (known := self._failed.get(handle)) is not None:
                found[handle] = Result(handle, known.state, known.reason)
        for executor, part in _shared_out([h for h in handles if h not in found], self._for_handle):
            left = None if timeout is None else max(0.0, began + timeout - self._clock.now())
            found |= dict(zip(part, executor.collect(part, left), strict=True))
        return [found[h] for h in handles]

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if handle in self._failed:
            return self._failed[handle].reason.splitlines()
        return self._for_handle(handle).logs(handle, tail)

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        if handle in self._failed:
            return iter(self._failed[handle].reason.splitlines())
        return self._for_handle(handle).follow(handle, tail)

    def find(self, run: str) -> list[Handle]:
        """Find the newest process of each slot over all places; a running process is preferred to an ended one."""
        found = sorted(self._ask_all(lambda e: e.find(run)), key=lambda h: (h.slot, h.attempt))
        twice = {b.slot for a, b in pairwise(found) if a.slot == b.slot}
        ended = {s.handle for s in self.poll([h for h in found if h.slot in twice]) if s.state.ended}
        best: dict[str, Handle] = {}
        for handle in found:
            known = best.get(handle.slot)
            if known is None or (handle not in ended) >= (known not in ended):
                best[handle.slot] = handle
        return list(best.values())

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        return self._ask_all(lambda e: e.orphans(run, known))

    def sweep(self, run: str) -> list[str]:
        return self._ask_all(lambda e: e.sweep(run), strict=True)

    def purge(self, run: str) -> list[str]:
        return self._ask_all(lambda e: e.purge(run), strict=True)

    def _ask_all(self, ask: Callable[[FleetExecutor], Iterable[T]], *, strict: bool = False) -> list[T]:
        """Ask all executors, and only then raise the first error.

        strict: raise errors of former places, too.  Else warn, and leave out their processes: a former place gets no
        new launches, and the run's log names its earlier launches.
        """
        found, errors = list[T](), list[ExecutorError]()
        for executor in self._all:
            try:
                found += ask(executor)
            except ExecutorError as error:
                errors += [error] if strict or executor in self._executors else []
                self._warn_once(executor, error)
        if errors:
            raise errors[0]
        return found

    def _warn_once(self, executor: FleetExecutor, error: ExecutorError) -> None:
        if executor not in self._executors and executor not in self._silent:
            self._silent.add(executor)
            print(f"warning: {executor.name}, a former place of the run, cannot be asked: {error}", file=sys.stderr)

    def close(self) -> None:
        for executor in self._all:
            executor.close()


def _shared_out(items: Iterable[T], whose: Callable[[T], FleetExecutor]) -> Iterator[tuple[FleetExecutor, list[T]]]:
    """Yield each executor with its items."""
    parts: dict[int, tuple[FleetExecutor, list[T]]] = {}
    for item in items:
        executor = whose(item)
        parts.setdefault(id(executor), (executor, []))[1].append(item)
    yield from parts.values()


def _try_launch(executor: FleetExecutor, specs: list[ReplicaSpec]) -> list[Handle] | ExecutorError:
    try:
        return executor.launch_replicas(specs)
    except ExecutorError as error:
        return error
