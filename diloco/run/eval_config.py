"""[eval] of a run.toml: held-out prompts, and the steps that are evaluated.  This file does not import torch.

    θ₀ ─ every ─▶ θ₅ ─ every ─▶ θ₁₀ …  θ_T         evaluated by all replicas, each with its share

Not promised: that `check_held_out` finds prompts that differ only in a space.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

from inner.errors import InnerError
from inner.settings.inner import InnerConfig
from inner.settings.tables import Table, setting
from inner.settings.task import check_sources, check_task
from inner.tasks.spec import TaskSpec


class EvalError(InnerError):
    """The error for an [eval] that cannot be used."""


@dataclass(frozen=True)
class EvalConfig(Table):
    """The reward on prompts that training never sees, by outer step (docs/data.md)."""

    path: ClassVar[str] = "eval"
    error: ClassVar[type[Exception]] = EvalError

    prompts: str | list = setting(
        "", "Files or datasets like those of the training prompts, with their columns; this or `task` must be given."
    )
    task: str | None = setting(
        None, "Task that replaces `prompts`, like `inner.data.task`; rows of the training data are left out."
    )
    task_options: dict | None = setting(
        None, "Its options (default: `inner.data.task_options`, where the task is the same)."
    )
    task_size: int = setting(200, "Rows of the task.", above=0, most=100_000)
    task_seed: int = setting(1, "Seed of the task's rows.", least=0, most=4000)
    every: int = setting(5, "Outer steps between two evaluations; θ₀ and the last step are evaluated too.", least=1)
    samples: int = setting(1, "Completions per prompt at the training temperature; 0 for none.", least=0, most=64)
    greedy: bool = setting(True, "And one completion of the likeliest tokens.")

    def check(self) -> None:
        if not self.prompts and not self.task:
            raise EvalError(
                "[eval] has no prompts. Set eval.prompts to a .jsonl file that training does not read, or eval.task."
            )
        check_sources("eval.prompts", self.prompts)
        check_task("eval", self.prompts, self.task)
        if self.task is None and (unread := [name for name in TASK_ONLY if getattr(self, name) != TASK_ONLY[name]]):
            raise EvalError(f"eval.{unread[0]} does nothing without eval.task. Set that, or leave it out.")
        if not (self.samples or self.greedy):
            raise EvalError("eval.samples = 0 with eval.greedy = false measures nothing. Set one of them.")

    @property
    def source(self) -> str | list[str]:
        """The prompts' source in the config: files, datasets or a task."""
        return self.task or self.prompts

    def task_spec(self, inner: InnerConfig) -> TaskSpec:
        """Return the spec of the task's rows; call it only if `task` is set.   inner: of the same run, for the
        options."""
        same = inner.data.task_options if inner.data.task == self.task else {}
        options = same if self.task_options is None else self.task_options
        return TaskSpec(str(self.task), self.task_size, self.task_seed, options)

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate θ_step.   last: number of the run's outer steps, 0 if unknown."""
        return step % self.every == 0 or step == last


TASK_ONLY = {f.name: f.default for f in fields(EvalConfig) if f.name.startswith("task_")}
