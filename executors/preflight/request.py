"""The user's request to start or resume a run: the command line makes it once, and all other parts read it.

    --executor --place --gpu --secret …  ─▶ PlaceWish  ┐
    --max-usd --max-hours …              ─▶ BudgetWish ├─▶ StartRequest
    --replicas --steps --min-replicas    ─▶ FleetWish  ┘

A value that was not typed is None or empty: the run's own value counts then, or the config's.

Not promised: that the request can be met; `preflight`, the quote and the platform check that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from executors.platforms.places import Place
from executors.preflight.run_url import UsageError


@dataclass(frozen=True)
class PlaceWish:
    """The replicas' places.   options: (key, value), the key perhaps with a place's name before it: modal.region."""

    executor: str = ""
    places: tuple[Place, ...] = ()
    gpu: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    timeout_s: float = 0.0
    pip: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    no_lease: bool = False

    @property
    def refines(self) -> bool:
        """Whether it has settings of places, besides their names."""
        return any((self.gpu, self.secrets, self.timeout_s, self.options, self.pip, self.no_lease))


@dataclass(frozen=True)
class BudgetWish:
    """The limits of a run's costs and time.   0: no limit."""

    max_usd: float | None = None
    max_hours: float | None = None
    allow_unknown_price: bool | None = None


@dataclass(frozen=True)
class FleetWish:
    replicas: int | None = None
    steps: int | None = None
    min_replicas: int | None = None

    def told(self) -> dict[str, int]:
        """Return the values that were typed."""
        return {name: value for name, value in vars(self).items() if value}

    def within(self, places: Sequence[Place]) -> "FleetWish":
        """Return the request with the places' number of replicas.   Raise UsageError if they contradict it."""
        named = replicas_in(places)
        if named and self.replicas and self.replicas < named:
            raise UsageError(f"--place names {named} replicas, --replicas {self.replicas}; leave one of them away")
        return FleetWish(self.replicas or named or None, self.steps, self.min_replicas)


@dataclass(frozen=True)
class StartRequest:
    """A start.   url: of the run, or "".   alert: a URL, None for no alerts, "" for the environment's.

    origin: OLD[@STEP], a run from whose model to start.
    """

    url: str
    places: PlaceWish = field(default_factory=PlaceWish)
    budget: BudgetWish = field(default_factory=BudgetWish)
    fleet: FleetWish = field(default_factory=FleetWish)
    config: str = ""
    no_preflight: bool = False
    alert: str | None = None
    again: bool = False
    origin: str = ""
    momentum: bool = False
    detach: bool = False
    yes: bool = False
    as_json: bool = False


def replicas_in(places: Sequence[Place]) -> int | None:
    """Return the number of replicas in all places; None unless each place has a number."""
    return sum(p.count for p in places) if all(p.count for p in places) else None
