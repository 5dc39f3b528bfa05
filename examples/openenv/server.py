"""An OpenEnv server on this machine: arithmetic tools, error sites in the metadata, and a history for replay.

    pip install openenv==0.10.0            in an environment of its own (its pins do not go with trl's)
    python examples/openenv/server.py --port 8000

    reset(a, b)   "add 3 and 4"      the columns of the prompt's row
    add(a, b)     3 + 4              reward 1 for the asked numbers, and the episode is done
    divide(a, b)                     fails for b = 0

    metadata of a failed call        error_kind, hint_template_key, t       docs/internals/rfc-openenv-error-sites.md
    State.history                    [{t, action, observation}]             docs/internals/rfc-openenv-state-replay.md

Not promised: a task worth learning.
"""

import argparse
import uuid
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from pydantic import Field

HINTS = {"invalid_args": "bad_arguments", "tool_not_found": "unknown_tool"}


class Asked(Observation):
    text: str = ""


class Remembered(State):
    history: list[dict[str, Any]] = Field(default_factory=list)


def tools() -> FastMCP:
    mcp = FastMCP("arithmetic")

    @mcp.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @mcp.tool
    def divide(a: int, b: int) -> int:
        """Divide a number by another."""
        return a // b

    return mcp


class Arithmetic(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = Remembered(episode_id=str(uuid.uuid4()))
        self._asked: tuple[int, int] = (0, 0)
        super().__init__(tools())

    @property
    def state(self) -> Remembered:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, a: int = 0, b: int = 0, **_: Any) -> Asked:
        self._state, self._asked = Remembered(episode_id=episode_id or str(uuid.uuid4())), (a, b)
        return self._remember(None, Asked(text=f"add {a} and {b}", reward=0.0))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(metadata={"error": "unknown action", "error_kind": "invalid_args"})

    def step(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        return self._judge(action, super().step(action, timeout_s=timeout_s, **given))

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        return self._judge(action, await super().step_async(action, timeout_s=timeout_s, **given))

    def _judge(self, action: Any, seen: Observation) -> Observation:
        if not isinstance(seen, CallToolObservation):
            return seen
        self._state.step_count += 1
        failed = seen.error is not None or getattr(seen.result, "is_error", False)
        if failed:
            kind = seen.error.error_type.value if seen.error else "execution_error"
            hint = {"hint_template_key": HINTS[kind]} if kind in HINTS else {}
            seen.metadata = {**seen.metadata, "error_kind": kind, **hint, "t": self._state.step_count}
        given = action.arguments
        seen.done = not failed and action.tool_name == "add" and (given.get("a"), given.get("b")) == self._asked
        seen.reward = 1.0 if seen.done else 0.0
        return self._remember(action, seen)

    def _remember(self, action: Any, seen: Any) -> Any:
        said = None if action is None else action.model_dump(mode="json")
        entry = {"t": self._state.step_count, "action": said, "observation": seen.model_dump(mode="json")}
        self._state.history.append(entry)
        return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=64, help="rollouts at once")
    given = parser.parse_args()
    app = create_fastapi_app(
        Arithmetic, CallToolAction, CallToolObservation, max_concurrent_envs=given.sessions, state_cls=Remembered
    )
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
