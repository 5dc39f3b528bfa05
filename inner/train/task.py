"""The task that rollouts learn: prompts, the rewards, the tools, the hints after an error, the preference pairs.

the user's files, and where the user gave none: the scorer of inner.data.task, and ToolWorld's own for "toolworld"
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inner.channels.hints import Hint
from inner.channels.process_head import ProcessHead
from inner.channels.process_reward import ProcessReward
from inner.data.prompts import load_prompts, local_file
from inner.settings.inner import Files, InnerConfig
from inner.settings.task import reward_name
from inner.tasks.score import score_replies
from inner.usercode.check import load_environment
from inner.usercode.reward_model import load_reward_model
from inner.usercode.userfiles import load_module, load_object
from inner.worlds.toolworld import ToolWorld


@dataclass(frozen=True)
class Task:
    rows: list[dict[str, Any]]
    rewards: list[Callable[..., Sequence[float | None]]]  # as written; []: the environment has get_reward
    environment: type | None
    hint: Hint | None  # None: the templates of inner.channels.hints
    pairs: Path | None = None  # for the replay channel
    process: ProcessReward | None = None


def load_task(config: InnerConfig, files: Files, *, models: bool = True) -> Task:
    """models: load reward models; without, they say nothing.   Raises InnerError where a file cannot be used."""
    load_model = load_reward_model if models else _silent_reward
    rewards: list[Callable[..., Sequence[float | None]]] = [
        load_model(spelling) if kind in config.rewards.models else load_object(kind, spelling, files)
        for kind, spelling in config.rewards.lines.items()
    ]
    if config.scoring_task is not None:
        rewards = [score_replies]
    environment = load_environment(config, files)
    rows = load_prompts(config.data.source, files, config.data) if config.data.source is not None else []
    hint = None
    if config.sampling.environment is not None:
        hint = getattr(load_module("environment", config.sampling.environment, files), "hint", None)
    pairs = local_file("pairs", config.replay.pairs, files) if config.replay.pairs is not None else None
    process = load_process(config, files)
    if config.model != "toolworld":
        return Task(rows, rewards, environment, hint, pairs, process)
    world = ToolWorld(kinds=config.toolworld.kinds, names=config.toolworld.names)
    return Task(
        rows=rows or world.rows(),
        rewards=rewards or [world.reward],
        environment=environment or world.environment(),
        hint=hint if environment else world.hint,
        pairs=pairs,
        process=process,
    )


def _silent_reward(spelling: str) -> Callable[..., list[float | None]]:
    def score(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [None] * len(completions)

    score.__name__ = reward_name(spelling)
    return score


def load_process(config: InnerConfig, files: Files) -> ProcessReward | None:
    """Load the process reward; None without [inner.process].   Raises InnerError where its file cannot be used."""
    settings = config.process
    if settings is None:
        return None
    if settings.function is not None:
        score = load_object("process", settings.function, files)
    else:
        score = ProcessHead.load(local_file("process_head", str(settings.head), files))
    return ProcessReward(score, settings.weight, settings.credit)
