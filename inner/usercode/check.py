"""Check on the laptop that the user's files are usable, before any machine is rented.

    process       imports · answers for two empty rollouts; a head can be read
    reward        imports · is callable · (without an environment) answers one call on two empty completions
    agent         imports · takes a row and a model
    environment   imports · can be built · has reset · every public method has a schema (types and a docstring)
    prompts       every line parses · the same columns
    pairs         every line is a preference pair
    text          exists · is not empty

    check_data    reads the files without running the user's code     no torch: it can run on the laptop
    check_inner   all checks but those that need the model (inner/train/dry_run.py)   runs the user's code

Not promised: that the reward is right. In the run, each call checks again how many values it gets, and each value.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from inner.channels.head_file import read_head_width
from inner.channels.lessons import Rollout
from inner.channels.spans import Turn
from inner.data.faults import answered_words
from inner.data.prompts import load_prompts, local_file, read_rows
from inner.data.refusals import absent_columns
from inner.replay.pairs import training_pairs
from inner.settings.channels import ProcessSettings
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.settings.task import entry_point, is_code, is_one_file, setting_of
from inner.usercode.deadline import TimedOut, call_within
from inner.usercode.reward_form import SILENT, START, call_fault, call_of, sameness
from inner.usercode.reward_words import user_lines
from inner.usercode.userfiles import (
    check_syntax,
    load_environment,
    load_kept,
    load_object,
    load_reward,
    lost_tools,
    weighted_rewards,
)

LIMIT_S = 120.0  # a judge's model may be loaded meanwhile


def check_inner(config: InnerConfig, files: Files, *, steps: int | None = None, limit_s: float = LIMIT_S) -> None:
    """Raise InnerError for the first file or setting that cannot work.   steps: the run's inner steps, for rewards.

    limit_s: seconds after which the user's code is interrupted, and stderr says so; replicas use limits of their own.
    """
    START.max_steps = steps or START.max_steps
    try:
        call_within(limit_s, lambda: _check_files(config, files))
    except TimedOut:
        print(
            f"not checked: trying the run's code took longer than {limit_s:g} s. The replicas call it with their own "
            "limits (inner.rewards.timeout_s)",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _check_files(config: InnerConfig, files: Files) -> None:
    if config.loop == "supervised":
        _check_text(config, files)
        return
    _, environment = load_environment(config, files)
    agent = load_agent(config, files)
    rows = load_prompts(config.data.source, files, config.data) if config.data.source is not None else []
    if config.replay.pairs is not None:
        training_pairs(local_file("pairs", config.replay.pairs, files))
    if rows and environment is not None:
        _check_reset(config, environment, rows[0])
    check_world(config, rows, environment)
    for kind, spelling in config.rewards.named.items():
        reward = load_reward(kind, spelling, files)
        if rows and environment is None and agent is None:  # an environment's state exists only in a rollout
            reward(**_empty_call(rows))
        elif rows:
            more = "environments" if agent is None else "agent_reward"
            call = {**_empty_call(rows), more: [None, None]}
            if fault := call_fault(load_object(kind, spelling, files), call):
                raise InnerError(f"reward {spelling} cannot be called: {fault}.")
    if config.process is not None:
        _check_process(config.process, files, rows)


def load_agent(config: InnerConfig, files: Files) -> Callable[..., Any] | None:
    """Return the user's agent, or None.   Raises InnerError if the agent cannot be called with a row and a model."""
    if (spelling := config.sampling.agent) is None:
        return None
    agent = load_object("agent", spelling, files)
    if fault := _binding_fault(agent, {}, None):
        raise InnerError(
            f"inner.sampling.agent = {spelling!r} cannot be called with a row and a model: {fault}. Write "
            f"`async def {entry_point(spelling)}(row, model):`, or without `async`."
        )
    return agent


MOST_ROWS = 64  # rows to try before we report that a reward gives no numbers


class SilentReward(InnerError):
    """The reward gives no completion a number."""


def constant_reward(config: InnerConfig, files: Files, rows: int = 3) -> str:
    """Return a warning if a reward gives the first rows' answers and an empty text the same number; else "", also if
    this cannot be known here.   Raises SilentReward if the reward returns only None."""
    named = config.rewards.named
    if config.loop == "supervised" or config.sampling.environment or config.rewards.models or not named:
        return ""
    rewards = weighted_rewards(config, files)
    prompts = load_prompts(config.data.source, files, config.data) if config.data.source is not None else []
    same = sameness(rewards, prompts[:rows])
    tries = '`diloco check CONFIG --completion "…"` tries an answer that should be worth more'
    weights = config.rewards.weights  # a function with weight 0 is not to blame
    words = f"{', '.join(spelling for kind, spelling in named.items() if weights.get(kind, 1.0))} {same}".rstrip(" .")
    if same == SILENT and sameness(rewards, prompts[:MOST_ROWS]) == SILENT:
        raise SilentReward(f"{words}: a session without rewards ends. Return 0.0 for a wrong answer; {tries}.")
    return f"warning: {words}; {tries}" if same else ""


def lost_tools_warning(config: InnerConfig, files: Files) -> str:
    """Return a warning about methods of the environment that look like tools but are not; "" without such a method."""
    _, environment = load_environment(config, files)
    if environment is None:
        return ""
    lost = lost_tools(environment)
    words = ", ".join(f"{name} (a {kind})" for name, kind in lost.items())
    where = f"warning: environment {config.sampling.environment}: the model does not get {words} as a tool"
    return f"{where}. Write a plain method, which may call that one, or begin that one's name with _" if lost else ""


def check_world(config: InnerConfig, rows: Sequence[dict[str, Any]], environment: type | None) -> None:
    """Raise InnerError if the rows lack a column that ToolWorld's own reward or tools read, and a run uses them."""
    if config.model != "toolworld" or config.data.source is None or config.sampling.boxes or not rows:
        return
    is_scored = bool(config.rewards.lines or config.scoring_task) or hasattr(environment, "get_reward")
    parts = {
        "answer": "" if is_scored else 'reward. Set inner.rewards.function = "file.py:function"',
        "kind": "" if environment else 'tools. Set inner.sampling.environment = "file.py:Class"',
    }
    if lacking := [column for column, part in parts.items() if part and column not in rows[0]]:
        source = f"{setting_of('prompts', config.data.source)} = {config.data.source!r}"
        raise InnerError(
            f'{source}: the rows have no column {lacking[0]!r}, which inner.model = "toolworld" (the default) '
            f"reads for its own {parts[lacking[0]]}, leave inner.data out, or name your model in inner.model."
        )


def _check_reset(config: InnerConfig, environment: Any, row: dict[str, Any]) -> None:
    """Raise InnerError if reset cannot take a row: TRL calls it with every column."""
    if fault := _binding_fault(environment.reset, None, **row):
        raise InnerError(
            f"environment {config.sampling.environment}: reset cannot be called with a row, whose columns are "
            f"{', '.join(map(repr, row))}: {fault}. Write reset(self, **row), or rename a column in inner.data.columns."
        )


def _binding_fault(function: Any, *args: Any, **kwargs: Any) -> str:
    """Return why the function does not take these arguments; "" if it does."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    except ValueError:  # a C function without a signature
        pass
    return ""


def _check_process(settings: ProcessSettings, files: Files, rows: list[dict[str, Any]]) -> None:
    """Call the user's function on two empty rollouts, or load the head. Raises InnerError if that fails."""
    from inner.channels.process_head import ProcessHead
    from inner.channels.process_reward import ProcessReward, score_steps

    if settings.function is None:
        ProcessHead.load(local_file("process_head", str(settings.head), files))
        return
    score = load_kept("process", settings.function, files)
    path = local_file("process", settings.function, files)
    try:
        score_steps(ProcessReward(score), [_empty_rollout(row) for row in rows[:2]])
    except InnerError:
        raise
    except Exception as error:
        raise InnerError(
            f"the process reward {settings.function} failed on two empty rollouts.\n{user_lines(error, path)}"
        ) from error


def _empty_rollout(row: dict[str, Any]) -> Rollout:
    nothing: Any = [{"role": "assistant", "content": ""}] if isinstance(row["prompt"], list) else ""
    return Rollout(row, prompt=[], ids=[], written=(), turns=[Turn(0, 0)], reward=0.0, completion=nothing)


def check_data(config: InnerConfig, files: Files) -> str:
    """Return a warning about prompts, or "".   Raise InnerError for the first line of the user's files that cannot be
    read. This does not run their code."""
    for kind, spelling in config.named_files.items():
        if is_code(kind):
            check_syntax(kind, spelling, files)
    if config.loop == "supervised":
        _check_text(config, files)
    rows = load_prompts(config.data.source, files, config.data) if config.data.source is not None else []
    if config.replay.pairs is not None:
        training_pairs(local_file("pairs", config.replay.pairs, files))
    if config.process is not None and config.process.head is not None:
        read_head_width(local_file("process_head", config.process.head, files))
    if config.sampling.environment is None:
        check_world(config, rows, None)
    name = setting_of("prompts", config.data.source)
    absent, source = "", config.data.source
    if isinstance(source, str) and is_one_file(source):
        absent = absent_columns(name, [row for _, row in read_rows(name, local_file("prompts", source, files))])
    return "\n".join(filter(None, [absent, answered_words(name, [row["prompt"] for row in rows])]))


def _empty_call(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the keyword arguments that TRL would pass for two empty rollouts."""
    two = [call_of(row, [""], [[]]) for row in (rows[0], rows[min(1, len(rows) - 1)])]
    each = {name: value + two[1][name] for name, value in two[0].items() if isinstance(value, list)}
    return {**two[0], **each}


def _check_text(config: InnerConfig, files: Files) -> None:
    from inner.data.tokens import IDS, open_ids

    path = local_file("text", str(config.data.text), files)
    if path.stat().st_size == 0:
        raise InnerError(f"inner.data.text = {config.data.text!r} is empty. Give a file with something to learn.")
    if path.suffix in IDS:
        open_ids(path, str(config.data.text))
