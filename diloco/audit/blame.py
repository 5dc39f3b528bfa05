"""Rank replicas or outer steps by their effect on a number: θ_b is recomputed without each of them.

    θ_a ─┬─────────────────▶ θ_b     loss 2.87
         ├─ without r00 ───▶ θ_b′    loss 2.98   +0.11
         └─ without r02 ───▶ θ_b″    loss 2.51   −0.36      ◀── r02 did most harm

    omissions.py  θ without …       metrics.py  a number for a θ       here: the comparison and its text

Not promised: shares that add up; the cause if two replicas do the same harm, because leaving out one changes little.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diloco.audit.explain import OPPOSED
from diloco.audit.metrics import LOWER, UNKNOWN, Measurement, Metric
from diloco.audit.omissions import Counterfactual, Omission, distance, listed_slots, states_without
from diloco.model.export import model_record, state_at
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import Run

REPLICA, STEP = "replica", "step"
NOISE = 0.1  # share of the number's change from θ_a to θ_b, or of an average step's change


@dataclass(frozen=True)
class Without:
    """One omission.   measured: without it; None with no metric.   moved: ‖θ_b′ − θ_b‖.   left_out: pseudogradients.

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
    """The result.   metric: a name, or "".   better: LOWER, HIGHER or UNKNOWN.   before, after: of θ_first, θ_last."""

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
        """The omissions by size of change; with no metric, those that oppose the others come first."""
        if self.metric:
            return sorted(self.without, key=lambda one: -abs(self.change(one)))
        return sorted(self.without, key=lambda one: (1.0 if one.cosine is None else one.cosine, -one.moved))

    @property
    def harm(self) -> Without | None:
        """The omission that improves the number most, if by more than noise; else None."""
        if not self.metric or self.better == UNKNOWN or not self.without:
            return None
        worst = max(self.without, key=lambda one: self.better * self.change(one))
        change, error = self.change_and_error(worst)
        return worst if self.better * change > max(self._least, 0.0 if math.isnan(error) else 2 * error) else None

    @property
    def _least(self) -> float:
        """The least change that counts, as replicas and steps always differ a little."""
        assert self.before is not None and self.after is not None
        of_steps = self.last - self.first if self.without[0].name.startswith(STEP) else 1
        return NOISE * abs(self.after.value - self.before.value) / of_steps


def blame(run: Run, first: int, last: int, metric: Metric | None, by: str = REPLICA) -> Blame:
    """Compare θ_last with its replay from θ_first without each replica, or without each outer step.

    Raises ConfigError for steps that are not in order, were deleted or are not taken yet."""
    if first >= last:
        raise ConfigError(f"from θ_{first} to θ_{last} there is no outer step. --to must be above --from")
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


def _compared(found: Iterable[Counterfactual], end: OuterState, metric: Metric | None, last: int) -> Iterable[Without]:
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


def _number(measured: Measurement | None) -> str:
    if measured is None:
        return ""
    error = "" if math.isnan(measured.error) else f" ± {measured.error:.2g}"
    return f"{measured.value:.5g}{error}"


def _conclusion(found: Blame) -> list[str]:
    if not found.without:
        return ["no work was counted there"]
    if not found.metric:
        return _conclusion_without_metric(found)
    most = found.ranked[0]
    if found.better == UNKNOWN:
        size = f"{abs(found.change(most)):.4g} {_side(found, most)}"
        return [f"{most.name} moved it most: without it, it would be {size}"]
    harm = found.harm
    if harm is None:
        return ["none stands out: without any one of them it would be worse, or better by no more than noise"]
    size = f"{abs(found.change(harm)):.4g} {_side(found, harm)}"
    return [f"{harm.name} did most harm: without it, it would be {size}"]


def _side(found: Blame, one: Without) -> str:
    return "lower" if found.change(one) < 0 else "higher"


def _conclusion_without_metric(found: Blame) -> list[str]:
    advice = "--text FILE, --prompts FILE or -- COMMAND name a number to judge by"
    against = [one for one in found.ranked if one.cosine is not None and one.cosine < OPPOSED]
    if len([one for one in found.without if one.left_out]) == 2 and against:
        return [f"two replicas pull against each other; which of them is wrong, only a number can say: {advice}"]
    said = [f"{one.name} pulled against the others" for one in against] or ["no replica pulled against the others"]
    return [*said, f"judged by lengths and cosines alone; {advice}"]


def _reservations(found: Blame) -> list[str]:
    said = ["not known: what the others would have given from another θ; their pseudogradients are taken as they were"]
    gone = sorted({t for one in found.without for t in one.inseparable})
    if gone:
        steps = ", ".join(map(str, gone))
        said.append(f"not separated: the deltas of step {steps} are gone or damaged, so these means went in whole")
    return said


def refuse_unseparated(found: Blame) -> None:
    """Raise ConfigError if no pseudogradient could be left out because all deltas were deleted."""
    by_replica: Sequence[Without] = [one for one in found.without if not one.name.startswith(STEP)]
    if by_replica and not any(one.left_out for one in by_replica):
        raise ConfigError(
            f"no delta of the outer steps {found.first} to {found.last - 1} is left (fleet.keep), so no replica can be "
            'taken out of their means. --by step still works; a run with fleet.keep = "all" keeps its deltas'
        )
