"""The client of typed_server.py with a tool of its own: a class on OpenEnv with a method per tool, as TRL expects it.

Without the class, `Guessing = openenv_environment()` makes a tool `step(value)` from the server's schema.
OPENENV_URL is the server's address. In run.toml: environment = "typed_environment.py:Guessing"; rows with `secret`.
"""

from collections.abc import Mapping
from typing import Any

from inner.extras.openenv.client import OpenEnv


class Guessing(OpenEnv):
    def guess(self, value: int) -> str:
        """Guess the number.

        Args:
            value: from 0 to 20
        """
        return self._call("guess", value=value)

    def _action(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return dict(arguments)

    def _read_action(self, action: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return "guess", {"value": action["value"]}
