"""Numbers of learning that replicas measured, per outer step, as text and as curves.  Pure functions, without torch.

    stats of an offer, or a "step" event of a log ──▶ learning_numbers ──▶ {"loss": 4.8, "grad_norm": 1.3, "entropy": …}
    [Measured per step] ──▶ headline_curve ──▶ the reward if there is one, else the loss: per replica and their mean

Not promised: comparable losses. Each replica has its own data, and the value of a policy loss alone means little.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from diloco.units import is_reckonable

NAMES = {
    "loss": "loss {:.4g}", "grad_norm": "grad norm {:.3g}", "entropy": "entropy {:.3g}", "kl": "KL {:.3g}",
    "completion_length": "length {:.3g}", "reward_missing": "{:.3g} completions without reward",
    "reward_broken": "{:.1%} of completions broke the reward",
}  # fmt: skip
IF_ANY = ("reward_broken",)  # not shown if it is 0
WATCHED = ["reward_std", "equal_groups", "tool_failures", "importance_masked", "replay_accuracy", "replay_chosen_logp"]
COUNTS = ("reward_missing",)  # summed over replicas; all others are averaged
LINE = {"reward": "reward {:.4g}", **NAMES, "lr": "lr {:.3g}", "samples": "{:.0f} samples"}
SECONDS = {"inner_s": "train {:.1f} s", "wait_s": "wait {:.1f} s"}


class Measured(Protocol):
    """The numbers of one outer step.   fresh: slots with a fresh offer in its commit; reward, learned: by slot."""

    fresh: tuple[str, ...]
    reward: dict[str, float]
    learned: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Curve:
    """One curve.   name: "reward" or "loss".   by_slot, mean: a value per outer step, None if no value was measured."""

    name: str
    by_slot: dict[str, list[float | None]]
    mean: list[float | None]

    @property
    def known(self) -> list[float]:
        return [value for value in self.mean if value is not None]

    @property
    def ends(self) -> tuple[float, float] | None:
        """The first and the newest known mean."""
        return (self.known[0], self.known[-1]) if self.known else None


def reckonable(stats: Mapping[str, float]) -> dict[str, float]:
    """Return an offer's stats without numbers too large for a mean: a replica may send 1e308."""
    return {name: value for name, value in stats.items() if is_reckonable(value)}


def learning_numbers(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of NAMES and WATCHED (for troubles) in an offer's stats or in a "step" event."""
    return {name: float(stats[name]) for name in (*NAMES, *WATCHED) if isinstance(stats.get(name), int | float)}


def headline_curve(steps: Sequence[Measured], slots: Iterable[str]) -> Curve:
    """Return a run's headline curve: its rewards, or its losses if it has no rewards."""
    name = "reward" if any(step.reward for step in steps) else "loss"
    of = lambda step: step.reward if name == "reward" else _by_slot(step, "loss")  # noqa: E731
    by_slot = {slot: [of(step).get(slot) for step in steps] for slot in slots}
    fresh = [[of(step)[slot] for slot in step.fresh if slot in of(step)] for step in steps]
    means = [fmean(values) if values else None for values in fresh]
    return Curve(name, {slot: values for slot, values in by_slot.items() if any(v is not None for v in values)}, means)


def newest_numbers(steps: Sequence[Measured]) -> dict[str, float]:
    """Return the newest outer step's numbers, combined over replicas. Steps without any number are passed over."""
    return next((found for step in reversed(steps) if (found := over_replicas(step))), {})


def over_replicas(step: Measured, names: Iterable[str] = tuple(NAMES)) -> dict[str, float]:
    """Combine one outer step's numbers over replicas: means, and sums of counts."""
    found: dict[str, float] = {}
    for name in names:
        values = list(_by_slot(step, name).values())
        if values:
            found[name] = sum(values) if name in COUNTS else fmean(values)
    return found


def learning_words(numbers: Mapping[str, float], without: str = "") -> str:
    """Return "loss 4.83 · grad norm 1.3".   without: a name that is shown elsewhere."""
    shown = {n: form for n, form in NAMES.items() if n in numbers and n != without and is_shown(n, numbers[n])}
    return " · ".join(form.format(numbers[name]) for name, form in shown.items())


def is_shown(name: str, value: float) -> bool:
    return value != 0 or name not in IF_ANY


def step_line(name: str, event: Mapping[str, Any], steps: int) -> str:
    """Return a replica's line for an outer step: "r00-1  outer step 3 of 6  loss 4.83  …".   steps: 0 if unknown."""
    of = f" of {steps}" if steps else ""
    forms = {**LINE, **SECONDS}
    known = {k: event[k] for k in forms if isinstance(event.get(k), int | float)}
    numbers = [forms[k].format(value) for k, value in known.items() if is_shown(k, value)]
    note = [] if event.get("listed", True) else ["its work is not in this step's commit"]
    return "  ".join([f"{name}  outer step {event['step'] + 1}{of}", *numbers, *note])


def _by_slot(step: Measured, name: str) -> dict[str, float]:
    return {slot: numbers[name] for slot, numbers in step.learned.items() if name in numbers}
