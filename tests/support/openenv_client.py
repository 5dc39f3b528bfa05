"""OpenEnv's own clients against a server, as JSON on stdout; runs where `openenv` is, and needs nothing of ours.

python tests/support/openenv_client.py typed URL      GenericEnvClient against examples/openenv/typed_server.py
python support/openenv_client.py mcp URL        MCPToolClient and GenericEnvClient against examples/openenv/server.py
python support/openenv_client.py play URL < EPISODES      a session per episode, one call of each in turn
                                                EPISODES: [{"reset": {...}, "calls": [[tool, arguments], ...]}]
"""

import json
import sys
from contextlib import ExitStack
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.mcp_types import CallToolAction
from openenv.core.env_server.types import Observation
from openenv.core.mcp_client import MCPToolClient
from pydantic import ValidationError


def facts(result: Any) -> dict[str, Any]:
    return {"metadata": dict(result.metadata or {}), "reward": result.reward, "done": result.done}


def typed(url: str) -> dict[str, Any]:
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset(secret=5)
        steps = [facts(client.step({"value": value})) for value in (3, 33, 5)]
        return {"steps": steps, "history": client.state()["history"]}


def mcp(url: str) -> dict[str, Any]:
    calls = [("add", {"a": 3, "b": 4}), ("divide", {"a": 1, "b": 0}), ("nope", {}), ("answer", {"value": 7})]
    with MCPToolClient(base_url=url).sync() as client:
        asked = client.reset(a=3, b=4).observation.text
        steps = [facts(client.step(CallToolAction(tool_name=name, arguments=given))) for name, given in calls]
        shown = client.state().model_dump()
        client.reset(a=3, b=4)
        passed_by = client.call_tool("add", a=3, b=4)
        counted = client.state().step_count
        tools = [tool.name for tool in client.list_tools()]
    with GenericEnvClient(base_url=url).sync() as client:
        client.reset(a=3, b=4)
        client.step({"type": "call_tool", "tool_name": "add", "arguments": {"a": 3, "b": 4}})
        history = client.state()["history"]
    return {
        "asked": asked, "tools": tools, "steps": steps, "state_of_mcp_client": shown, "history": history,
        "call_tool": passed_by, "steps_that_call_tool_counts": counted,
    }  # fmt: skip


def play(url: str) -> dict[str, Any]:
    episodes = json.loads(sys.stdin.read())
    with ExitStack() as stack:
        clients = [stack.enter_context(MCPToolClient(base_url=url).sync()) for _ in episodes]
        begun = [
            client.reset(**episode["reset"]).observation for client, episode in zip(clients, episodes, strict=True)
        ]
        steps: list[list[dict[str, Any]]] = [[] for _ in episodes]
        for turn in range(max(len(episode["calls"]) for episode in episodes)):
            for client, episode, told in zip(clients, episodes, steps, strict=True):
                for name, given in episode["calls"][turn : turn + 1]:
                    seen = client.step(CallToolAction(tool_name=name, arguments=given))
                    told.append({**facts(seen), **said(seen.observation)})
        return {"begun": [each.text for each in begun], "steps": steps}


def said(observation: Any) -> dict[str, Any]:
    failed = observation.error
    result = observation.result
    text = "" if result is None else result["data"] if isinstance(result, dict) else result.data
    return {"text": text, "error": failed and failed.message, "kind": failed and failed.error_type.value}


def forbids_extra_fields() -> bool:
    try:
        Observation(error_kind="refused")  # type: ignore[call-arg]
    except ValidationError as error:
        return "extra_forbidden" in str(error)
    return False


if __name__ == "__main__":
    found = {"typed": typed, "mcp": mcp, "play": play}[sys.argv[1]](sys.argv[2])
    print(json.dumps({**found, "forbids_extra_fields": forbids_extra_fields()}))
