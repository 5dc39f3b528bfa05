"""Run a user's command on θ_t, for `diloco bisect` (its exit code) and `diloco blame` (the last number it prints).

    θ_t ──▶ a folder as `diloco export` writes it ──▶ COMMAND, once for each θ
                                                      {model}, {step} in its arguments, or
                                                      DILOCO_MODEL, DILOCO_STEP, DILOCO_RUN

    exit code   0 good      125 cannot say      1 … 124 bad      else: could not run, the search ends    (as in git)

Not promised: a time limit.  Ctrl-C ends the command and the search.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diloco.audit.bisect import Judgement
from diloco.model.export import state_at, write_model
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run

STDERR = 2  # the file descriptor, because sys.stderr may be another stream
UNCLEAR, COULD_NOT_RUN = 125, 126  # 126 and more: no such command, a signal


@dataclass(frozen=True)
class Judge:
    """A user's command.   words: its arguments.   merge: for a LoRA run, pass the whole model, not the adapter."""

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
                f"{self._name} ended with code {code} on θ_{step}; 0 says good, 125 cannot say, 1 to 124 bad"
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
        with tempfile.TemporaryDirectory(prefix="diloco-judge-") as scratch:
            folder = Path(scratch) / f"step-{step}"
            write_model(self.run, self.record, state, at=step, to=folder, merge=self.merge)
            here = {"{model}": str(folder), "{step}": str(step)}
            words = [_filled(word, here) for word in self.words]
            told = {"DILOCO_MODEL": str(folder), "DILOCO_STEP": str(step), "DILOCO_RUN": self.run.url}
            try:
                return subprocess.run(words, stdout=stdout, env={**os.environ, **told}, text=True, check=False)
            except OSError as error:
                raise ConfigError(f"{self._name} cannot be run: {error.strerror}") from error


def _filled(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word
