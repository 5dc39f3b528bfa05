"""Makes rows from tasksets of verifiers (verifiers.v1), and scores them, if a reply alone is enough for scoring.

    tasks with tools of a server, `setup` or `finalize`, or rewards in a runtime   ──▶ an agent plays them, in processes
                                                           of this machine (inner/extras/agents/verifiers_tasks.py)

    Taskset.__iter__ ─▶ task ── prompt, system prompt ──▶ row          entry: the task's data as JSON
    reply ─▶ a Trace of prompt and reply ─▶ await task.score(trace) ─▶ Σ weight · reward         as in `vf-replay`

An error names tasks that run in neither way: tasks that need a container or an image, skills, no reward or a deferred
reward, another harness, or several agents.

Not promised: data of a trace beyond its messages (tokens, timing, why the model stopped), which a reward may read.
"""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from typing import Any

from inner.errors import InnerError
from inner.tasks.spec import ACTS, TaskSpec

MOST = 100_000  # tasks to take of an infinite taskset, which may repeat tasks forever
NEXT = (
    "Choose a taskset that runs in processes of this machine, or run this one with prime-rl or `vf-eval`, which have "
    "containers."
)


def make_rows(spec: TaskSpec) -> Iterator[dict[str, Any]]:
    """Yield all tasks as rows, in the seed's order.   Raises InnerError."""
    taskset = _open_taskset(spec)
    _refuse_harness(spec)
    environment, _, _ = seat_of(spec)
    plays = has_own_harness(spec) or not _is_plain(environment)
    tasks = taskset.shuffle(spec.seed) if taskset.bounded else taskset.take(MOST)
    try:
        for task in tasks:
            if fault := _find_fault(taskset, task, environment):
                raise InnerError(f"taskset {spec.name}: {fault}. {NEXT}")
            acts = plays or _acts(taskset, task)
            prompt = _messages_of(spec, task.data, acts)
            yield {"prompt": prompt, "entry": _entry_of(spec, task), ACTS: acts}
    except InnerError:
        raise
    except Exception as error:
        raise InnerError(
            f"taskset {spec.name} cannot be loaded: {_words(error)}. Correct its options, or choose another taskset."
        ) from error


def open_scorer(spec: TaskSpec) -> Callable[[Sequence[str], Sequence[str]], list[float]]:
    """Return a function (replies, entries) -> one score each, which does not catch errors of a reward or a judge."""
    config = config_of(spec)  # loads no rows: files that `load` reads may be on another machine
    _loaders().file_module.cache_clear()  # the keys are relative paths, and a scorer's trial has another folder
    task_class = task_class_of(spec)

    async def score_all(replies: Sequence[str], entries: Sequence[str]) -> list[float]:
        data = [task_class.data_type().model_validate_json(entry) for entry in entries]
        scorings = [_score_one(task_class(d, config.task), reply) for d, reply in zip(data, replies, strict=True)]
        found = await asyncio.gather(*scorings, return_exceptions=True)  # no task is left in the loop
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return [score for score in found if not isinstance(score, BaseException)]

    return lambda replies, entries: _run(score_all(replies, entries))


def _run(scoring: Coroutine[Any, Any, list[float]]) -> list[float]:
    """Run the coroutine in this thread, or in another thread if an event loop is already running (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run_here(scoring)
    return _second_thread().submit(_run_here, scoring).result()


def _run_here(scoring: Coroutine[Any, Any, list[float]]) -> list[float]:
    """Run the coroutine in one loop per thread, kept between calls: rewards may share a client, and its connections
    work only in the loop that opened them."""
    runner = _runner(threading.get_ident())
    try:
        return runner.run(scoring)
    except Exception:
        raise
    except BaseException:  # an interrupt: tasks of this call are left in the loop
        _runner.cache_clear()
        runner.close()
        raise


@cache
def _runner(thread: int) -> asyncio.Runner:
    return asyncio.Runner()


@cache
def _second_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


async def _score_one(task: Any, reply: str) -> float:
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import AssistantMessage  # pyright: ignore[reportMissingImports]

    asked = _given_messages(task.data)
    nodes = [MessageNode(message=m, parent=i - 1 if i else None) for i, m in enumerate(asked)]
    said = AssistantMessage(content=reply or None)  # like `vf-eval`: None for an empty reply
    nodes.append(MessageNode(message=said, parent=len(nodes) - 1 if nodes else None, sampled=True))
    trace: Any = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()), state=state_cls(type(task))(), nodes=nodes, is_completed=True, ok=True,
        stop_condition="agent_completed",
    )  # fmt: skip
    await task.score(trace)
    return trace.reward


# -------------------------------------------------------------------- opening one


def _loaders() -> Any:
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    return loaders


def _open_taskset(spec: TaskSpec) -> Any:
    config = config_of(spec)
    try:
        return _loaders().load_taskset(config)
    except Exception as error:
        raise _refused_options(spec, error) from error


def config_of(spec: TaskSpec) -> Any:
    loaders = _loaders()
    try:
        config_type = loaders.taskset_config_type(spec.name)
    except ImportError as error:
        raise InnerError(
            f"the taskset package {spec.name!r} cannot be imported: {str(error).rstrip('.')}. "
            "Install the missing module."
        ) from error
    except (AttributeError, TypeError, ValueError) as error:
        raise InnerError(
            f"verifiers cannot use {spec.name!r} as a taskset: {str(error).rstrip('.')}. Name another one; a package "
            "with `load_environment` needs verifiers before 0.3: `pip install 'verifiers>=0.1.10,<0.3'`."
        ) from error
    own = sorted(set(config_type.model_fields) - {"id"})
    for name in spec.options:
        if name not in own:
            near = get_close_matches(name, own, n=1)
            guess = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(own)}"
            raise InnerError(f"taskset {spec.name} has no option {name!r}; {guess}")
    try:
        return config_type.model_validate({**deepcopy(dict(spec.options)), "id": spec.name})  # it changes its input
    except Exception as error:
        raise _refused_options(spec, error) from error


def _refused_options(spec: TaskSpec, error: Exception) -> InnerError:
    return InnerError(
        f"taskset {spec.name} refuses these options: {_words(error)}. They are {dict(spec.options)}. "
        "Correct [inner.data.task_options]."
    )


def task_class_of(spec: TaskSpec) -> Any:
    return _loaders().taskset_class(spec.name).task_type()


def seat_of(spec: TaskSpec) -> tuple[Any, Any, str]:
    """Return the taskset's environment, its config class and the name of its only seat.   Raises InnerError."""
    from verifiers.v1 import Env, EnvConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.generic import concrete_type  # pyright: ignore[reportMissingImports]

    environment = _loaders().environment_class(spec.name)
    config_class = concrete_type(environment, EnvConfig, origin=Env) or EnvConfig
    seats = agent_config_fields(config_class())
    if len(seats) != 1:
        raise InnerError(
            f"taskset {spec.name} has the agents {', '.join(seats)} in its environment {environment.__name__}, and one "
            f"model plays one agent here. {NEXT}"
        )
    return environment, config_class, next(iter(seats))


def has_own_harness(spec: TaskSpec) -> bool:
    return _loaders().default_harness_id(spec.name) == spec.name


def _refuse_harness(spec: TaskSpec) -> None:
    """Raise InnerError for a harness of the taskset's own that needs a container or runs the model's code."""
    if not has_own_harness(spec):
        return
    harness = _loaders().harness_class(spec.name)
    if harness.NEEDS_CONTAINER or harness.EXECUTES_CODE:
        why = "needs a container" if harness.NEEDS_CONTAINER else "runs the model's code, without a container"
        raise InnerError(f"taskset {spec.name} brings its own harness, {harness.__name__}, which {why}. {NEXT}")


def _find_fault(taskset: Any, task: Any, environment: Any) -> str:
    """Return why this task runs neither from a reply nor in processes of this machine; "" if it does."""
    name, cls = f"task {task.data.name or task.data.idx} ({type(task).__name__})", type(task)
    if cls.NEEDS_CONTAINER or task.data.image:
        return f"{name} needs a container{f' of the image {task.data.image}' if task.data.image else ''}"
    if cls.stage_verifier is not _task_base().stage_verifier:
        return f"{name} has a `stage_verifier`, which works in a container"
    if task.data.skills:
        return f"{name} has skills, which need a harness that finds them"
    if task.scoring_deferred:
        return f"{name} defers its scoring, so that its rewards would be 0"
    if not _rewards_of(task) and _is_plain(environment):  # another one may give rewards at its end
        return f"{name} has no reward"
    if cls is not type(taskset).task_type():
        return f"{name} is not a {type(taskset).task_type().__name__}, which the taskset declares"
    return ""


def _acts(taskset: Any, task: Any) -> bool:
    """Whether the task needs more than a reply: a runtime, tools, or hooks between turns."""
    from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

    cls = type(task)
    own = any(getattr(cls, hook) is not getattr(_task_base(), hook) for hook in ("setup", "finalize"))
    tools = cls.toolsets(task.config) or type(taskset).toolsets(taskset.config)
    hooks = task.hooks("stop") or discover_decorated(task, "intercept")
    return bool(own or tools or hooks or task.data.artifacts or any(map(_asks_for_runtime, _rewards_of(task))))


def _is_plain(environment: Any) -> bool:
    """Whether an environment only runs one agent once, and adds nothing to that."""
    from verifiers.v1 import SingleAgentEnv  # pyright: ignore[reportMissingImports]

    return environment is SingleAgentEnv


def _task_base() -> Any:
    from verifiers.v1 import Task  # pyright: ignore[reportMissingImports]

    return Task


def _rewards_of(task: Any) -> list[Any]:
    return [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]


def _asks_for_runtime(function: Any) -> bool:
    """Whether a function needs a runtime, by verifiers' rule: it has a parameter `runtime` without a default."""
    found = inspect.signature(function).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty


# -------------------------------------------------------------------- messages


def _entry_of(spec: TaskSpec, task: Any) -> str:
    """Return the task's data as JSON.   Raises InnerError if the scorer would read other data from it."""
    entry, declared = task.data.model_dump_json(), type(task).data_type()
    try:
        read = declared.model_validate_json(entry)
    except ValueError as error:
        raise _changed_by_json(spec, task, _words(error)) from error
    if read == task.data:
        return entry
    if type(read) is not type(task.data):
        own, cls = type(task.data).__name__, type(task).__name__
        raise InnerError(
            f"taskset {spec.name}: its tasks have the data {own}, and the class {cls} declares {declared.__name__}, so "
            f"a reward would miss fields. Declare them: class {cls}(vf.Task[{own}])."
        )
    was, now = vars(task.data), vars(read)
    raise _changed_by_json(spec, task, *(f"{n} = {was[n]!r:.60} is {now[n]!r:.60}" for n in was if was[n] != now[n]))


def _changed_by_json(spec: TaskSpec, task: Any, *changes: str) -> InnerError:
    return InnerError(
        f"taskset {spec.name}: the run stores task {task.data.name or task.data.idx} as JSON, and reads it back "
        f"changed: {'; '.join(changes)}. Give that field of {type(task.data).__name__} its exact type, such as "
        "tuple[int, int], or store a value that JSON has."
    )


def _given_messages(data: Any) -> list[Any]:
    from verifiers.v1.types import SystemMessage, UserMessage  # pyright: ignore[reportMissingImports]

    first = [SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    asked = [UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt or [])
    return [*first, *asked]


def _messages_of(spec: TaskSpec, data: Any, acts: bool) -> list[dict[str, str]]:
    """Return the prompt as messages.   acts: an agent plays it; without a prompt, its environment speaks first."""
    given = _given_messages(data)
    if not data.prompt and acts:
        return [{"role": "user", "content": f"task {data.name or data.idx}"}]
    if not data.prompt or any(not isinstance(m.content, str) or getattr(m, "tool_calls", None) for m in given):
        raise InnerError(
            f"taskset {spec.name}: the prompt of task {data.name or data.idx} is not text ({str(data.prompt)[:80]}). "
            "Choose a taskset whose prompts are texts."
        )
    return [{"role": m.role, "content": m.content} for m in given]


def _words(error: Exception) -> str:
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
