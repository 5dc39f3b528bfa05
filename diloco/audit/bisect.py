"""Find the outer step of a change: a binary search over a run's θ, judged by a user's command.

    θ_a good ─────────── θ_m ? ─────────── θ_b bad         two judgements of the ends, then at most ⌈log₂(b − a)⌉
                           └─ good: a = m     bad: b = m     cannot say: judge the nearest other step

    θ_t ──▶ a folder as `diloco export` writes it ──▶ COMMAND, once for each θ
                                                      {model}, {step} in its arguments, or
                                                      DILOCO_MODEL, DILOCO_STEP, DILOCO_RUN

    exit code   0 good      125 cannot say      1 … 124 bad      else: could not run, the search ends    (as in git)

`bisect` is a pure search over a list of steps; `judge` is an argument.  `bisect` finds where the judgement changes,
from good to bad or from bad to good.  `diloco blame` reads the last word that a command prints, as a number.

Not promised: a certain step if the judgement changes more than once (as with git, one of the changes is found); a time
limit.  Ctrl-C ends the command and the search.
"""

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, log2
from pathlib import Path
from typing import Any

from diloco.model.export import state_at, write_model
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run


class Judgement(StrEnum):
    GOOD = "good"
    BAD = "bad"
    UNCLEAR = "cannot say"


@dataclass(frozen=True)
class Change:
    """A change: `before` has a θ judged like the first end's, `after` like the last end's.   judged: step -> judgement.

    unclear: steps between the two that could not be judged.   gone: steps between them that are not in the bucket.
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
            f"θ_{self.after} is the first that is {now}: outer step {self.before} made it from θ_{self.before}"
            if len(self.steps) == 1
            else f"θ_{self.before} is {was}, θ_{self.after} is {now}: one of the outer steps "
            f"{self.before} to {self.after - 1} between them caused it"
        )
        return [
            found,
            *more,
            "look at it:",
            f"  diloco explain {shlex.quote(url)} --step {self.before}",
            f"  diloco blame {shlex.quote(url)} --from {self.before} --to {self.after}",
        ]


def most_judgements(steps: Sequence[int]) -> int:
    """Return the maximal number of judgements after the first two, if no judgement is "cannot say"."""
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
    """Return the index nearest to the middle that was not judged; None if all were judged."""
    left = [i for i in range(low + 1, high) if steps[i] not in judged]
    return min(left, key=lambda i: abs(2 * i - low - high), default=None)


def _refuse_ends(judged: dict[int, Judgement]) -> None:
    (first, of_first), (last, of_last) = judged.items()
    for t, found in judged.items():
        if found is Judgement.UNCLEAR:
            why = f"the command cannot say whether θ_{t} is good (exit code 125)"
            raise ConfigError(f"{why}. Choose another end with --from or --to")
    if of_first is of_last:
        raise ConfigError(
            f"the command finds θ_{first} {of_first} and θ_{last} {of_last}, too: it sees no "
            "change between them. Try the command by hand on both, or name other ends with --from and --to"
        )


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


STDERR = 2  # the file descriptor, because sys.stderr may be another stream
UNCLEAR, COULD_NOT_RUN = 125, 126  # from 126 on: no such command, or a signal


@dataclass(frozen=True)
class Judge:
    """A user's command.   words: the command's.   merge: for a LoRA run, pass the whole model, not the adapter."""

    run: Run
    record: ModelRecord
    words: Sequence[str]
    merge: bool = False

    def judge(self, step: int) -> Judgement:
        """Judge θ_step by the command's exit code.   The command's output goes to this program's stderr."""
        at, state = state_at(self.run, self.record, step)
        code = self._call(at, state, stdout=STDERR).returncode
        if code >= COULD_NOT_RUN or code < 0:
            raise ConfigError(
                f"{self._name} ended with code {code} on θ_{step}; it has to be 0 (good), 1 to 124 (bad) or 125 "
                "(cannot say). Correct the command"
            )
        return Judgement.GOOD if code == 0 else Judgement.UNCLEAR if code == UNCLEAR else Judgement.BAD

    def measure(self, step: int, state: OuterState) -> float:
        """Return the last word that the command prints, as a number."""
        done = self._call(step, state, stdout=subprocess.PIPE)
        last = (done.stdout.split() or [""])[-1]
        if done.returncode:
            raise ConfigError(f"{self._name} ended with code {done.returncode} on θ_{step}; it has to print a number")
        try:
            return float(last)
        except ValueError:
            raise ConfigError(f"{self._name} printed {last!r} last on θ_{step}; it has to be a number") from None

    @property
    def _name(self) -> str:
        return f"the command {' '.join(self.words)!r}"

    def _call(self, step: int, state: OuterState, stdout: int) -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory(prefix="diloco-judge-", ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch) / f"step-{step}"
            write_model(self.run, self.record, state, at=step, to=folder, merge=self.merge)
            words = [word.replace("{model}", str(folder)).replace("{step}", str(step)) for word in self.words]
            told = {"DILOCO_MODEL": str(folder), "DILOCO_STEP": str(step), "DILOCO_RUN": self.run.url}
            try:
                return subprocess.run(words, stdout=stdout, env={**os.environ, **told}, text=True, check=False)
            except OSError as error:
                raise ConfigError(f"{self._name} cannot be run: {error.strerror}") from error
