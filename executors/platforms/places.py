"""The places of a run's replicas and actors, as plain data in the bucket, and one executor for all of them.

    places  [{"executor": "modal", "count": 2, "gpu": ["H100"]}, {"executor": "local"}]
              r00, r01 ──▶ modal                  r02, r03, … ──▶ local          a00, … ──▶ places with "actors": true

    build_executor(places) ──▶ the executor of a single place, or one Mixed executor for several (mixed.py)

Places get slots in their order; the last place gets all remaining slots.  Actors (diloco/actor/) have places of
their own.  The run's control records list the places, so that any machine's supervisor can rebuild the executors.

Not promised: that a slot moves at once when the places change; its process continues at the old place until it ends.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from executors.platforms import EXECUTORS
from executors.platforms.base import ExecutorError, FleetExecutor, Plain, load_name
from executors.platforms.machine.gpu import devices_of
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.records.schema import Within, from_json

# Modules that a replica imports: the fork server imports them once.  The replica itself reports a missing module.
PRELOAD = (
    "diloco.replica.replica", "diloco.outer.managers.manager", "diloco.outer.loop", "inner.train.build",
    "inner.train.grpo",
)  # fmt: skip


@dataclass(frozen=True)
class Place(Plain):
    """A platform with its settings, and the number of a run's slots there.

    count: number of slots (0: all remaining slots).   gpu, timeout_s, secrets, env: see ReplicaSpec.
    options: arguments of the executor: image, region, namespace, …
    lease: whether rented replicas leave when the run has had no supervisor for half an hour.
    actors: whether actors run there, and no replicas.
    """

    executor: str = "local"
    count: Annotated[int, Within(0, layout.MOST_SLOTS)] = 0
    gpu: tuple[str, ...] = ()
    timeout_s: Annotated[float, Within(0, 1e9)] = 0.0
    secrets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    lease: bool = True
    actors: bool = False

    @property
    def maker(self) -> tuple[str, str]:
        """A key that identifies the executor: places with equal keys share one executor."""
        return self.executor, repr(sorted(self.options.items()))

    @property
    def devices(self) -> int:
        """The number of processes that train a replica's model together, each on a device of its own."""
        if self.executor != "local":
            return max(map(devices_of, self.gpu), default=1)
        asked = self.options.get("devices", 1)
        return asked if isinstance(asked, int) else 1  # the executor's constructor refuses another type


def places_of(raw: Iterable[Place | Mapping[str, Any]]) -> tuple[Place, ...]:
    """Return the places of a control record; if it has no place for replicas, add this machine as their place.

    Raise ExecutorError for an invalid place, because any writer of the bucket may have written the record.
    """
    found = tuple(checked_place(p) for p in raw)
    return found if any(not p.actors for p in found) else (Place(), *found)


def former_places(raw: Iterable[Mapping[str, Any]]) -> tuple[Place, ...]:
    """Return a run's earlier places.  Skip invalid places: no replica is launched at an earlier place any more."""
    found: list[Place] = []
    for one in raw:
        with suppress(ExecutorError):
            found.append(checked_place(one))
    return tuple(found)


def are_places(raw: Iterable[Mapping[str, Any]], places: Sequence[Place]) -> bool:
    """Whether a control record has exactly these places."""
    with suppress(ExecutorError):
        return places_of(raw) == tuple(places)
    return False


def checked_place(raw: Place | Mapping[str, Any]) -> Place:
    """Return a place of a control record.   Raise ExecutorError if it is not valid."""
    if isinstance(raw, Place):
        return raw
    try:
        return from_json(Place, {name: list(v) if isinstance(v, tuple) else v for name, v in raw.items()})
    except ValueError as error:
        raise ExecutorError(
            f"a control record of the run names a place that is not valid ({error}). Name the places again, with "
            "--executor or --place"
        ) from error


def place_of(places: Sequence[Place], slot: str) -> Place:
    """Return the place of a slot or an actor.  The model's publisher, which has no slot, runs at the first place."""
    if not layout.is_member(slot):
        return places[0]
    index, actor = int(slot[1:]), layout.is_actor(slot)
    own = [place for place in places if place.actors == actor] or places
    for place in own:
        if not place.count or index < place.count:
            return place
        index -= place.count
    return own[-1]


def build_executor(
    places: Iterable[Place | Mapping[str, Any]] = (), former: Iterable[Place | Mapping[str, Any]] = ()
) -> FleetExecutor:
    """Make one executor for all places.  Raise ExecutorError for an unknown executor or option.

    former: earlier places of the run; the executor sees processes that still run there, but launches no process there.
    """
    present = places_of(places)
    made: dict[tuple[str, str], FleetExecutor] = {}
    for place in present:
        if place.maker not in made:
            made[place.maker] = make_executor(place)
    executors = [made[p.maker] for p in present]
    for raw in former:
        with suppress(ExecutorError, ImportError):  # Mixed reports handles that it cannot reach
            place = checked_place(raw)
            if place.maker not in made:
                made[place.maker] = make_executor(place)
    if len(made) == 1:
        return executors[0]
    return mixed_executor(present, executors, list(made.values()))


def mixed_executor(
    places: Sequence[Place],
    executors: Sequence[FleetExecutor],
    others: Sequence[FleetExecutor] = (),
    clock: Clock | None = None,
) -> FleetExecutor:
    """Return several executors as one (see Mixed).   executors: one per place, in the same order."""
    from executors.platforms.mixed import Mixed

    return Mixed(executors, lambda slot: places.index(place_of(places, slot)), others, clock)


def make_executor(place: Place) -> FleetExecutor:
    """Make the executor of one place; its module is imported only now."""
    if place.executor not in EXECUTORS:
        raise ExecutorError(f"there is no executor {place.executor!r}; there are {', '.join(EXECUTORS)}")
    kind = load_name(EXECUTORS[place.executor])
    own = {"preload": PRELOAD} if place.executor == "local" else {}
    if own and not place.options:
        return kind(**own)
    from executors.platforms.typed_options import make_with

    return make_with(kind, {**own, **place.options}, place.executor, place.options)
