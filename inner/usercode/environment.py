"""Load and check the user's environment: a class whose public methods are the tools of a rollout.

    "env.py:Env" ──▶ imported · built · has reset · get_reward if there is no reward · every tool has a schema

Not promised: that `reset` takes a row (check.py tests it), or that a tool does what its docstring says.
"""

import inspect
from pathlib import Path
from typing import Any

from inner.data.prompts import local_file
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.usercode.userfiles import load_object, user_lines


def load_environment(config: InnerConfig, files: Files) -> type | None:
    """Return the user's environment class, checked; None if the config has none."""
    spelling = config.sampling.environment
    if spelling is None:
        return None
    found = load_object("environment", spelling, files)
    path = local_file("environment", spelling, files)
    try:
        instance = found()
    except Exception as error:
        raise InnerError(f"environment {spelling} cannot be built.\n{user_lines(error, path)}") from error
    _check_members(config, type(instance))
    for tool in tool_names(type(instance)):
        _check_schema(spelling, getattr(instance, tool), path)
    return found


def tool_names(environment: type) -> list[str]:
    """Return the tools by TRL's rule: every public method except reset and get_reward."""
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]


def _check_members(config: InnerConfig, environment: type) -> None:
    spelling = config.sampling.environment
    if not hasattr(environment, "reset"):
        raise InnerError(f"environment {spelling} has no `reset(self, **row)`. Add it; it gets the prompt's row.")
    is_scored = config.rewards.lines or config.data.task or config.model == "toolworld"
    if not is_scored and not hasattr(environment, "get_reward"):
        raise InnerError(
            f"environment {spelling} has no `get_reward` and there is no reward. Add the method, or set "
            'inner.rewards.function = "file.py:function".'
        )
    if config.sdpo.weight > 0 and not tool_names(environment):
        raise InnerError(
            f"inner.sdpo.weight = {config.sdpo.weight} learns at tool errors, and environment {spelling} has no public "
            "method, so no tool can fail. Add a tool, or set inner.sdpo.weight = 0."
        )


def _check_schema(spelling: str, tool: Any, path: Path) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        get_json_schema(tool)
    except Exception as error:
        raise InnerError(
            f"environment {spelling}: tool {tool.__name__} cannot be described to the model ({error}). In {path.name}, "
            'give every argument a type and a line under "Args:" in the docstring.'
        ) from error
