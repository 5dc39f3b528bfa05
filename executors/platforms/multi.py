"""One executor for all places of a run's replicas.

    build_executor(places) ──▶ the executor of the only place (places.py), or a Mixed of several (mixed.py)

The run's control records list the places, so that a supervisor on any machine can rebuild the executors.
Not promised: that a slot moves at once when the places change; its process continues at the old place until it ends.
"""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from executors.platforms import EXECUTORS
from executors.platforms.base import ExecutorError, FleetExecutor, load_name
from executors.platforms.places import Place, checked_place, places_of

# Modules that a replica imports: the fork server imports them once.  The replica itself reports a missing module.
PRELOAD = (
    "diloco.replica.replica",
    "diloco.outer.managers.manager",
    "diloco.outer.loop",
    "inner.train.build",
    "inner.train.grpo",
)


def build_executor(
    places: Iterable[Place | Mapping[str, Any]] = (), former: Iterable[Place | Mapping[str, Any]] = ()
) -> FleetExecutor:
    """Make one executor for all places.  Raise ExecutorError for an unknown executor or option.

    former: earlier places of the run; the executor sees processes that still run there, but launches none there.
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
    from executors.platforms.mixed import Mixed

    return Mixed(present, executors, list(made.values()))


def make_executor(place: Place) -> FleetExecutor:
    """Make the executor of one place; its module is imported only now."""
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
