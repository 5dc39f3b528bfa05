"""A real OpenEnv server for tests; runs where `openenv` is installed, and needs nothing of ours.

python tests/openenv_server.py PORT SESSIONS GOOD BAD

    GOOD(a, b)   a + b, reward 0.5              BAD(a, b)   always fails: "BAD is not allowed today"
    metadata of a failure: error_kind, hint_template_key; State.history for replay
"""

import sys
import uuid
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Observation, State
from pydantic import Field

PORT, SESSIONS, GOOD, BAD = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]


class Remembered(State):
    history: list[dict[str, Any]] = Field(default_factory=list)


def tools() -> FastMCP:
    mcp = FastMCP("world")

    @mcp.tool(name=GOOD)
    def good(a: int, b: int) -> int:
        """Compute."""
        return a + b

    @mcp.tool(name=BAD)
    def bad(a: int, b: int) -> int:
        """Compute."""
        raise ValueError(f"{BAD} is not allowed today")

    return mcp


class World(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = Remembered(episode_id=str(uuid.uuid4()))
        super().__init__(tools())

    @property
    def state(self) -> Remembered:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Observation:
        self._state = Remembered(episode_id=str(given))
        return self._remember(None, Observation(reward=0.0))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools here")

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=timeout_s, **given)
        if not isinstance(seen, CallToolObservation):
            return seen
        failed = seen.error is not None or getattr(seen.result, "is_error", False)
        if failed:
            kind = seen.error.error_type.value if seen.error else "execution_error"
            seen.metadata = {**seen.metadata, "error_kind": kind, "hint_template_key": "refused"}
        seen.reward = 0.0 if failed else 0.5
        self._state.step_count += 1
        return self._remember(action, seen)

    def _remember(self, action: Any, seen: Any) -> Any:
        said = None if action is None else action.model_dump(mode="json")
        entry = {"t": self._state.step_count, "action": said, "observation": seen.model_dump(mode="json")}
        self._state.history.append(entry)
        return seen


if __name__ == "__main__":
    app = create_fastapi_app(
        World, CallToolAction, CallToolObservation, max_concurrent_envs=SESSIONS, state_cls=Remembered
    )
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning")
