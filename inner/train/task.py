"""Loads a run's task: prompts, rewards, tools, hints after an error, preference pairs.

    Parts come from the user's files (task_files.py). Missing parts come from the scorer of inner.data.task, and from
    ToolWorld if inner.model = "toolworld".

Not promised: that rows and rewards fit together; inner/usercode/check.py tries them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inner.settings.inner import Files, InnerConfig

if TYPE_CHECKING:
    from inner.channels.hints import Hint
    from inner.channels.process_reward import ProcessReward


@dataclass(frozen=True)
class Task:
    rows: list[dict[str, Any]]
    rewards: list[Callable[..., Sequence[float | None]]]  # the user's functions, unwrapped; []: use get_reward
    environment: type | None
    hint: Hint | None  # None: use the templates of inner.channels.hints
    pairs: Path | None = None  # the pairs of the replay channel
    process: ProcessReward | None = None
    turn: Any = None  # switches between the environment's state and the trainer's (inner/usercode/apart.py)
    agent: Callable[[Any], Any] | None = None  # trainer -> the maker of its rollouts (inner/extras/agents/rollouts.py)
    make: Callable[[], Any] | None = None  # makes the user's environment, apart from training; None: call the class


def load_task(config: InnerConfig, files: Files, *, models: bool = True) -> Task:
    """Load the task.   models: if False, reward models return None.   Raises InnerError if a file cannot be used."""
    task = Task([], [], None, None)
    if config.named_files:
        from inner.train.task_files import load_files

        task = Task(**load_files(config, files, models=models))
    if config.scoring_task is not None:
        from inner.tasks.score import score_replies

        task = replace(task, rewards=[score_replies])
    return _with_world(config, task) if config.model == "toolworld" else task


def _with_world(config: InnerConfig, task: Task) -> Task:
    """Return the task, with ToolWorld's parts in place of parts that the user did not give."""
    from inner.worlds.toolworld import ToolWorld

    world = ToolWorld(kinds=config.toolworld.kinds, names=config.toolworld.names)
    return replace(
        task,
        rows=task.rows or world.rows(),
        rewards=task.rewards or ([] if hasattr(task.environment, "get_reward") else [world.reward]),
        environment=task.environment or world.environment(),
        hint=task.hint if task.environment else world.hint,
    )
