"""The places that an actor may fill, and its choice among them.  A place is one batch of rollouts of a slot's data.

    a place is open      its slot is alive, its heartbeat has not reached it, and it is trained before the run's end, at
                         most fleet.staleness outer steps after the actor's weights
    a place is mine      of all wanted actors, my name has the greatest hash with the place (rendezvous hashing)
    a probe              one of the places farthest ahead, although my last bundles took too long for all of them

Pure functions of heartbeats, keys and names; `read_standings` and `filled_places` read them from the bucket.

Not promised: that a slot keeps its pace; a bundle may come too late.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import median_low
from typing import TYPE_CHECKING, Any

from rendezvous import layout
from rendezvous.agreement.membership import read_beat, read_claim
from rendezvous.store import Readable

if TYPE_CHECKING:
    from diloco.run.config import RunConfig

BEHIND = 2  # a slot more than BEHIND outer steps behind the weights counts as dead; it will train at later places
BEATS = 2  # greatest age of a heartbeat at its read, in heartbeat periods
SPREAD = 8  # the limit of other actors' places among which an actor chooses
NEWEST = 3  # an actor's seconds per bundle come from so many bundles
PROBE_S = 60.0  # the longest wait for the first probe
MOST_PAUSE = 16  # the longest wait between two probes, in bundles


@dataclass(frozen=True)
class Standing:
    """A slot's position.   step: the outer step.   data, inner: inner steps taken in its data order, and in this round.

    rate: seconds per inner step, 0 if unknown.   ranks: processes of its replica, each with a bundle of its own.
    """

    slot: str
    step: int
    data: int
    inner: int
    rate: float = 0.0
    ranks: int = 1


@dataclass(frozen=True)
class Pace:
    """Computes places from inner steps.   interval: inner steps per outer step, H / F.

    accumulated, served: micro-batches per inner step and per generation.
    """

    interval: int
    accumulated: int
    served: int

    def generation_at(self, inner_step: int) -> int:
        return inner_step * self.accumulated // self.served

    def outer_step_of(self, at: Standing, generation: int) -> int:
        """Return the outer step that will train a generation, if every round has `interval` inner steps."""
        first = generation * self.served // self.accumulated
        return at.step + max(0, first - (at.data - at.inner)) // self.interval


@dataclass(frozen=True)
class Speed:
    """An actor's speed.   newest: seconds of its newest bundles.   slow_since: the first look with no place in time.

    probes: bundles that it sampled although none seemed in time, as only a bundle shows that the actor is fast again.
    """

    newest: tuple[float, ...] = ()
    slow_since: float | None = None
    probes: int = 0

    @property
    def takes_s(self) -> float:
        """Return the seconds per bundle, 0 if unknown.  One slow bundle (a suspended host) does not count."""
        return median_low(self.newest) if self.newest else 0.0

    def after_look(self, window: Sequence[tuple[int, str, int]], now: float) -> "Speed":
        """Return the speed after a look.   window: the places, open and filled, the nearest in time first."""
        if not window:
            return self
        if window[0][0] >= 0:
            return replace(self, slow_since=None, probes=0)
        return self if self.slow_since is not None else replace(self, slow_since=now)

    def probes_at(self, now: float) -> bool:
        """Whether to sample for a place that seems too near.   Each probe in vain doubles the wait for the next."""
        wait = min(min(self.takes_s, PROBE_S) * 2.0 ** min(self.probes, 30), MOST_PAUSE * self.takes_s)
        return self.slow_since is not None and now - self.slow_since >= wait

    def after_bundle(self, seconds: float) -> "Speed":
        return Speed((*self.newest, seconds)[-NEWEST:], None, self.probes + (self.slow_since is not None))


def pace_of(config: "RunConfig", served: int) -> Pace:
    return Pace(config.outer.interval, config.inner.gradient_accumulation_steps, served)


def open_places(
    standings: Iterable[Standing],
    is_filled: Callable[[str, int, int], bool],
    pace: Pace,
    *,
    weights: int,
    former: int | None = None,
    staleness: int,
    end: int = 0,
    takes_s: float = 0.0,
) -> list[tuple[int, str, int]]:
    """Return the open places as (distance, slot, number), the nearest first.

    number: generation · ranks + rank; with one process, number is the generation.
    is_filled(slot, generation, rank): whether it has a bundle.   weights: the outer step of the actor's weights.
    former: the outer step of those weights when the oldest heartbeat was written.
    end: the run's number of outer steps, after which no replica trains; 0: unknown.
    takes_s: the actor's seconds for one bundle.   distance: the place's generation minus the slot's next generation
    after takes_s; below 0: the slot will probably fill the place itself, so the place comes last.
    """
    found = list[tuple[int, str, int]]()
    last = min(weights + staleness, end - 1) if end else weights + staleness
    alive_from = (weights if former is None else former) - BEHIND
    for at in (at for at in standings if at.step >= alive_from):
        now = pace.generation_at(at.data)
        lead = 1 + (ceil(takes_s / (at.rate * pace.served / pace.accumulated)) if at.rate else 0)
        generation = now + 1
        while pace.outer_step_of(at, generation) <= last:
            for rank in range(at.ranks):
                if not is_filled(at.slot, generation, rank):
                    found.append((generation - now - lead, at.slot, generation * at.ranks + rank))
            generation += 1
    return sorted(found, key=lambda place: (place[0] < 0, abs(place[0]), *place[1:]))


def chosen_place(
    places: Sequence[tuple[int, str, int]],
    name: str,
    names: Collection[str] = (),
    overdue: Collection[Any] = (),
    probes: bool = False,
) -> tuple[str, int] | None:
    """Return this actor's place: the nearest own place that it can fill in time, or one of the nearest overdue places.

    names: the names of all actors.   overdue: (slot, number) of places whose owners had the time to fill them.
    probes: whether to choose a place that is farthest ahead if no place is in time.
    """
    in_time = [place for place in places if place[0] >= 0]
    own = [place for place in in_time if name == max((name, *names), key=lambda other: _hash(other, place))]
    others = [place for place in in_time if place[1:] in overdue][:SPREAD]
    if probes and not in_time:
        others = [place for place in places if place[0] == places[0][0]]
    chosen = own[0] if own else max(others, key=lambda place: _hash(name, place), default=None)
    return chosen[1:] if chosen else None


def _hash(name: str, place: tuple[int, str, int]) -> bytes:
    return hashlib.sha256(f"{name} {place[1]} {place[2]}".encode()).digest()


def read_standings(store: Readable, slots: Iterable[str], ranks: dict[tuple[str, int], int]) -> list[Standing]:
    """Return these slots' positions, from their heartbeats; skip slots that do not train.

    ranks: (slot, generation of the session) -> number of processes of its replica.  This function adds missing entries,
    which it reads from claims.
    """
    found = list[Standing]()
    for beat in (read_beat(store, slot) for slot in slots):
        if beat is not None and beat.phase in ("train", "wait"):
            if (session := (beat.slot, beat.generation)) not in ranks:
                claim = read_claim(store, *session)
                ranks[session] = max(1, claim.ranks if claim else 1)
            found.append(Standing(beat.slot, beat.step, beat.data, beat.inner, beat.rate, ranks[session]))
    return found


def filled_places(store: Readable) -> Callable[[str, int, int], bool]:
    """Return a function: (slot, generation, rank) -> whether this place has a bundle, by a LIST of now.

    The function lists a hundred generations at a time, so that a long run costs no more than a short one.
    """
    seen: dict[tuple[str, int], set[tuple[int, int]]] = {}

    def is_filled(slot: str, generation: int, rank: int) -> bool:
        hundred = slot, generation // 100
        if hundred not in seen:
            keys = store.list(f"{layout.ROLLOUTS}{slot}/{hundred[1]:08d}")
            seen[hundred] = {place for key in keys if (place := layout.bundle_place(key)) is not None}
        return (generation, rank) in seen[hundred]

    return is_filled
