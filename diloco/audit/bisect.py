"""Find the outer step of a change: a binary search over a run's θ, judged by a user's command.

    θ_a good ─────────── θ_m ? ─────────── θ_b bad         two judgements of the ends, then at most ⌈log₂(b − a)⌉
                           └─ good: a = m     bad: b = m     cannot say: judge the nearest other step

`bisect` is a pure search over a list of steps; `judge` is an argument.  It finds where the judgement changes, from
good to bad or from bad to good.

Not promised: a certain step if the judgement changes more than once; as with git, one of the changes is found.
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log2
from typing import Any

from diloco.run.config import ConfigError


class Judgement(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "cannot say"


@dataclass(frozen=True)
class Change:
    """A change: θ of `before` has the first end's judgement, θ of `after` the last end's.   judged: step -> judgement.

    unclear: steps between the two that could not be judged.   gone: steps between that are not in the bucket.
    """

    before: int
    after: int
    judged: dict[int, Judgement]
    unclear: tuple[int, ...]
    gone: tuple[int, ...]

    @property
    def steps(self) -> range:
        """The outer steps that may have caused the change; step t makes θ_t+1 from θ_t."""
        return range(self.before, self.after)

    def to_dict(self) -> dict[str, Any]:
        return {
            "before": self.before, "after": self.after, "steps": [*self.steps], "unclear": [*self.unclear],
            "gone": [*self.gone], "judged": {str(t): str(j) for t, j in self.judged.items()},
        }  # fmt: skip

    def lines(self, url: str) -> list[str]:
        was, now = self.judged[self.before], self.judged[self.after]
        more = [
            *([f"θ of {_listed(self.unclear)} could not be judged"] if self.unclear else []),
            *([f"θ of {_listed(self.gone)} is not kept any more (fleet.keep)"] if self.gone else []),
        ]
        found = (
            f"θ_{self.after} is the first that is {now}: outer step {self.before} made it of θ_{self.before}"
            if len(self.steps) == 1
            else f"θ_{self.before} is {was}, θ_{self.after} is {now}: the outer steps {self.before} to "
            f"{self.after - 1} lie between, of which one did it"
        )
        return [
            found,
            *more,
            "look at it:",
            f"  diloco explain {shlex.quote(url)} --step {self.before}",
            f"  diloco blame {shlex.quote(url)} --from {self.before} --to {self.after}",
        ]


def most_judgements(steps: Sequence[int]) -> int:
    """Return the maximal number of judgements after those of the two ends, if none is "cannot say"."""
    return ceil(log2(max(1, len(steps) - 1)))


def bisect(steps: Sequence[int], judge: Callable[[int], Judgement]) -> Change:
    """Find where the judgement changes.   steps: two or more, ascending.   Raises ConfigError if the ends are alike."""
    judged = {t: judge(t) for t in (steps[0], steps[-1])}
    _refuse_ends(judged)
    low, high = 0, len(steps) - 1
    while (middle := _middle(steps, judged, low, high)) is not None:
        found = judged[steps[middle]] = judge(steps[middle])
        if found is judged[steps[low]]:
            low = middle
        elif found is judged[steps[high]]:
            high = middle
    unclear = tuple(steps[low + 1 : high])
    gone = tuple(t for t in range(steps[low] + 1, steps[high]) if t not in steps)
    return Change(steps[low], steps[high], judged, unclear, gone)


def _middle(steps: Sequence[int], judged: dict[int, Judgement], low: int, high: int) -> int | None:
    """Return the index nearest to the middle that was not judged; None if all were."""
    left = [i for i in range(low + 1, high) if steps[i] not in judged]
    return min(left, key=lambda i: abs(2 * i - low - high), default=None)


def _refuse_ends(judged: dict[int, Judgement]) -> None:
    (first, of_first), (last, of_last) = judged.items()
    for t, found in judged.items():
        if found is Judgement.UNCLEAR:
            raise ConfigError(f"the command cannot say whether θ_{t} is good (exit code 125). Choose another end")
    if of_first is of_last:
        raise ConfigError(
            f"the command finds θ_{first} {of_first} and θ_{last} {of_last}, too: it sees no "
            "change between them. Try the command by hand on both, or name other ends with --from and --to"
        )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
