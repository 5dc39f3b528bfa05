"""Makes rows from environments of verifiers before 0.3, which a package's `load_environment` returns.

    load_environment(**options) ─▶ its dataset ─▶ row: prompt, and entry: the dataset's row as JSON
    an agent plays each row: run_rollout, with its tools, turns and rubric
                                                                      (inner/extras/agents/verifiers_environments.py)

An error names environments that need a sandbox of Prime Intellect without its key here, or whose rubric compares the
rollouts of a group.

Not promised: images; environments that keep a state between rollouts.
"""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from inner.errors import InnerError
from inner.tasks.spec import ACTS, TaskSpec

BOXED = ("SandboxEnv", "CliAgentEnv", "BrowserEnv")  # classes of verifiers' environments that rent a sandbox
KEY = "PRIME_API_KEY"


def make_rows(spec: TaskSpec) -> Iterator[dict[str, Any]]:
    """Yield the environment's rows, in the seed's order.   Raises InnerError."""
    environment = open_environment(spec)
    _refuse(spec, environment)
    try:
        rows = _dataset_of(environment).shuffle(seed=spec.seed)
    except Exception as error:
        raise InnerError(f"environment {spec.name} gives no dataset: {_words(error)}. Choose another one.") from error
    for row in rows:
        yield {"prompt": _messages_of(spec, row["prompt"]), "entry": json.dumps(row, default=str), ACTS: True}


def _dataset_of(environment: Any) -> Any:
    """Return the training rows, or the rows for evaluation if the environment has no others."""
    try:
        return environment.get_dataset()
    except ValueError:  # "dataset is not set"
        return environment.get_eval_dataset()


def open_environment(spec: TaskSpec) -> Any:
    """Return the environment. Call this in the main thread: verifiers sets signal handlers; this restores them."""
    import verifiers  # pyright: ignore[reportMissingImports]

    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        return verifiers.load_environment(spec.name, **spec.options)
    except Exception as error:
        raise InnerError(
            f"environment {spec.name} cannot be loaded with the options {dict(spec.options)}: {_words(error)}. Correct "
            "[inner.data.task_options], or install what it needs."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for each, handler in handlers.items():
                signal.signal(each, handler)


def _refuse(spec: TaskSpec, environment: Any) -> None:
    names = [base.__name__ for base in type(environment).__mro__]
    if boxed := [name for name in BOXED if name in names and KEY not in os.environ]:
        raise InnerError(
            f"environment {spec.name} ({names[0]}) is a {boxed[0]}, which rents a sandbox of Prime Intellect, and "
            f"{KEY} is not set. Set it here and on the replicas, or choose another environment."
        )
    if getattr(environment, "requires_group_rollouts", False):
        raise InnerError(
            f"environment {spec.name}: its rubric compares the rollouts of a group, and here each rollout is scored "
            "alone. Choose another one, or write its reward as inner.rewards.function."
        )


def _messages_of(spec: TaskSpec, prompt: Any) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise InnerError(f"environment {spec.name}: a prompt is not text ({str(prompt)[:80]}). Choose another one.")
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _words(error: BaseException) -> str:
    """Return the error with its first cause: verifiers does not name the module that an environment lacks."""
    first: BaseException = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    cause = "" if first is error else f" ({type(first).__name__}: {' '.join(str(first).split())[:200]})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.: ')}{cause}"
