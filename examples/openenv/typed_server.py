"""An OpenEnv server without MCP: its own action and observation. Guess a number; the reward comes at the end.

    openenv/bin/python examples/openenv/typed_server.py --port 8000        an environment with openenv==0.10.0
    typed_environment.py is its client; server.py has MCP tools

    reset(secret)      "I think of a number from 0 to 20."
    {"value": 7}       higher, lower; 6 guesses; an error site for a value that is out of range
    reward             None until the episode is done, then 1 / guesses, or 0

Not promised: a task worth learning.
"""

import argparse
import uuid
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

HIGHEST, GUESSES = 20, 6


class Guess(Action):
    value: int


class Said(Observation):
    """Fields that are not declared are refused: facts for the trainer go into `metadata`."""

    text: str = ""


class Remembered(State):
    history: list[dict[str, Any]] = Field(default_factory=list)


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state, self._secret, self._over = Remembered(episode_id=str(uuid.uuid4())), 0, False

    @property
    def state(self) -> Remembered:
        return self._state

    def reset(self, seed: int | None = None, episode_id: str | None = None, secret: int = 0, **_: Any) -> Said:
        self._state, self._secret, self._over = Remembered(episode_id=episode_id or str(uuid.uuid4())), secret, False
        return self._remember(None, Said(text=f"I think of a number from 0 to {HIGHEST}."))

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Said:
        if self._over:
            return Said(text="the episode is over", done=True)
        self._state.step_count += 1
        return self._remember(action, self._answer(action.value))

    def _answer(self, value: int) -> Said:
        taken = self._state.step_count
        right = value == self._secret
        self._over = right or taken == GUESSES
        reward = None if not self._over else 1.0 / taken if right else 0.0
        if not 0 <= value <= HIGHEST:
            site = {"error_kind": "invalid_args", "hint_template_key": "refused", "t": taken}
            return Said(text=f"{value} is not from 0 to {HIGHEST}.", metadata=site, done=self._over, reward=reward)
        text = "right" if right else "higher" if value < self._secret else "lower"
        return Said(text=text, done=self._over, reward=reward)

    def _remember(self, action: Guess | None, said: Said) -> Said:
        done = None if action is None else action.model_dump(mode="json")
        entry = {"t": self._state.step_count, "action": done, "observation": said.model_dump(mode="json")}
        self._state.history.append(entry)
        return said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--sessions", type=int, default=64, help="rollouts at once, of all replicas together")
    given = parser.parse_args()
    app = create_fastapi_app(Guessing, Guess, Said, max_concurrent_envs=given.sessions, state_cls=Remembered)
    uvicorn.run(app, host="127.0.0.1", port=given.port, log_level="warning")


if __name__ == "__main__":
    main()
