"""Load and check the user's code: "reward.py:score" -> a function.

    rewards.function = "reward.py:score"       as the user wrote it; the name of the function follows the last ":"
    files["reward"] = Path("/…/reward.py")    the local copy

    "env.py:Env" ──▶ imported · built · has reset · get_reward if there is no reward · every tool has a schema

An environment is a class whose public methods are the tools of a rollout. Every fault in a user's file becomes an
InnerError that shows the line in that file.

Not promised: that `reset` takes a row (check.py tests it), or that a tool does what its docstring says.
"""

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import lru_cache, partialmethod, singledispatchmethod, wraps
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from inner.data.prompts import local_file
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.settings.task import MODULES, setting_of
from inner.usercode.apart import apart, keep_apart
from inner.usercode.attempts import LARGEST, read_values
from inner.usercode.reward_form import call_fault
from inner.usercode.reward_words import user_lines


def load_object(kind: str, spelling: str, files: Files) -> Any:
    """Return the function or class that "file.py:name" names."""
    module = load_module(kind, spelling, files)
    file, _, name = spelling.rpartition(":")
    is_called = kind != "environment"  # an environment is a class
    if not hasattr(module, name):
        public = {n: v for n, v in vars(module).items() if callable(v) and not n.startswith("_")}
        defined = [n for n, v in public.items() if not (is_called and isinstance(v, type))]
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r}: the file defines no {name!r}; it defines "
            f"{', '.join(defined) or 'nothing callable'}. Correct the name after the colon in {setting_of(kind)}."
        )
    found = getattr(module, name)
    if not callable(found):
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r}: {name} is a {type(found).__name__}, which is not callable. Correct it."
        )
    if is_called and isinstance(found, type):
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r}: {name} is a class, and a run calls an object of it. "
            f"Write `score = {name}()` below the class, and name {file}:score."
        )
    return found


def load_kept(kind: str, spelling: str, files: Files) -> Any:
    """Load a function whose calls leave this process as it was (inner/usercode/apart.py)."""
    return keep_apart(load_object(kind, spelling, files), local_file(kind, spelling, files))


def check_syntax(kind: str, spelling: str, files: Files) -> None:
    """Raise InnerError for a file that Python cannot compile. This does not run the code."""
    path = _code_file(kind, spelling, files)
    try:
        compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}: {(error.text or '').strip()}" if isinstance(error, SyntaxError) else ""
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r} is not Python that can be run.\n  {path.name}{line}\n"
            f"  {type(error).__name__}: {what}\n  next: correct the line."
        ) from error


def _code_file(kind: str, spelling: str, files: Files) -> Path:
    if not spelling.rpartition(":")[0]:
        raise InnerError(
            f'{setting_of(kind)} = {spelling!r} names no object. Write {setting_of(kind)} = "file.py:name".'
        )
    return local_file(kind, spelling, files)


def load_module(kind: str, spelling: str, files: Files) -> ModuleType:
    """Run the user's file once per process."""
    path = _code_file(kind, spelling, files)
    name = _module_name(kind, path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InnerError(f"{setting_of(kind)} = {spelling!r}: {path.name} is not a Python file. Give a .py file.")
    if (beside := str(files.get(MODULES, ""))) and beside not in sys.path:
        sys.path.insert(0, beside)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before running the file, because dataclasses and pickle look the module up
    try:
        with apart(path, path.name):
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise InnerError(
            f"{setting_of(kind)} = {spelling!r} could not be imported.\n{user_lines(error, path)}"
        ) from error
    return module


def _module_name(kind: str, path: Path) -> str:
    """Return the name of the file's module: rewards in one file share one module.

    A run's copy lies in a folder with the file's digest as its name.  There, worker processes of the user's code find
    the module under its name, because they get this process's sys.path."""
    body = path.read_bytes()
    digits = sha256(str(path.resolve()).encode() + body).hexdigest()[:12]
    name = f"inner_user_{kind.partition('.')[0]}_{digits}"
    if path.parent.name == sha256(body).hexdigest():
        named = path.parent / "modules" / f"{name}.py"
        with suppress(OSError):  # another rank may have made it
            named.parent.mkdir(exist_ok=True)
            named.symlink_to(path.resolve())
        if str(named.parent) not in sys.path:
            sys.path.append(str(named.parent))
    return name


def load_reward(kind: str, spelling: str, files: Files) -> Callable[..., list[float | None]]:
    """Load the user's reward, wrapped so that each call checks the returned values."""
    return guard_reward(load_kept(kind, spelling, files), spelling, local_file(kind, spelling, files))


def weighted_rewards(config: InnerConfig, files: Files) -> list[tuple[Callable[..., list[float | None]], float]]:
    """Load the user's reward functions, with their weights."""
    weights = config.rewards.weights
    return [
        (load_reward(kind, spelling, files), weights.get(kind, 1.0)) for kind, spelling in config.rewards.named.items()
    ]


def guard_reward(function: Callable[..., Any], spelling: str, path: Path | None = None) -> Callable[..., Any]:
    """Wrap a reward: an exception, a wrong length or a NaN becomes an InnerError that names the reward."""

    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        if fault := call_fault(function, {"completions": completions, **columns}):
            raise InnerError(f"reward {spelling} cannot be called: {fault}.")
        try:
            values = function(completions=completions, **columns)
            values = asyncio.run(values) if inspect.iscoroutine(values) else values
        except Exception as error:
            shown = user_lines(error, path) if path is not None else f"  {error!r}"
            shown += _form_advice(error, completions) or _column_advice(error, columns)
            raise InnerError(f"reward {spelling} failed on {len(completions)} completions.\n{shown}") from error
        return checked_rewards(values, len(completions), spelling)

    reward.__name__ = getattr(function, "__name__", "reward")  # TRL uses this name for metrics
    return reward


def _form_advice(error: Exception, completions: list[Any]) -> str:
    """Return advice if a reward expects messages but gets texts, or expects texts but gets messages; else ""."""
    what, texts = str(error), bool(completions) and isinstance(completions[0], str)
    if texts and "string ind" in what:  # "… indices must be integers", "… index out of range"
        return (
            "\n  completions are texts here, because the prompts are texts: use each as it is. Or set "
            "inner.data.system: then prompts and completions are chats"
        )
    if not texts and any(w in what for w in ("'list' object", "got 'list'", "list indices")):
        return (
            "\n  completions is a list with one entry per completion, and each is a list of messages here, because the "
            'prompts are: [completion[-1]["content"] for completion in completions]'
        )
    return ""


def _column_advice(error: Exception, columns: Mapping[str, Any]) -> str:
    """Return advice if the error looked up a column that the prompts do not have; else ""."""
    asked = error.args[0] if isinstance(error, KeyError) and error.args else None
    near = get_close_matches(asked, columns, n=1) if isinstance(asked, str) and asked not in columns else []
    return f"\n  the prompts have no column {asked!r}; did you mean {near[0]!r}?" if near else ""


def guard_answers(reward: Any, more: Mapping[str, Any]) -> Any:
    """Wrap a reward so that its answers are checked, for a trainer without RewardCalls. Without the check, TRL would
    read a NaN as "cannot say". A reward that is a model is returned as it is.   more: the trainer's own columns."""
    from torch import nn

    if isinstance(reward, nn.Module) or not callable(reward):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    function = cast(Any, reward)

    @wraps(reward, updated=())
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return checked_rewards(function(*args, **{**kwargs, **more}), len(kwargs["completions"]), name)

    @wraps(reward, updated=())
    async def checked_later(*args: Any, **kwargs: Any) -> list[float | None]:
        return checked_rewards(await function(*args, **{**kwargs, **more}), len(kwargs["completions"]), name)

    return checked_later if inspect.iscoroutinefunction(reward) else checked


def checked_rewards(values: Any, expected: int, spelling: str) -> list[float | None]:
    """Return one finite number (or None: "cannot say") per completion.   Raises InnerError for other values."""
    try:
        read = read_values(values, expected)
    except ValueError as error:
        raise InnerError(f"reward {spelling} {error}.") from error
    for i, said in read.invalid.items():
        flatten = " This is a list of lists, or an (N, 1) array: flatten it." if "[" in said else ""
        raise InnerError(
            f"reward {spelling} {said} for completion {i}. Return a finite number, {LARGEST:g} at most, or None for "
            f'"cannot say".{flatten}'
        )
    return read.values


# -------------------------------------------------------------------- the environment


def load_environment(config: InnerConfig, files: Files) -> tuple[Callable[[], Any] | None, Any]:
    """Return (the user's class or function that makes an environment, the environment's class), checked.

    (None, None) if the config names none.  The checks make one environment: its constructor may open a server."""
    spelling = config.sampling.environment
    if spelling is None:
        return None, None
    found = load_object("environment", spelling, files)
    path = local_file("environment", spelling, files)
    try:
        with apart(path, path.name):
            instance = found()
    except Exception as error:
        raise InnerError(f"environment {spelling} cannot be built.\n{user_lines(error, path)}") from error
    _check_members(config, type(instance))
    for tool in tool_names(type(instance)):
        _check_schema(spelling, getattr(instance, tool), path)
    return found, type(instance)


def tool_names(environment: type) -> list[str]:
    """Return the tools by TRL's rule: every public method except reset and get_reward."""
    members = inspect.getmembers(environment, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in ("reset", "get_reward")]


def lost_tools(environment: type) -> dict[str, str]:
    """Return public name -> kind of the methods that TRL's rule leaves out, such as a method below @lru_cache."""
    kinds = (classmethod, partialmethod, singledispatchmethod, type(lru_cache(bool)))
    static = {name: inspect.getattr_static(environment, name) for name in dir(environment) if not name.startswith("_")}
    return {name: type(found).__name__.strip("_") for name, found in static.items() if isinstance(found, kinds)}


def _check_members(config: InnerConfig, environment: type) -> None:
    spelling = config.sampling.environment
    if not hasattr(environment, "reset"):
        raise InnerError(f"environment {spelling} has no `reset(self, **row)`. Add it; it gets the prompt's row.")
    for name in ("reset", "get_reward"):
        found = inspect.getattr_static(environment, name, None)
        if found is not None and not inspect.isfunction(getattr(environment, name)):  # TRL does not see it
            raise InnerError(
                f"environment {spelling}: `{name}` is a {type(found).__name__}, and a method is needed. Write "
                f"`def {name}(self{', **row' * (name == 'reset')})`."
            )
    if inspect.iscoroutinefunction(environment.reset):
        raise InnerError(
            f"environment {spelling}: `reset` is async, and nothing awaits it. Write `def reset(self, **row)`; "
            "`asyncio.run(...)` in it may await. (get_reward and tools may be async.)"
        )
    weights = [*config.rewards.weights.values()] or config.trl.get("reward_weights")
    is_scored = config.rewards.lines or config.data.task or config.model == "toolworld"
    if not (any(weights) if weights else is_scored) and not hasattr(environment, "get_reward"):
        raise InnerError(
            f"environment {spelling} has no `get_reward`, and no other reward counts. Add the method, or set "
            'inner.rewards.function = "file.py:function".'
        )
    if config.sdpo.is_used and config.sdpo.context == "hint" and not tool_names(environment):
        raise InnerError(
            f"[inner.sdpo] learns from tool errors, and environment {spelling} has no public method, so no tool can "
            'fail. Add a tool, set inner.sdpo.context = "rollout", or leave [inner.sdpo] out.'
        )


def _check_schema(spelling: str, tool: Any, path: Path) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
        raise InnerError(
            f"environment {spelling}: tool {tool.__name__} has a `yield`, so a call would return a generator and run "
            f"nothing. In {path.name}, return one value, for example the joined parts."
        )
    kinds = {p.kind for p in inspect.signature(tool).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY}:
        raise InnerError(
            f"environment {spelling}: tool {tool.__name__} takes arguments without names (`*` or `/`), and a model "
            f"names each argument. In {path.name}, take a list instead, leave the `/` out, or give the tool's "
            "decorator functools.wraps."
        )
    try:
        get_json_schema(tool)
    except Exception as error:
        raise InnerError(
            f"environment {spelling}: tool {tool.__name__} cannot be described to the model ({error}). In {path.name}, "
            'give every argument a type and a line under "Args:" in the docstring.'
        ) from error
