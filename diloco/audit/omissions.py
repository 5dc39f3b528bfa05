"""Recompute θ_b from θ_a without one replica's pseudogradients, or without one outer step.

    θ_a ─┬─ ḡ_a ──────── ḡ_a+1 ──────── … ──▶ θ_b       as it was
         ├─ Σ_{i≠r} wᵢxᵢ / Σ_{i≠r} wᵢ ─ … ──▶ θ_b′      without replica r: the others' mean, in listed order
         └─ no outer step at t, … ──────────▶ θ_b″      without step t

A replica's late work is left out in the step that counted it.  If a mean has no other work, θ and momentum stay.

Not promised: the result of a real run.  From another θ, the other replicas would have computed other pseudogradients.
The recorded ones are used, so the approximation is worse if b is far from a.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco.model.contributions import Contribution, read_contributions, read_mean
from diloco.model.export import empty_state, state_at
from diloco.outer.optimizer import OuterState
from diloco.outer.safety import cosine, dot, norm
from diloco.run.record import ModelRecord, Run
from rendezvous.agreement.chain import Chain
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Listed
from rendezvous.store import PatientStore


@dataclass(frozen=True)
class Omission:
    """An omission: all work of `slot`; or, if `slot` is "", the outer step `step`."""

    slot: str = ""
    step: int = -1

    @property
    def name(self) -> str:
        return self.slot or f"step {self.step}"

    def covers(self, commit: Commit, listed: Listed) -> bool:
        return listed.slot == self.slot if self.slot else commit.t == self.step


@dataclass
class Counterfactual:
    """θ and momentum after an omission.   left_out: pseudogradients.   inseparable: steps whose deltas are gone, so
    that the whole mean was used.   cosines: of each omitted pseudogradient to the mean of the others."""

    omission: Omission
    state: OuterState
    left_out: int = 0
    inseparable: list[int] = field(default_factory=list[int])
    cosines: list[float] = field(default_factory=list[float])


def listed_slots(run: Run, first: int, last: int) -> list[str]:
    """Return the slots whose work the commits first … last−1 count.   Raises RendezvousError."""
    chain = Chain(PatientStore(run.store, SystemClock(), 10.0), 2)
    commits = [chain.read(t) for t in range(first, last)]
    return sorted({offer.slot for commit in commits if commit is not None for offer in commit.offers})


def states_without(
    run: Run, record: ModelRecord, first: int, last: int, omissions: Sequence[Omission]
) -> Iterator[Counterfactual]:
    """Yield θ_last without each of the omissions in the outer steps first … last−1.

    Reads the bucket once, if all states fit into memory.   Raises ConfigError, RendezvousError.
    """
    _, start = state_at(run, record, first)
    size = sum(array.nbytes for array in start.all_arrays().values())
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    at_once = max(1, room // max(1, size) - len(omissions))
    for k in range(0, len(omissions), at_once):
        found = [Counterfactual(o, _copied(run, record, start)) for o in omissions[k : k + at_once]]
        _replay(run, found, first, last)
        yield from found


def _copied(run: Run, record: ModelRecord, state: OuterState) -> OuterState:
    copy = empty_state(record, run.config.outer)
    copy.load({name: array.copy() for name, array in state.all_arrays().items()})
    return copy


def _replay(run: Run, found: Sequence[Counterfactual], first: int, last: int) -> None:
    clock = SystemClock()
    store = PatientStore(run.store, clock, 10.0)
    rules = run.config.outer.rules
    reducer = Reducer(store, clock, no_emit, rules, together=together_on(run.store))
    chain = Chain(store, 2)
    for t in range(first, last):
        commit = chain.read(t)
        assert commit is not None, "the caller has read θ_last"
        fragment = t % rules.fragments
        with_all, touched = _split(found, commit)
        if with_all:
            mean = np.empty(with_all[0].state.size(fragment), np.float32)
            read_mean(reducer, commit, mean)
            for one in with_all:
                one.state.apply(fragment, mean)
        _apply_without(reducer, commit, touched, fragment)


def _split(found: Sequence[Counterfactual], commit: Commit) -> tuple[list[Counterfactual], list[Counterfactual]]:
    """Split into counterfactuals that use the commit's whole mean, and counterfactuals that omit a part of it."""
    touched = [one for one in found if any(one.omission.covers(commit, o) for o in commit.offers)]
    return [one for one in found if one not in touched], touched


def _apply_without(reducer: Reducer, commit: Commit, found: Sequence[Counterfactual], fragment: int) -> None:
    by_slot = [one for one in found if one.omission.slot]
    for one in found:
        if one not in by_slot:
            one.left_out += len(commit.offers)
    if not by_slot:
        return
    size = by_slot[0].state.size(fragment)
    parts = [_kept(part) for part in read_contributions(reducer, commit, size)]
    if any(part.counts and part.vector is None for part in parts):
        mean = np.empty(size, np.float32)
        read_mean(reducer, commit, mean)
        for one in by_slot:
            one.inseparable.append(commit.t)
            one.state.apply(fragment, mean)
        return
    for one in by_slot:
        _apply_others(one, commit, parts, fragment)


def _kept(part: Contribution) -> Contribution:
    """Copy the contribution and its vector."""
    return part if part.vector is None else Contribution(part.listed, part.vector.copy())


def _apply_others(one: Counterfactual, commit: Commit, parts: Sequence[Contribution], fragment: int) -> None:
    mean = weighted_mean([p for p in parts if not one.omission.covers(commit, p.listed)], one.state.size(fragment))
    length = norm(mean)
    for part in parts:
        if part.vector is not None and one.omission.covers(commit, part.listed):
            one.left_out += 1
            found = cosine(dot(part.vector, mean), norm(part.vector), length)
            one.cosines += [] if found is None else [found]
    one.state.apply(fragment, mean)


def weighted_mean(parts: Sequence[Contribution], elements: int) -> np.ndarray:
    """Return (Σ wᵢ·xᵢ) / Σ wᵢ over the parts that count, in listed order, each operation rounded to fp32.

    Zeros if no part counts."""
    total = np.zeros(elements, np.float32)
    counting = [(part.vector, np.float32(part.listed.weight)) for part in parts if part.vector is not None]
    for vector, weight in counting:
        total += vector * weight
    weights = np.float32(sum(float(weight) for _, weight in counting))
    return total / weights if weights else total


def distance(one: OuterState, other: OuterState) -> float:
    """Compute ‖θ − θ′‖."""
    squares = (norm((a - b).numpy()) ** 2 for a, b in zip(one.thetas, other.thetas, strict=True))
    return float(sum(squares)) ** 0.5
