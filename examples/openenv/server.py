"""An OpenEnv server with MCP tools: error sites in the metadata, a history for replay, a reward that comes at the end.

    python3 -m venv openenv && openenv/bin/pip install openenv==0.10.0     its pins exclude trl's
    openenv/bin/python examples/openenv/server.py --port 8000
    OPENENV_URL=http://127.0.0.1:8000 diloco train examples/openenv/run.toml --run runs/openenv

    reset(a, b)                     "What is 3 + 4?", the columns of the prompt's row
    add, divide                     divide fails for b = 0
    answer(value)                   ends the episode: 1 if right, 0.1 less for each call that failed, 0 if wrong

    metadata of a failed call       error_kind, hint_template_key, t      docs/internals/rfc-openenv-error-sites.md
    State.history                   [{t, action, observation}]            docs/internals/rfc-openenv-state-replay.md
    reward                          0.0 until the episode is done         openenv's TrajectoryRubric

For your own server, change `tools` and `score_trajectory`. typed_server.py is a server without MCP.

Not promised: a task worth learning; rewards and history for tools that are called over /mcp, without `step`.
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
from openenv.core.rubrics import ExponentialDiscountingTrajectoryRubric
from pydantic import Field

HINTS = {"invalid_args": "bad_arguments", "tool_not_found": "unknown_tool"}  # error_kind -> hint_template_key


class Asked(Observation):
    text: str = ""


class Remembered(State):
    history: list[dict[str, Any]] = Field(default_factory=list)


class RightAnswer(ExponentialDiscountingTrajectoryRubric):
    """0.0 until an observation is done, then the score of the whole episode, once."""

    expected: int = 0

    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        last, _ = trajectory[-1]
        failed = sum("error_kind" in seen.metadata for _, seen in trajectory)
        return max(0.0, 1.0 - 0.1 * failed) if last.arguments.get("value") == self.expected else 0.0


def tools() -> FastMCP:
    mcp = FastMCP("arithmetic")

    @mcp.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @mcp.tool
    def divide(a: int, b: int) -> int:
        """Divide a number by another, rounding down."""
        return a // b

    @mcp.tool
    def answer(value: int) -> str:
        """Say the result. This ends the task."""
        return "thank you"

    return mcp


class Arithmetic(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True  # if this is False, a second rollout is refused

    def __init__(self) -> None:
        super().__init__(tools())
        self.rubric = RightAnswer(gamma=1.0)
        self._state = Remembered(episode_id=str(uuid.uuid4()))
        self._over = False

    @property
    def state(self) -> Remembered:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, a: int = 0, b: int = 0, **_: Any) -> Asked:
        self._reset_rubric()
        self.rubric.expected = a + b
        self._state, self._over = Remembered(episode_id=episode_id or str(uuid.uuid4())), False
        return self._remember(None, Asked(text=f"What is {a} + {b}?"))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        return Observation(metadata={"error": "only tools here", "error_kind": "invalid_args"})

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        """Take a step; WebSocket sessions call this."""
        if self._over:  # else a rubric would give the episode's score again
            return Observation(done=True, metadata={"error": "the episode is over", "error_kind": "refused"})
        seen = await super().step_async(action, timeout_s=timeout_s, **given)
        if not isinstance(seen, CallToolObservation):
            return seen
        self._state.step_count += 1
        if kind := error_kind(seen):
            hint = {"hint_template_key": HINTS[kind]} if kind in HINTS else {}
            seen.metadata = {**seen.metadata, "error_kind": kind, **hint, "t": self._state.step_count}
        seen.done = self._over = action.tool_name == "answer" and kind is None
        seen.reward = self._apply_rubric(action, seen)
        return self._remember(action, seen)

    def _remember(self, action: Any, seen: Any) -> Any:
        said = None if action is None else action.model_dump(mode="json")
        entry = {"t": self._state.step_count, "action": said, "observation": seen.model_dump(mode="json")}
        self._state.history.append(entry)
        return seen


def error_kind(seen: CallToolObservation) -> str | None:
    """Return the kind, which OpenEnv 0.10 guesses wrongly: "file not found" is tool_not_found there."""
    if seen.error is None:
        return None
    if " for call[" in seen.error.message.partition("\n")[0]:  # fastmcp: the arguments do not fit
        return "invalid_args"
    if seen.error.message.startswith("Unknown tool"):
        return "tool_not_found"
    said = seen.error.error_type.value
    return "execution_error" if said in ("tool_not_found", "invalid_args") else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=64, help="rollouts at once, of all replicas together")
    given = parser.parse_args()
    app = create_fastapi_app(
        Arithmetic, CallToolAction, CallToolObservation, max_concurrent_envs=given.sessions, state_cls=Remembered
    )
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
