"""Rank replicas or outer steps by their effect on a number: compute θ_b again without one of them at a time.

    θ_a ─┬─ ḡ_a ──────── ḡ_a+1 ──────── … ──▶ θ_b       loss 2.87            as it was
         ├─ Σ_{i≠r} wᵢxᵢ / Σ_{i≠r} wᵢ ─ … ──▶ θ_b′      loss 2.51   −0.36    without replica r: the others' mean, in
         │                                                                   listed order: r did harm
         └─ no outer step at t, … ──────────▶ θ_b″      loss 2.98   +0.11    without step t

A replica's late work is left out in the step that counted it.  If a mean has no other work, θ and momentum do not
change. metrics.py has a number for a θ.

Not promised: the result of a real run: from another θ, the other replicas would have computed other pseudogradients.
The recorded pseudogradients are used, so the approximation is worse if b is far from a.  Also not promised: shares that
add up; the cause if two replicas do the same harm, because leaving out one of them changes little.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from diloco.audit.explain import OPPOSED
from diloco.audit.metrics import LOWER, UNKNOWN, Measurement, Metric
from diloco.model.contributions import Contribution, read_contributions, read_mean
from diloco.model.export import empty_state, model_record, state_at
from diloco.outer.optimizer import OuterState
from diloco.outer.safety import cosine, dot, norm
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run
from diloco.runlog.reached import LostCommit
from rendezvous.agreement.chain import Chain
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.errors import ChainBroken
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Listed
from rendezvous.store import PatientStore

REPLICA, STEP = "replica", "step"
NOISE = 0.1  # share of the number's change from θ_a to θ_b, or of an average step's change


@dataclass(frozen=True)
class Without:
    """One omission.   measured: the metric without it, or None.   moved: ‖θ_b′ − θ_b‖.   left_out: how many offers.

    cosine: mean cosine of the left-out pseudogradients to the mean of the others; None for steps or without others.
    inseparable: steps whose deltas are gone, so that nothing was left out of their means.
    """

    name: str
    measured: Measurement | None
    moved: float
    left_out: int
    cosine: float | None = None
    inseparable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Blame:
    """The result.   metric: a name, or "".   better: LOWER, HIGHER or UNKNOWN.   before, after: at θ_first, θ_last."""

    first: int
    last: int
    metric: str
    better: int
    before: Measurement | None
    after: Measurement | None
    without: tuple[Without, ...]

    def change(self, one: Without) -> float:
        """Return the number without `one`, minus the number with it."""
        return self.change_and_error(one)[0]

    def change_and_error(self, one: Without) -> tuple[float, float]:
        """Return the change and its standard error."""
        if one.measured is None or self.after is None:
            return math.nan, math.nan
        return one.measured.change_from(self.after)

    @property
    def ranked(self) -> list[Without]:
        """The omissions by size of change; with no metric, omissions whose work opposes the others come first."""
        if self.metric:
            return sorted(self.without, key=lambda one: -abs(self.change(one)))
        return sorted(self.without, key=lambda one: (1.0 if one.cosine is None else one.cosine, -one.moved))

    @property
    def harm(self) -> Without | None:
        """The omission that improves the number most; None if noise may explain it."""
        if not self.metric or self.better == UNKNOWN or not self.without:
            return None
        worst = max(self.without, key=lambda one: self.better * self.change(one))
        change, error = self.change_and_error(worst)
        return worst if self.better * change > max(self._least, 0.0 if math.isnan(error) else 2 * error) else None

    @property
    def _least(self) -> float:
        """The smallest change that counts, because replicas and steps always differ a little."""
        assert self.before is not None and self.after is not None
        of_steps = self.last - self.first if self.without[0].name.startswith(STEP) else 1
        return NOISE * abs(self.after.value - self.before.value) / of_steps


def blame(run: Run, first: int, last: int, metric: Metric | None, by: str = REPLICA) -> Blame:
    """Compare θ_last with its replay from θ_first without each replica, or without each outer step.

    Raises ConfigError for steps that are not in order, were deleted or are not taken yet."""
    if first >= last:
        raise ConfigError(f"there is no outer step from θ_{first} to θ_{last}. --to must be above --from")
    record = model_record(run)
    _, end = state_at(run, record, last)
    _, start = state_at(run, record, first)
    slots = listed_slots(run, first, last)
    by_step = [Omission(step=t) for t in range(first, last)]
    omissions = [Omission(slot=slot) for slot in slots] if by == REPLICA else by_step
    return Blame(
        first=first,
        last=last,
        metric=metric.name if metric else "",
        better=metric.better if metric else UNKNOWN,
        before=_measured(metric, first, start),
        after=_measured(metric, last, end),
        without=tuple(_compared(states_without(run, record, first, last, omissions), end, metric, last)),
    )


def _measured(metric: Metric | None, step: int, state: OuterState) -> Measurement | None:
    return None if metric is None else metric.measure(step, state)


def _compared(
    found: "Iterable[Counterfactual]", end: OuterState, metric: Metric | None, last: int
) -> Iterable[Without]:
    for one in found:
        yield Without(
            one.omission.name, _measured(metric, last, one.state), distance(one.state, end), one.left_out,
            fmean(one.cosines) if one.cosines else None, tuple(one.inseparable),
        )  # fmt: skip


# ---------------------------------------------------------------------- words


def blame_dict(found: Blame) -> dict[str, Any]:
    """Return the result as plain data for JSON."""
    rows = [
        {
            "name": one.name, "value": one.measured.value if one.measured else None,
            "change": found.change(one) if one.measured else None, "moved": one.moved, "left_out": one.left_out,
            "cosine": one.cosine, "inseparable": [*one.inseparable],
        }
        for one in found.ranked
    ]  # fmt: skip
    return {
        "from": found.first, "to": found.last, "metric": found.metric,
        "better": {LOWER: "lower", UNKNOWN: ""}.get(found.better, "higher"),
        "at_from": found.before.value if found.before else None, "at_to": found.after.value if found.after else None,
        "without": rows, "harm": found.harm.name if found.harm else None, "lines": blame_lines(found),
    }  # fmt: skip


def blame_lines(found: Blame) -> list[str]:
    """Return a table and its meaning as text."""
    head = []
    if found.before and found.after:
        head = [f"{found.metric}: {_number(found.before)} at θ_{found.first}, {_number(found.after)} at θ_{found.last}"]
    width = max((len(one.name) for one in found.without), default=0)
    table = [_row(found, one, width) for one in found.ranked]
    return [*head, *table, *_conclusion(found), *_reservations(found)]


def _row(found: Blame, one: Without, width: int) -> str:
    change, error = found.change_and_error(one)
    give = "" if math.isnan(error) else f" ± {error:.2g}"
    number = f"  {one.measured.value:.5g}  {change:+.4g}{give}" if one.measured else ""
    cos = "" if one.cosine is None else f", cosine {one.cosine:+.2f} to the others"
    moved = f"θ_{found.last} {one.moved:.4g} away; {one.left_out} pseudogradient{'s'[: one.left_out != 1]}{cos}"
    return f"without {one.name:{width}s}{number}  ({moved})"


def _number(measured: Measurement) -> str:
    error = "" if math.isnan(measured.error) else f" ± {measured.error:.2g}"
    return f"{measured.value:.5g}{error}"


def _conclusion(found: Blame) -> list[str]:
    if not found.without:
        return ["no work was counted in these outer steps"]
    if not found.metric:
        return _conclusion_without_metric(found)
    is_known = found.better != UNKNOWN
    named, did = (found.harm, "did most harm") if is_known else (found.ranked[0], "moved the number most")
    if named is None:
        return ["nothing is to blame: each single omission makes the number worse, or better only within the noise"]
    change = found.change(named)
    size = f"{abs(change):.4g} {'lower' if change < 0 else 'higher'}"
    return [f"{named.name} {did}: without it, the number would be {size}"]


def _conclusion_without_metric(found: Blame) -> list[str]:
    advice = "--text FILE, --prompts FILE or -- COMMAND name a number to judge by"
    against = [one for one in found.ranked if one.cosine is not None and one.cosine < OPPOSED]
    if len([one for one in found.without if one.left_out]) == 2 and against:
        return [f"two replicas pull against each other; only a number can say which of them is wrong: {advice}"]
    said = [f"{one.name} pulled against the others" for one in against] or ["no replica pulled against the others"]
    return [*said, f"judged by lengths and cosines alone; {advice}"]


def _reservations(found: Blame) -> list[str]:
    said = ["not known: what the others would have sent from the changed θ; their recorded pseudogradients were used"]
    gone = sorted({t for one in found.without for t in one.inseparable})
    if gone:
        steps = ", ".join(map(str, gone))
        said.append(f"not separated: the deltas of step {steps} are gone or damaged, so their whole means were used")
    return said


def refuse_unseparated(found: Blame) -> None:
    """Raise ConfigError if no pseudogradient could be left out because all deltas were deleted."""
    by_replica: Sequence[Without] = [one for one in found.without if not one.name.startswith(STEP)]
    if by_replica and not any(one.left_out for one in by_replica):
        raise ConfigError(
            f"no delta of the outer steps {found.first} to {found.last - 1} is left (fleet.keep), so no replica can be "
            'taken out of their means. --by step still works; a run with fleet.keep = "all" keeps its deltas'
        )


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
    """θ and momentum after an omission.   left_out: how many offers.   inseparable: steps whose deltas are gone, so
    that the whole mean was used.   cosines: one per omitted pseudogradient, with the mean of the others."""

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
        if (commit := chain.read(t)) is None:
            raise ChainBroken(LostCommit(t, last, f"θ_{last}").in_words())
        fragment = t % rules.fragments
        touched = [one for one in found if any(one.omission.covers(commit, o) for o in commit.offers)]
        if with_all := [one for one in found if one not in touched]:
            mean = np.empty(with_all[0].state.size(fragment), np.float32)
            read_mean(reducer, commit, mean)
            for one in with_all:
                one.state.apply(fragment, mean)
        _apply_without(reducer, commit, touched, fragment)


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
    """Return (Σ wᵢ·xᵢ) / Σ wᵢ over the parts with a vector, in listed order; round each operation to fp32.

    Zeros if no part has a vector."""
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
