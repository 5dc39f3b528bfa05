"""A quote: the requested places and budget, shown with a price before anything is rented.

    --executor --place --gpu --secret …  ─▶ PlaceRequest  ┐
    --max-usd --max-hours …              ─▶ BudgetRequest ├─▶ StartRequest ─wanted_places, budget_from─▶ places, budget
    --replicas --steps --min-replicas    ─▶ FleetRequest  ┘
    places, budget ──make_offer──▶ lines, price per hour        refused: an error, and nothing was started
                          └─agree──▶ yes · no · without a terminal: an error
                                └─remember──▶ control: places, budget; any supervisor reads them there

The command line makes the request once, and all other parts read it.  A value that you did not type is None or empty:
then the run's value counts, or the config's value for a new run.

Not promised: the bill.  Prices come from the platforms' lists, or a dated table, without storage and traffic.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TextIO, TypeGuard

from diloco.run.config import RunConfig
from diloco.run.record import read_run
from executors.platforms import FAR
from executors.platforms.base import ExecutorError, LaunchPlan, ReplicaSpec
from executors.platforms.places import Place, are_places, build_executor, place_of, places_of
from executors.preflight.run_url import UsageError
from executors.supervision.money.budget import Budget
from executors.supervision.notices import VARIABLE
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.clock import Clock
from rendezvous.store import Store
from rendezvous.stores.open import folder_of, open_store

if TYPE_CHECKING:
    from executors.supervision.costs import Costs

# -------------------------------------------------------------------- the request


@dataclass(frozen=True)
class PlaceRequest:
    """The requested places of replicas, and of actors (None: the run's earlier places).

    options: pairs (key, value); a key may begin with a place's name: modal.region.
    """

    executor: str = ""
    places: tuple[Place, ...] = ()
    actors: tuple[Place, ...] | None = None
    gpu: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    timeout_s: float = 0.0
    pip: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    no_lease: bool = False

    @property
    def refines(self) -> bool:
        """Whether the request has settings of places, besides their names."""
        return any((self.gpu, self.secrets, self.timeout_s, self.options, self.pip, self.no_lease))


@dataclass(frozen=True)
class BudgetRequest:
    """The limits of a run's costs and time.   0: no limit."""

    max_usd: float | None = None
    max_hours: float | None = None
    allow_unknown_price: bool | None = None


@dataclass(frozen=True)
class FleetRequest:
    replicas: int | None = None
    steps: int | None = None
    min_replicas: int | None = None

    def told(self) -> dict[str, int]:
        """Return the values that were typed."""
        return {name: value for name, value in vars(self).items() if value}

    def within(self, places: Sequence[Place]) -> "FleetRequest":
        """Return the request, by default for as many replicas as the places name.   Raise UsageError for fewer."""
        named = replicas_in(places)
        if named and self.replicas and self.replicas < named:
            raise UsageError(f"--place names {named} replicas, --replicas {self.replicas}; leave one of them out")
        return FleetRequest(self.replicas or named or None, self.steps, self.min_replicas)


@dataclass(frozen=True)
class StartRequest:
    """The request of a start.   url: the run's URL, or "".   alert: a URL; None: no alerts; "": the environment's URL.

    origin: OLD[@STEP], the run and outer step whose model this run starts from.
    """

    url: str
    places: PlaceRequest = field(default_factory=PlaceRequest)
    budget: BudgetRequest = field(default_factory=BudgetRequest)
    fleet: FleetRequest = field(default_factory=FleetRequest)
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


def actors_in(request: PlaceRequest, wanted: Wanted) -> int:
    """Return the requested number of actors; without a request, the run's earlier number."""
    return wanted.actors if request.actors is None else sum(p.count for p in request.actors)


# -------------------------------------------------------------------- where


def wanted_places(request: PlaceRequest, before: Sequence[Mapping[str, Any]] = ()) -> tuple[Place, ...]:
    """Return the places of the request; if it names none, the run's earlier places."""
    if not (request.places or request.executor or request.refines or request.actors is not None):
        return places_of(before)
    from executors.preflight.named_places import refined_places

    return refined_places(request, before)


def fitted_places(places: Sequence[Place], config: RunConfig) -> tuple[Place, ...]:
    """Return the places with options that follow from the run's settings, unless a place has them already."""
    if not any(p.executor in FAR for p in places):
        return tuple(places)
    from executors.preflight.needs.fitted_options import fitted_place

    return tuple(fitted_place(place, config) for place in places)


def check_reach(url: str, places: Sequence[Place]) -> None:
    """Raise UsageError if the run is a folder of this machine, which a place elsewhere cannot reach."""
    far = sorted({p.executor for p in places if p.executor in FAR})
    if far and folder_of(url) is not None:
        raise UsageError(
            f"{url} is a folder of this machine; replicas on {', '.join(far)} cannot reach it. Give a bucket: "
            "--run s3://bucket/prefix (gs://, az:// and hf://buckets/… too; docs/reference/operations.md says which "
            "fits where)"
        )


# -------------------------------------------------------------------- how much


def budget_from(request: BudgetRequest, wanted: Wanted) -> Budget:
    """Return the limits of the request; for limits that the request leaves open, the run's earlier limits."""
    return Budget(**{name: getattr(wanted, name) if typed is None else typed for name, typed in vars(request).items()})


@dataclass(frozen=True)
class Quote:
    """The effects and the price of a start.

    spent: US dollars so far.   running: US dollars per hour of processes that run already."""

    places: tuple[Place, ...]
    plan: LaunchPlan
    budget: Budget
    spent: float = 0.0
    actors: int = 0
    running: float = 0.0

    @property
    def free(self) -> bool:
        return self.plan.usd_per_hour == 0

    def lines(self) -> list[str]:
        if self.free:
            return [*self.plan.lines]
        from executors.preflight.price_words import price_words

        return [*self.plan.lines, price_words(self.plan.usd_per_hour, self.spent, self.budget, self.running)]

    def to_dict(self) -> dict[str, Any]:
        price = {"usd_per_hour": self.plan.usd_per_hour, "usd_spent": self.spent}
        limit = {"max_usd": self.budget.max_usd, "max_hours": self.budget.max_hours}
        return {"plan": list(self.plan.lines), **price, **limit}


def quote_start(
    asked: StartRequest, config: RunConfig, replicas: int, wanted: Wanted | None = None, *, is_new: bool = False
) -> Quote:
    """Return the quote of a start.   replicas: the number if the request has none.   wanted: if None, it is read.

    is_new: whether the run has had no costs; else the costs are read."""
    wanted = read_control(open_store(asked.url)) if wanted is None else wanted
    places = fitted_places(wanted_places(asked.places, wanted.places), config)
    if asked.alert or any(VARIABLE in place.env for place in places):
        from executors.preflight.alert_url import take_alert

        take_alert(asked.alert, places, detach=asked.detach, environ=os.environ)
    actors = actors_in(asked.places, wanted)
    names = [*slots_of(asked.fleet.replicas or replicas), *map(layout.actor_name, range(actors))]
    spent = None if is_new else spent_so_far(asked.url)
    budget = budget_from(asked.budget, wanted)
    if config.inner.sampling.boxes is not None:
        from executors.preflight.needs.box_faults import refuse_unpriced

        refuse_unpriced(config.inner.sampling, budget)
    return replace(make_offer(asked.url, places, names, budget, spent), actors=actors)


def spent_so_far(url: str) -> "Costs | None":
    """Return the costs of the run at `url` so far; None without a run."""
    if open_store(url).get(layout.RUN) is None:
        return None
    from diloco.runlog.reader import read_report
    from diloco.runlog.scope import COSTS
    from executors.supervision.money.bills import costs
    from rendezvous.stores.cache import cache_of

    run = read_run(url)
    return costs(read_report(run.store, COSTS, cache_of(run.store, run.record.nonce)), time.time())


def make_offer(url: str, places: Sequence[Place], slots: Sequence[str], budget: Budget, spent: "Costs | None") -> Quote:
    """Make the quote.   Raise UsageError or ExecutorError if the start is impossible or above the budget."""
    check_reach(url, places)
    if budget.limited and not all(p.lease for p in places):
        raise UsageError(
            "--no-lease and a budget contradict each other: only a supervisor enforces a budget. Leave one of them out"
        )
    executor = build_executor(places)
    try:
        name = open_store(url, make=False).url  # the normal form: platforms name jobs by it
        plan = executor.plan([spec_for(name, place_of(places, slot), slot) for slot in slots])
    finally:
        executor.close()
    if plan.refused:
        raise ExecutorError(plan.refused[0])
    if plan.usd_per_hour != 0:
        from executors.supervision.costs import Costs, launch_refusal

        if why := launch_refusal(budget, spent or Costs(), [plan.usd_per_hour]):
            raise UsageError(why)
    if any(p.executor in FAR for p in places):
        from executors.preflight.needs.task_packages import pip_versions, unknown_packages

        plan = replace(plan, lines=[*plan.lines, *unknown_packages(places, pip_versions)])
    return Quote(tuple(places), plan, budget, spent.usd if spent else 0.0)


def spec_for(url: str, place: Place, slot: str) -> ReplicaSpec:
    settings = {"env": place.env, "gpu": place.gpu, "timeout_s": place.timeout_s, "secrets": place.secrets}
    return ReplicaSpec(url, slot, **settings)


def slots_of(replicas: int) -> list[str]:
    return [layout.slot_name(i) for i in range(replicas)]


def ask_agreement(found: Quote, yes: bool, person: TextIO | None = None) -> bool:
    """Ask the user to accept the price; a free start needs no answer.  Raise UsageError without a terminal."""
    if found.free or yes:
        return True
    if not _is_terminal(person := person or sys.stdin):
        raise UsageError("this costs money, and stdin is not a terminal, so you cannot be asked; add --yes to agree")
    return _ask_person("start it?", person)


def yes(question: str, agreed: bool, person: TextIO | None = None) -> bool:
    """Ask the user a yes/no question; without a terminal the answer is no.   agreed: the user has already said yes."""
    return agreed or (_is_terminal(person := person or sys.stdin) and _ask_person(question, person))


def _is_terminal(person: TextIO | None) -> TypeGuard[TextIO]:
    return person is not None and person.isatty()


def _ask_person(question: str, person: TextIO) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return person.readline().strip().lower() in ("y", "yes")


# -------------------------------------------------------------------- writes into the bucket


def write_quote(store: Store, clock: Clock, found: Quote) -> None:
    """Write places and budget into the run's control records, unless they are there already."""
    wanted = read_control(store)
    budget = {k: v for k, v in asdict(found.budget).items() if getattr(wanted, k) != v}
    places = {} if are_places(wanted.places, found.places) else {"places": [p.to_dict() for p in found.places]}
    actors = {} if wanted.actors == found.actors else {"actors": found.actors}
    if budget or places or actors:
        write_control(store, clock, **budget, **places, **actors)
