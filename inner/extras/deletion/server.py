"""Serve a folder of tasks as an OpenEnv environment: a session per client, tools over MCP, one verdict at the end.

    python -m inner.extras.deletion.server TASKS --port 8000       TASKS: what `generate --to TASKS` wrote
                                                                   the server's own environment: openenv==0.10.0
    reset(task=NAME | index=3 | seed=17)  ──▶ the instruction       seed: index modulo the number of tasks;
                                                                   without any of them, the next task
    step(call_tool)     list_files, read_file, write_file, edit_file, run_python: world.py's own
                                  ──▶ the answer, or the error's text; reward None
    step(submit), or the last of --steps calls
                                  ──▶ judge: a sandbox per hidden test ──▶ done, reward 1.0 or 0.0
                                                                           metadata: task, flags (their number)
    GET /feature_deletion/splits, POST …/tasks, …/num_tasks, …/task       OpenEnv's Task API: one split, "train"

The client never sends a task, only its name: a task names folders of this machine that sandboxes mount. Programs and
verdicts of all sessions share --at-once places; the wait for a place does not count against their time limits.

Not promised: to stop a sandbox as soon as its client vanishes (it ends at its limit, or with its verdict); a reward for
calls over /mcp, which do not go through `step`; https, or a password: the address is this machine's own (--host).
"""

import argparse
import asyncio
import logging
import os
import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.deletion.harbor import read_harbor
from inner.extras.deletion.judge import DeletionTask
from inner.extras.deletion.sandbox import require_sandbox
from inner.extras.deletion.world import FeatureDeletion

try:
    import uvicorn  # pyright: ignore[reportMissingImports]
    from fastmcp import FastMCP  # pyright: ignore[reportMissingImports]
    from fastmcp.exceptions import ToolError as Refusal  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.http_server import create_fastapi_app  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.mcp_environment import MCPEnvironment  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.mcp_types import (  # pyright: ignore[reportMissingImports]
        CallToolAction,
        CallToolObservation,
        ToolError,
        ToolErrorType,
    )
    from openenv.core.env_server.types import Observation, State  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as missing:
    raise ImportError(
        f"the server needs openenv ({missing}): `python3 -m venv openenv && openenv/bin/pip install openenv==0.10.0`, "
        "then start it with openenv/bin/python."
    ) from missing

TOOLS = ("list_files", "read_file", "write_file", "edit_file", "run_python")
SPLIT = "train"
UNBEGUN, OVER = "no episode has begun: call reset first", "the episode is over: call reset"
FINISH = "\n\nWhen you have finished, call `submit`."
LONGEST_S = 3600.0  # seconds for a tool; the sandbox has its own, smaller limit, but a call may wait for its turn
# fastmcp's texts; OpenEnv 0.10 itself guesses from "not found" and "argument", which a program's error may contain, too
KINDS = {"Unknown tool": ToolErrorType.TOOL_NOT_FOUND, " for call[": ToolErrorType.INVALID_ARGS}


class Instruction(Observation):
    """The observation of a reset."""

    text: str = ""


class TaskShelf:
    """All tasks, and the index of the next one; all sessions share this object."""

    def __init__(self, tasks: Sequence[DeletionTask]) -> None:
        self.tasks = tasks
        self._next = count()

    def choose(self, *, task: str | None, index: int | None, seed: int | None) -> DeletionTask:
        """Return the task that a reset asks for.   Raises ValueError."""
        if task is not None:
            return self._named(task)
        chosen = next((n for n in (index, seed) if n is not None), None)
        if not isinstance(chosen, int | None) or (index is not None and not 0 <= index < len(self.tasks)):
            raise ValueError(
                f"index must be a number from 0 to {len(self.tasks) - 1}, and seed a whole number; found {chosen!r:.80}"
            )
        return self.tasks[(next(self._next) if chosen is None else chosen) % len(self.tasks)]

    def _named(self, name: str) -> DeletionTask:
        found = [task for task in self.tasks if task.name == name]
        if not found:
            known = ", ".join(task.name for task in self.tasks[:5])
            raise ValueError(f"there is no task {name!r:.80}; there are {len(self.tasks)}: {known}, … (POST …/tasks).")
        return found[0]

    def spec(self, index: int) -> dict[str, Any]:
        return {"id": self.tasks[index].name, "index": index, "prompt": self.tasks[index].instruction}


class DeletionServed(MCPEnvironment):
    """One session.   turns: limits programs and verdicts of all sessions.   steps: limit of calls per episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, shelf: TaskShelf, turns: AbstractContextManager[Any], steps: int) -> None:
        self._shelf, self._turns, self._steps = shelf, turns, steps
        self._world = FeatureDeletion()
        self._task: DeletionTask | None = None
        self._over = False
        self._state = State(step_count=0)
        super().__init__(self._tools())

    def _tools(self) -> Any:
        mcp = FastMCP("feature-deletion")
        for name in TOOLS:
            tool = getattr(self._world, name)
            mcp.tool(self._in_turn(tool, self._turns if name == "run_python" else nullcontext()))

        @mcp.tool
        def submit() -> str:
            """Say that the work is done. The hidden tests decide, and the episode ends."""
            return "The hidden tests decide."

        return mcp

    def _in_turn(self, tool: Callable[..., str], turns: AbstractContextManager[Any]) -> Callable[..., str]:
        @wraps(tool)
        def called(*args: Any, **given: Any) -> str:
            if self._task is None:
                raise Refusal(UNBEGUN)
            try:
                with turns:
                    return tool(*args, **given)
            except ValueError as error:  # fastmcp logs any other error with a traceback
                raise Refusal(str(error)) from None

        return called

    @property
    def state(self) -> Any:
        return self._state

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task: str | None = None,
        index: int | None = None,
        **_: Any,
    ) -> Any:
        """Begin an episode.   Raises ValueError for a task that is not here."""
        self._task = self._shelf.choose(task=task, index=index, seed=seed)
        self._world.reset(self._task.dump())
        self._state, self._over = State(episode_id=episode_id, step_count=0), False
        return Instruction(text=self._task.instruction + FINISH, metadata={"task": self._task.name})

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        return Observation(metadata={"error": "only tools here", "error_kind": "invalid_args"})

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Any:
        """Answer a call; sessions over a WebSocket use this method."""
        if not isinstance(action, CallToolAction):
            return await super().step_async(action, timeout_s=timeout_s, **given)
        if self._over or self._task is None:
            error = ToolError(error_type=ToolErrorType.EXECUTION_ERROR, message=OVER if self._over else UNBEGUN)
            return CallToolObservation(tool_name=action.tool_name, error=error, done=self._over)
        self._state.step_count += 1
        seen = await super().step_async(action, timeout_s=timeout_s or LONGEST_S, **given)
        _name_error(seen)
        self._over = self._state.step_count >= self._steps or (action.tool_name == "submit" and seen.error is None)
        if self._over:
            seen.done, seen.reward = True, await asyncio.to_thread(self._decide)
            verdict = self._world._verdict
            flags = 0 if verdict is None else len(verdict.flags)
            seen.metadata = {**seen.metadata, "task": self._task.name, "flags": flags}
        return seen

    def _decide(self) -> float:
        with self._turns:
            return self._world.get_reward()

    # OpenEnv's Task API; the server asks a session that has no episode

    def list_splits(self) -> list[str]:
        return [SPLIT]

    def num_tasks(self, split: str) -> int:
        return len(self._shelf.tasks) if split == SPLIT else 0

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        if not 0 <= index < self.num_tasks(split):
            raise IndexError(index)
        return self._shelf.spec(index)

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        return [self._shelf.spec(index) for index in range(self.num_tasks(split))[start:stop]]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)


def _name_error(seen: Any) -> None:
    """Set the error kind of a failed call: an unknown tool, wrong arguments, or an error of the tool."""
    if seen.error is not None:
        first = seen.error.message.partition("\n")[0]
        kinds = [kind for words, kind in KINDS.items() if words in first]
        seen.error.error_type = kinds[0] if kinds else ToolErrorType.EXECUTION_ERROR


def read_tasks(folder: Path, packages: str = "") -> list[DeletionTask]:
    """Read every task of a folder, in the order of their names.   Raises InnerError."""
    found = [read_harbor(path.parent.parent, packages) for path in sorted(folder.glob("*/tests/cases.json"))]
    if not found:
        raise InnerError(
            f"there is no task in {folder}. Make some with `python -m inner.extras.deletion.generate --repos REPOS "
            f"--to {shlex.quote(str(folder))}`."
        )
    for task in found:
        if task.around.beside and not packages:
            needed = " ".join(task.around.requires)
            raise InnerError(
                f"{task.name} needs packages. Run `pip install --no-deps --target packages {needed}`, and start the "
                "server with --packages packages."
            )
    return found


def make_app(tasks: Sequence[DeletionTask], *, sessions: int, steps: int, at_once: int) -> Any:
    """Return the ASGI application."""
    served = partial(DeletionServed, TaskShelf(tasks), threading.BoundedSemaphore(at_once), steps)
    return create_fastapi_app(
        served, CallToolAction, CallToolObservation, max_concurrent_envs=sessions, env_name="feature_deletion",
        reset_observation_cls=Instruction,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve feature-deletion tasks as an OpenEnv environment.")
    parser.add_argument("tasks", type=Path, help="a folder that `generate --to` has filled")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default="127.0.0.1", help="the server asks for no password")
    parser.add_argument("--sessions", type=int, default=64, help="rollouts at once, of all replicas together")
    parser.add_argument("--steps", type=int, default=50, help="calls of an episode; the last one ends it")
    turns = max(1, (os.cpu_count() or 2) // 2)
    parser.add_argument("--at-once", type=int, default=turns, help="programs and verdicts at once, on all sessions")
    parser.add_argument("--packages", type=Path, help="the folder of packages that tasks from a repository need")
    asked = parser.parse_args()
    require_sandbox()
    logging.getLogger("fastmcp").setLevel(logging.CRITICAL)  # fastmcp logs each failed call; the client has the answer
    tasks = read_tasks(asked.tasks, str(asked.packages.resolve()) if asked.packages else "")
    app = make_app(tasks, sessions=asked.sessions, steps=asked.steps, at_once=asked.at_once)
    print(f"{len(tasks)} tasks at http://{asked.host}:{asked.port}", flush=True)
    uvicorn.run(app, host=asked.host, port=asked.port, log_level="warning", timeout_graceful_shutdown=5)


if __name__ == "__main__":
    try:
        main()
    except InnerError as error:
        raise SystemExit(str(error)) from None
