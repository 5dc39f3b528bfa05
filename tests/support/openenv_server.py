"""Real OpenEnv servers for tests, several in one process; runs where `openenv` is installed, and needs nothing of ours.

python tests/support/openenv_server.py GOOD BAD world=PORT odd=PORT one=PORT idle=PORT waits=PORT

    world   20 sessions      GOOD(a, b) = a + b      BAD(a, b) always fails: "BAD is not allowed today"
    one     the same, one session
    idle    the same, sessions that are let go after a second without a message
    own     as world, with a subclass of CallToolAction, which refuses the tool `refused` by a ValueError
    waits   as world, 64 sessions; each call takes a second, and `most` tells how many were in it at once
    odd     tools with names and schemas of every kind

    reset(mode=…)   delayed   0.0 until the first success, which is the episode's end: 0.5, from a TrajectoryRubric
                    none      the same, None instead of 0.0
                    steps     0.5 for each success, no end          total   the same as a running total
                    never     no reward, no end                     broken  reset raises
                    asks      the question is in the metadata       over    the episode ends at its reset
    metadata of a failure: error_kind, hint_template_key; State.history for replay
"""

import asyncio
import sys
import time
from typing import Any, Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import ConcurrencyConfig, Observation, State
from openenv.core.rubrics import ExponentialDiscountingTrajectoryRubric
from pydantic import BaseModel, Field, field_validator

GOOD, BAD = sys.argv[1:3]
PORTS = {name: int(port) for name, port in (given.split("=") for given in sys.argv[3:])}


class Remembered(State):
    history: list[dict[str, Any]] = Field(default_factory=list)


class Point(BaseModel):
    x: int
    y: float = 0.5


class HalfAtTheEnd(ExponentialDiscountingTrajectoryRubric):
    def score_trajectory(self, trajectory: list[tuple[Any, Any]]) -> float:
        return 0.5


def world_tools() -> FastMCP:
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


def odd_tools() -> FastMCP:
    mcp = FastMCP("odd")

    @mcp.tool
    def schema(
        point: Point,
        colour: Literal["red", "blue"],
        perhaps: int | None = None,
        many: list[Point] = [],  # noqa: B006
        counts: dict[str, int] = {},  # noqa: B006
        either: int | str = 3,
        tool: str = "t",
    ) -> dict[str, Any]:
        """Odd things.

        Args:
            point: where
            colour: of it

        Returns:
            all of it
        """
        return {"point": point.x + point.y, "colour": colour, "perhaps": perhaps, "counts": counts, "tool": tool}

    @mcp.tool
    def echo(text: str) -> str:
        """The same text."""
        return text

    @mcp.tool
    def big(size: int) -> str:
        """Much text."""
        return "x" * size

    @mcp.tool
    def slow(seconds: float) -> str:
        """Takes its time."""
        time.sleep(seconds)
        return "awake"

    @mcp.tool
    def missing() -> str:
        """Reads a file."""
        raise FileNotFoundError("config.txt not found")

    @mcp.tool
    def nothing() -> None:
        """Does nothing."""

    @mcp.tool(name="get_reward")
    def reward() -> str:
        """A name that TRL keeps for itself."""
        return "not a reward"

    @mcp.tool(name="look-at.it")
    def look(x: int) -> list[int]:
        """A dash and a dot."""
        return [x]

    return mcp


class World(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    make_tools = staticmethod(world_tools)

    def __init__(self) -> None:
        super().__init__(self.make_tools())
        self.rubric = HalfAtTheEnd()
        self._state = Remembered()
        self._mode, self._total = "steps", 0.0

    @property
    def state(self) -> Remembered:
        return self._state

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, mode: str = "delayed", **given: Any
    ) -> Observation:
        if mode == "broken":
            raise RuntimeError("no such level")
        self._reset_rubric()
        self._state = Remembered(episode_id=str(given))
        self._mode, self._total = mode, 0.0
        question = {"question": "How much?"} if mode == "asks" else {}
        return self._remember(None, Observation(metadata=question, reward=0.25, done=mode == "over"))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("only tools here")

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        seen = await super().step_async(action, timeout_s=1.0, **given)
        if not isinstance(seen, CallToolObservation):
            return seen
        if seen.error is not None:
            seen.metadata = {"error_kind": seen.error.error_type.value, "hint_template_key": "refused"}
        self._state.step_count += 1
        self._reward(action, seen, success=seen.error is None)
        return self._remember(action, seen)

    def _reward(self, action: Any, seen: CallToolObservation, *, success: bool) -> None:
        self._total += 0.5 * success
        if self._mode in ("delayed", "none"):
            seen.done = success
            score = self._apply_rubric(action, seen)
            seen.reward = score if success or self._mode == "delayed" else None
        elif self._mode != "never":
            seen.reward = self._total if self._mode == "total" else 0.5 * success

    def _remember(self, action: Any, seen: Any) -> Any:
        said = None if action is None else action.model_dump(mode="json")
        entry = {"t": self._state.step_count, "action": said, "observation": seen.model_dump(mode="json")}
        self._state.history.append(entry)
        return seen


class OwnCall(CallToolAction):
    @field_validator("tool_name")
    @classmethod
    def check_name(cls, name: str) -> str:
        if name == "refused":
            raise ValueError("refused")
        return name


class Waits(World):
    at_once = most = 0

    async def step_async(self, action: Any, timeout_s: float | None = None, **given: Any) -> Observation:
        if not isinstance(action, CallToolAction):  # tools/list
            return await super().step_async(action, timeout_s=timeout_s, **given)
        Waits.at_once += 1
        Waits.most = max(Waits.most, Waits.at_once)
        await asyncio.sleep(1.0)
        seen = await super().step_async(action, timeout_s=timeout_s, **given)
        Waits.at_once -= 1
        self._state.episode_id = str(Waits.most)
        return seen


class Odd(World):
    make_tools = staticmethod(odd_tools)


LIMITS = {
    "world": (World, ConcurrencyConfig(max_concurrent_envs=20)),
    "one": (World, ConcurrencyConfig(max_concurrent_envs=1)),
    "idle": (World, ConcurrencyConfig(max_concurrent_envs=2, session_timeout=1.0)),
    "own": (World, ConcurrencyConfig(max_concurrent_envs=20)),
    "waits": (Waits, ConcurrencyConfig(max_concurrent_envs=65)),
    "odd": (Odd, ConcurrencyConfig(max_concurrent_envs=4)),
}


async def serve() -> None:
    servers = []
    for name, port in PORTS.items():
        environment, limit = LIMITS[name]
        action = OwnCall if name == "own" else CallToolAction
        app = create_fastapi_app(
            environment, action, CallToolObservation, concurrency_config=limit, state_cls=Remembered
        )
        servers.append(uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")))
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    asyncio.run(serve())
