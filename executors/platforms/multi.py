"""The places of a run's replicas, as plain data in the bucket, and one executor for all of them.

    places  [{"executor": "modal", "count": 2, "gpu": ["H100"]}, {"executor": "local"}]
              r00, r01 ──▶ ModalExecutor          r02, r03, … ──▶ LocalProcessExecutor

    build(places) ──▶ that one executor, or a Mixed that routes by slot to launch, and by handle ever after

The places stand in the run's control records, so that a supervisor on any machine can rebuild the executors.
Places are filled in their order; the last one takes every slot beyond.

Not promised: that a slot moves when the places change; its process there runs on until it ends.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from executors.platforms import EXECUTORS
from executors.platforms.base import (
    ExecutorError,
    FleetExecutor,
    Handle,
    LaunchPlan,
    Plain,
    ReplicaSpec,
    Result,
    State,
    Status,
    load_name,
    require_fleet,
    unanswered,
)
from executors.platforms.executor import total_price
from executors.platforms.short_form import rank_specs
from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.records.schema import Within, from_json

T = TypeVar("T")

# Modules that a replica imports: the fork server has them ready.  A missing name is the replica's to report.
PRELOAD = (
    "diloco.replica.replica",
    "diloco.outer.managers.manager",
    "diloco.outer.loop",
    "inner.train.build",
    "inner.train.grpo",
)


@dataclass(frozen=True)
class Place(Plain):
    """Some of a run's slots in one place.

    count: how many of them (0: all that are left).   gpu, timeout_s, secrets, env: of each replica (ReplicaSpec).
    options: arguments of the executor: image, region, namespace, …
    lease: whether rented replicas leave when no supervisor has looked after the run for half an hour.
    """

    executor: str = "local"
    count: Annotated[int, Within(0, layout.MOST_SLOTS)] = 0
    gpu: tuple[str, ...] = ()
    timeout_s: Annotated[float, Within(0, 1e9)] = 0.0
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lease: bool = True

    @property
    def maker(self) -> tuple[str, str]:
        """Places with the same one share an executor."""
        return self.executor, repr(sorted(self.options.items()))


def places_of(raw: Iterable[Place | Mapping[str, Any]]) -> tuple[Place, ...]:
    """The places of a control record; a run that names none lives on this machine.

    Raises ExecutorError for an invalid one: any writer of the bucket may have written it.
    """
    return tuple(_checked_place(p) for p in raw) or (Place(),)


def former_places(raw: Iterable[Mapping[str, Any]]) -> tuple[Place, ...]:
    """The places where a run lived before; an invalid one is left out, since nothing is launched there."""
    found: list[Place] = []
    for one in raw:
        with suppress(ExecutorError):
            found.append(_checked_place(one))
    return tuple(found)


def are_places(raw: Iterable[Mapping[str, Any]], places: Sequence[Place]) -> bool:
    """Whether a control record names exactly these."""
    with suppress(ExecutorError):
        return places_of(raw) == tuple(places)
    return False


def _checked_place(raw: Place | Mapping[str, Any]) -> Place:
    if isinstance(raw, Place):
        return raw
    try:
        return from_json(Place, {name: list(v) if isinstance(v, tuple) else v for name, v in raw.items()})
    except ValueError as error:
        raise ExecutorError(
            f"a control record of the run names a place that is none ({error}). Name the places again, with --executor "
            "or --place"
        ) from error


def place_of(places: Sequence[Place], slot: str) -> Place:
    """The place of a slot.  The publisher, which is no replica's slot, belongs to the first place."""
    try:
        index = layout.slot_index(slot)
    except ValueError:
        return places[0]
    for place in places:
        if not place.count or index < place.count:
            return place
        index -= place.count
    return places[-1]


def build_executor(
    places: Iterable[Place | Mapping[str, Any]] = (), former: Iterable[Place | Mapping[str, Any]] = ()
) -> FleetExecutor:
    """Make one executor for all places.  Raises ExecutorError if one is unknown or takes no such option.

    former: earlier places of the run; processes that still run there are seen, but none is launched there any more.
    """
    present = places_of(places)
    made: dict[tuple[str, str], FleetExecutor] = {}
    for place in present:
        if place.maker not in made:
            made[place.maker] = make_executor(place)
    executors = [made[p.maker] for p in present]
    for raw in former:
        with suppress(ExecutorError, ImportError):  # Mixed names what it cannot reach
            place = _checked_place(raw)
            if place.maker not in made:
                made[place.maker] = make_executor(place)
    if len(made) == 1:
        return executors[0]
    return Mixed(present, executors, list(made.values()))


def make_executor(place: Place) -> FleetExecutor:
    """The executor of one place; its module is imported only now."""
    if place.executor not in EXECUTORS:
        raise ExecutorError(f"there is no executor {place.executor!r}; there are {', '.join(EXECUTORS)}")
    kind = load_name(EXECUTORS[place.executor])
    options = {"preload": PRELOAD, **place.options} if place.executor == "local" else dict(place.options)
    takes = inspect.signature(kind).parameters
    known = list(takes)
    anything = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if not anything and (wrong := sorted(set(options).difference(known))):
        raise ExecutorError(f"{place.executor} takes no option {', '.join(wrong)}; it takes {', '.join(known)}")
    return kind(**options)


class Mixed(FleetExecutor):
    """Several executors as one.   executors: one per place, in the same order; the same one may come twice.

    others: more of them, in which nothing is launched.
    """

    name = "mixed"

    def __init__(
        self,
        places: Sequence[Place],
        executors: Sequence[FleetExecutor],
        others: Sequence[FleetExecutor] = (),
        clock: Clock | None = None,
    ) -> None:
        for executor in (*executors, *others):
            require_fleet(executor)
        self._places = tuple(places)
        self._executors = tuple(executors)
        self._clock = clock or SystemClock()
        self._all = list({id(e): e for e in (*executors, *others)}.values())
        self._failed: dict[Handle, str] = {}
        self.labelled = any(e.labelled for e in self._all)

    def _for_slot(self, slot: str) -> FleetExecutor:
        return self._executors[self._places.index(place_of(self._places, slot))]

    def _for_handle(self, handle: Handle) -> FleetExecutor:
        """The slot's own executor if the handle is one of its; else another one of that name."""
        own = self._for_slot(handle.slot)
        named = [e for e in (own, *self._all) if e.name == handle.executor]
        if not named:
            raise ExecutorError(
                f"{handle.slot} runs on {handle.executor}, which is none of the run's places "
                f"({', '.join(e.name for e in self._all)}); name it again to reach it"
            )
        return named[0]

    # ------------------------------------------------------------------ starting

    def plan(self, specs: Sequence[ReplicaSpec]) -> LaunchPlan:
        plans = [executor.plan(part) for executor, part in self._shared_out(specs, lambda s: self._for_slot(s.slot))]
        total = total_price(p.usd_per_hour for p in plans)
        refused = tuple(why for p in plans for why in p.refused)
        return LaunchPlan(tuple(line for p in plans for line in p.lines), total, refused)

    def launch_replicas(self, specs: Sequence[ReplicaSpec] | None = None, **short: Any) -> list[Handle]:
        """Launch at all places at once.  Raises only if no place could start anything."""
        specs = rank_specs(self.name, **short) if specs is None else specs
        parts = list(self._shared_out(specs, lambda s: self._for_slot(s.slot)))
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
        """Failed handles for the specs that one place could not start, while others could."""
        handles = [
            Handle(s.run, s.slot, s.attempt, executor.name, launched_at=self._clock.wall(), usd_per_hour=0.0)
            for s in specs
        ]
        self._failed |= dict.fromkeys(handles, str(error))
        return handles

    def expect(self, specs: Sequence[ReplicaSpec]) -> None:
        for executor, part in self._shared_out(specs, lambda s: self._for_slot(s.slot)):
            executor.expect(part)

    # ------------------------------------------------------------------ watching

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        handles = list(handles)
        found = {h: Status(h, State.FAILED, self._failed[h]) for h in handles if h in self._failed}
        for handle in handles:
            if handle not in found and (reason := self._out_of_reach(handle)):
                found[handle] = unanswered(Status(handle, State.RUNNING, reason), reason)
        for executor, part in self._shared_out([h for h in handles if h not in found], self._for_handle):
            found |= dict(zip(part, executor.poll(part), strict=True))
        return [found[h] for h in handles]

    def _out_of_reach(self, handle: Handle) -> str:
        try:
            self._for_handle(handle)
        except ExecutorError as error:
            return str(error)
        return ""

    def cancel(self, handles: Iterable[Handle], grace_s: float = 15.0) -> None:
        started = [h for h in handles if h not in self._failed]
        for executor, part in self._shared_out(started, self._for_handle):
            executor.cancel(part, grace_s)

    def collect(self, handles: Sequence[Handle], timeout: float | None = None) -> list[Result]:
        began = self._clock.now()
        found = dict[Handle, Result]()
        for handle in handles:
            if handle in self._failed:
                found[handle] = Result(handle, State.FAILED, self._failed[handle])
        for executor, part in self._shared_out([h for h in handles if h not in found], self._for_handle):
            left = None if timeout is None else max(0.0, began + timeout - self._clock.now())
            found |= dict(zip(part, executor.collect(part, left), strict=True))
        return [found[h] for h in handles]

    def logs(self, handle: Handle, tail: int | None = None) -> list[str]:
        if handle in self._failed:
            return self._failed[handle].splitlines()
        return self._for_handle(handle).logs(handle, tail)

    def follow(self, handle: Handle, tail: int | None = None) -> Iterator[str]:
        if handle in self._failed:
            return iter(self._failed[handle].splitlines())
        return self._for_handle(handle).follow(handle, tail)

    def find(self, run: str) -> list[Handle]:
        """Find the newest process of each slot, at any place; one that runs counts before one that has ended."""
        found = sorted((h for e in self._all for h in e.find(run)), key=lambda h: (h.slot, h.attempt))
        twice = {b.slot for a, b in pairwise(found) if a.slot == b.slot}
        ended = {s.handle for s in self.poll([h for h in found if h.slot in twice]) if s.state.ended}
        best: dict[str, Handle] = {}
        for handle in found:
            known = best.get(handle.slot)
            if known is None or (handle not in ended) >= (known not in ended):
                best[handle.slot] = handle
        return list(best.values())

    def orphans(self, run: str, known: Collection[Handle]) -> list[Handle]:
        return [h for e in self._all for h in e.orphans(run, known)]

    def sweep(self, run: str) -> list[str]:
        return [words for e in self._all for words in e.sweep(run)]

    def purge(self, run: str) -> list[str]:
        return [words for e in self._all for words in e.purge(run)]

    def close(self) -> None:
        for executor in self._all:
            executor.close()

    def _shared_out(
        self, items: Iterable[T], whose: Callable[[T], FleetExecutor]
    ) -> Iterator[tuple[FleetExecutor, list[T]]]:
        """The items grouped by their executor."""
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
