"""Planted bugs in the places of rollouts: one rule of replicas' or actors' code broken at a time.

ACTED_BUGS["any run's bundle"] = Bug(patches, schedule, seeds)     tests/diloco/test_sim_actors.py: some seed is red
python -m tests.sim 200 --acted --bug "any run's bundle"           the same with the ordinary schedules with actors
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from diloco.actor import actor as acting_process
from diloco.actor import places as actor_places
from diloco.actor.actor import Actor
from diloco.replica import found_rollouts
from diloco.replica.door import RolloutDoor
from diloco.replica.rollouts import BucketPlaces
from inner.rollouts.recording import unpack as unpacking
from inner.rollouts.recording.bundle import Bundle
from rendezvous.errors import KeyExists, StoreUnclear
from rendezvous.records.judgements import RolloutVerdict
from rendezvous.records.records import WireError
from rendezvous.store import put_once
from tests.sim import acting
from tests.sim.acting import calm_acted, draw_acted
from tests.sim.bugs import Bug, Patch, attr, rough
from tests.sim.simulate import Acting, Schedule

# ---------------------------------------------------------------------- worlds


def broken_actors(seed: int) -> Schedule:
    """Half of all bundles are broken, and nothing else is."""
    return replace(calm_acted(seed), acting=Acting(actors=3, staleness=1 + seed % 3, takes=0.5, mischief=0.6))


def liars(seed: int) -> Schedule:
    """The same, and the door checks every bundle."""
    plan = broken_actors(seed)
    return replace(plan, acting=replace(plan.acting or Acting(), share=1.0))


def racing(seed: int) -> Schedule:
    """The same, and many bundles arrive while their slots sample."""
    plan = broken_actors(seed)
    return replace(plan, acting=Acting(actors=4, staleness=3, takes=1.5 + seed % 3, mischief=0.9, stalls=0.3))


def deadly(seed: int) -> Schedule:
    """Replicas die and requests fail all the time; actors are honest."""
    acting = Acting(actors=1 + seed % 3, staleness=2, takes=0.5)
    plain = replace(rough(seed).rules, fragments=1, sync_every=4)
    return replace(rough(seed), acting=acting, rules=plain, tau=0, key="", forge=0.0, malformed=0.0, vanish=0.0,
                   foreign=0.0, kill=0.006, lost=0.2)  # fmt: skip


# ---------------------------------------------------------------------- bugs


class Anything(str):
    """A word that equals all others."""

    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


class NeverOld(int):
    """A step of which the age is 0."""

    def __rsub__(self, other: int) -> int:
        return 0


class NeverAhead(int):
    """A step of which the age is never below 0."""

    def __rsub__(self, other: int) -> int:
        return max(0, other - int(self))


def read_as(change: Callable[[Any], dict[str, Any]]) -> Callable[[], list[Patch]]:
    """A reader that takes some of a record's fields for others."""
    true = found_rollouts.read_record

    def read(body: bytes) -> Any:
        record, payload = true(body)
        return replace(record, **change(record)), payload

    return attr(found_rollouts, "read_record", read)


def blind_to_logprobs(body: bytes, true: Any = unpacking.unpack) -> Bundle:
    bundle = true(body)
    return replace(bundle, logprobs=bundle.logprobs or [])


def put_plainly(places: Any, key: str, body: bytes) -> bytes:
    places.store.put(key, body)
    return body


def unclear_is_written(places: Any, key: str, body: bytes) -> bytes:
    try:
        places.store.create(key, body)
    except StoreUnclear:
        return body
    except KeyExists:
        return put_once(places.store, places._clock, key, body)[1]
    return body


def taken_is_written(places: Any, key: str, body: bytes) -> bytes:
    with suppress(KeyExists, StoreUnclear):
        places.store.create(key, body)
    return body


def looks_first(places: Any, key: str, body: bytes) -> bytes:
    return put_once(places.store, places._clock, key, body)[1]


def own_wins(places: Any, place: Any, made: Bundle, unfit: Any) -> Bundle:
    places._create(places._key(place), places._sealed(place, made))
    return made


def one_attempt(places: Any, place: Any, made: Bundle, unfit: Any) -> Bundle:
    body = places._sealed(place, made)
    stands = places._create(places._key(place), body)
    return made if stands == body else places._usable(place, stands, unfit) or made


def waits(places: Any, place: Any, unfit: Any, look: Any = BucketPlaces._look) -> Bundle | None:
    for _ in range(8):
        if (found := look(places, place, unfit)) is not None:
            return found
        places._clock.sleep(0.5)
    return None


def lists_first(places: Any, place: Any, unfit: Any, look: Any = BucketPlaces._look) -> Bundle | None:
    places.store.list(f"rollouts/{places.slot}/{place.generation:010d}/")
    return look(places, place, unfit)


def takes_whatever(places: Any, place: Any, body: bytes, unfit: Any) -> Any:
    try:
        return unpacking.unpack(bytes(found_rollouts.read_record(body)[1]))
    except (WireError, ValueError):
        return None


def too_far_ahead(*args: Any, staleness: int, is_open: Any = actor_places.open_places, **named: Any) -> Any:
    return [(max(0, d), s, g) for d, s, g in reversed(is_open(*args, staleness=staleness + 3, **named))]


def the_first(places: Any, *_: Any) -> Any:
    return places[0][1:] if places else None


def tells_other_weights(a: Any, slot: str, number: int, ranks: int, fill: Any = Actor._fill) -> None:
    true = a._status
    a._status = Retold(true)
    try:
        fill(a, slot, number, ranks)
    finally:
        a._status = true


class Retold:
    """A status of which the step is one more than it is."""

    def __init__(self, status: Any) -> None:
        object.__setattr__(self, "status", status)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.status, name) + (name == "step")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.status, name, value)


def always_from_the_front(offers: Any, outer: Any) -> int:
    return 0


def by_rounds(offers: Any, outer: Any) -> int:
    return 4 * len({offer.step for offer in offers})


def believed(*_: Any) -> Any:
    return RolloutVerdict(of="x", actor="a", by=1, step=0, disagreement=0.0, surprise=0.0, doubts="", nonce="x")


def staler(places: Any, *args: Any, init: Any = BucketPlaces.__init__, **named: Any) -> None:
    init(places, *args, **named)
    places.staleness += 5


def of_actors(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda record: change(record) if record.actor else {}


def of_sessions(change: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    return lambda record: {} if record.actor else change(record)


P = BucketPlaces
ACTED_BUGS: dict[str, Bug] = {
    "any run's bundle": Bug(read_as(lambda record: {"run": acting.RUN}), broken_actors),
    "any slot's bundle": Bug(read_as(lambda record: {"slot": Anything(record.slot)}), broken_actors),
    "a torn bundle": Bug(attr(found_rollouts, "is_whole", lambda *_: True), broken_actors),
    "a bundle without log-probs": Bug(attr(found_rollouts, "unpack", blind_to_logprobs), broken_actors),
    "a replica forgets S": Bug(attr(P, "__init__", staler), broken_actors),
    "weights of the future": Bug(read_as(of_actors(lambda r: {"step": NeverAhead(r.step)})), broken_actors),
    "a session's older bundle": Bug(read_as(of_sessions(lambda r: {"step": NeverOld(r.step)})), deadly, first=1),
    "nothing of a record is read": Bug(attr(P, "_usable", takes_whatever), broken_actors),
    "a plain PUT": Bug(attr(P, "_create", put_plainly), broken_actors),
    "no answer is a yes": Bug(attr(P, "_create", unclear_is_written), deadly),
    "a taken place is one's own": Bug(attr(P, "_create", taken_is_written), broken_actors),
    "one's own bundle wins": Bug(attr(P, "_put", own_wins), draw_acted),
    "one attempt": Bug(attr(P, "_put", one_attempt), racing),
    "a GET before each PUT": Bug(attr(P, "_create", looks_first), calm_acted),
    "a LIST before each GET": Bug(attr(P, "_look", lists_first), calm_acted),
    "a replica waits for an actor": Bug(attr(P, "_look", waits), calm_acted),
    "the door is open": Bug(attr(RolloutDoor, "lets_in", lambda *_: True), liars, first=1),
    "the door believes": Bug(attr(RolloutDoor, "_judge", believed), liars),
    "an actor tells other weights": Bug(attr(Actor, "_fill", tells_other_weights), calm_acted),
    "an actor forgets S": Bug(attr(acting_process, "open_places", too_far_ahead), calm_acted),
    "all actors take the nearest": Bug(attr(acting_process, "chosen_place", the_first), calm_acted),
    "an actor sees no bundles": Bug(attr(acting_process, "filled_places", lambda store: lambda *_: False), calm_acted),
    "a replacement begins in front": Bug(attr(acting, "counted_inner_steps", always_from_the_front), deadly),
    "an unlucky life shares": Bug(attr(acting, "uncounted_sessions", lambda *_: 0), deadly),
    "a replacement counts rounds": Bug(attr(acting, "counted_inner_steps", by_rounds), deadly, first=4),
}
