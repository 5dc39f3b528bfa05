"""The OpenEnv environment: against a small WebSocket server of our own, and against the real thing where it is.

The real server runs under a Python that has `openenv`: this one, or the one that DILOCO_OPENENV_PYTHON names.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

from inner.base import InnerConfig, InnerError, Seeds
from inner.build import build_inner
from inner.check import check_inner, tool_names
from inner.hints import templates
from inner.rollout_sample import rollout_states
from inner.spans import error_record
from inner.worlds.openenv import OpenEnv, failure_of, observation_text, openenv_environment, tool_method
from tests.test_inner_toolworld import SMALL, WORLD, small_folder

websockets = pytest.importorskip("websockets", reason="the extra `openenv` is not installed")
torch.set_num_threads(1)

Answer = Callable[[dict[str, Any]], Any]  # a message -> the answer; None drops the connection


@contextmanager
def serve_openenv(answer: Answer) -> Iterator[str]:
    """A server that speaks OpenEnv's wire format."""
    from websockets.sync.server import serve

    def talk(connection: Any) -> None:
        with suppress(websockets.exceptions.ConnectionClosed):
            for raw in connection:
                said = answer(json.loads(raw))
                if said is None:
                    connection.close()
                    return
                connection.send(json.dumps(said))

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def observation_reply(reward: float | None = 0.0, metadata: Any = None, **fields: Any) -> dict[str, Any]:
    data = {"observation": {"metadata": metadata or {}, **fields}, "reward": reward, "done": False}
    return {"type": "observation", "data": data | ({"metadata": metadata} if metadata else {})}


class Typed(OpenEnv):
    """A server with actions of its own: {"tool", "args"}."""

    def add(self, a: int, b: int) -> str:
        """Add.

        Args:
            a: one
            b: other
        """
        return self._call("add", a=a, b=b)

    def _action(self, tool: str, arguments: Any) -> dict[str, Any]:
        return {"tool": tool, "args": dict(arguments)}

    def _read_action(self, action: Any) -> tuple[str, dict[str, Any]]:
        return action["tool"], action["args"]


def calculator(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "state":
        return {"type": "state", "data": {"episode_id": "e", "step_count": 1}}
    if message["type"] == "reset":
        return observation_reply(text=f"go {sorted(message['data'])}")
    args = message["data"]["args"]
    if args["b"] == 0:
        return observation_reply(-0.1, {"error_kind": "division", "hint_template_key": "zero"}, text="b is 0")
    return observation_reply(1.0, text=str(args["a"] + args["b"]))


def test_one_episode_with_an_error_site() -> None:
    with serve_openenv(calculator) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        assert environment.reset(prompt=[{"role": "user"}], answer=7, odd=object()) == "\ngo ['answer']"
        assert environment.add(3, 4) == "7"
        failure = environment.add(3, 0)
        assert error_record(str(failure)) == {"error": "b is 0", "error_kind": "division", "hint_template_key": "zero"}
        assert environment._sites == [{"t": 2, "tool": "add", **failure}]
        assert environment.get_reward() == pytest.approx(0.9)
        environment.reset()
        assert environment._sites == [] and environment.get_reward() == 0.0
    assert tool_names(Typed) == ["add"]


def test_without_the_servers_history_a_teacher_sees_the_conversation() -> None:
    with serve_openenv(calculator) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        environment.reset()
        environment.add(3, 4)
        environment.add(3, 0)
        seen = environment._messages_before(2)
        assert [m["role"] for m in seen] == ["user", "assistant", "tool"]
        assert seen[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 3, "b": 4}}
        assert seen[2]["content"] == "7"
        assert len(environment._messages_before(1)) == 1
        with pytest.raises(InnerError, match="2 steps"):
            environment._messages_before(4)


def test_a_lost_session_ends_the_episode_and_the_next_reset_opens_another() -> None:
    live = [True]
    with serve_openenv(lambda m: calculator(m) if live[0] or m["type"] == "reset" else None) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        environment.reset()
        live[0] = False
        assert environment.add(3, 4) == "the environment is gone" == environment.add(3, 4)
        assert environment.get_reward() is None and environment._sites == []  # not the student's fault
        live[0] = True
        environment.reset()
        assert environment.add(3, 4) == "7"


def test_the_server_refuses_an_action() -> None:
    def refuse(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            return observation_reply()
        if message["data"]["args"]["b"] == 1:
            return {"type": "error", "data": {"message": "kaputt: KeyError", "code": "EXECUTION_ERROR"}}
        errors = [{"loc": ["args", "a"], "msg": "Input should be a valid integer"}]
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}}

    with serve_openenv(refuse) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        assert environment.reset() is None
        assert environment.add(1, 1) == {"error": "kaputt: KeyError", "error_kind": "exception"}
        wrong: Any = environment.add(1, 2)
        assert wrong == {"error": "args.a: Input should be a valid integer", "error_kind": "bad_arguments"}


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(InnerError, match="OPENENV_URL"):
        type("Here", (Typed,), {"_url": nowhere})().reset()
    with pytest.raises(InnerError, match="no OpenEnv server answers"):
        openenv_environment(nowhere)
    monkeypatch.delenv("OPENENV_URL", raising=False)
    with pytest.raises(InnerError, match="where is the OpenEnv server"):
        openenv_environment()
    with pytest.raises(InnerError, match="starts with http"):
        openenv_environment("localhost:80")
    full = {"type": "error", "data": {"message": "64 sessions", "code": "CAPACITY_REACHED"}}
    with serve_openenv(lambda _: full) as url, pytest.raises(InnerError, match="max_concurrent_envs"):
        type("Here", (Typed,), {"_url": url})().reset()
    with (
        serve_openenv(lambda _: observation_reply(text="no tools")) as url,
        pytest.raises(InnerError, match="lists no tools"),
    ):
        openenv_environment(url)


def test_an_mcp_tool_becomes_a_method_that_trl_can_describe() -> None:
    properties = {"b": {"type": "string", "default": "x"}, "a": {"type": "integer", "description": "how many"}}
    described = {"name": "buy", "description": "Buy it.", "input_schema": {"properties": properties, "required": ["a"]}}
    method = tool_method(described)
    schema = get_json_schema(type("E", (OpenEnv,), {"buy": method})().buy)["function"]
    assert schema["name"] == "buy" and schema["description"] == "Buy it."
    assert schema["parameters"]["required"] == ["a"]
    assert schema["parameters"]["properties"]["a"] == {"type": "integer", "description": "how many"}
    bare = get_json_schema(type("E", (OpenEnv,), {"f": tool_method({"name": "f", "description": "Do."})})().f)
    assert bare["function"]["parameters"]["properties"] == {}


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ({"observation": {"result": {"data": 7}}}, None),
        ({"observation": {"error": {"error_type": "tool_not_found", "message": "m"}}}, "unknown_tool"),
        ({"observation": {"error": {"error_type": "invalid_args", "message": "m"}}}, "bad_arguments"),
        ({"observation": {"error": {"error_type": "timeout", "message": "m"}}}, "timeout"),
        ({"observation": {"result": {"is_error": True, "content": [{"text": "m"}]}}}, "execution_error"),
        ({"observation": {"text": "m", "metadata": {"error_kind": "own"}}}, "own"),
        ({"observation": {"text": "m"}, "metadata": {"error_kind": "own"}}, "own"),
        ({"observation": {"text": "all is well", "error": None}}, None),
    ],
)
def test_what_failed_and_how(said: dict[str, Any], kind: str | None) -> None:
    failure = failure_of(said)
    assert (failure and failure["error_kind"]) == kind
    assert failure is None or failure["error"] == "m"
    if kind in ("execution_error", "own"):  # no template is called so: the text decides
        assert "timed out" in str(templates({"error_kind": kind}, "it timed out"))


def test_the_words_of_an_observation() -> None:
    assert observation_text({"result": {"content": [{"text": "a"}, {"text": "b"}], "data": 3}}) == "a\nb"
    assert observation_text({"result": {"content": [], "data": 3}}) == "3"
    assert observation_text({"text": "hello", "metadata": {}}) == "hello"
    assert observation_text({"board": [[0, 1]], "done": False, "reward": 0.0, "metadata": {}}) == '{"board": [[0, 1]]}'
    assert observation_text({"done": False}) == ""


# the real thing


def openenv_python() -> str | None:
    if named := os.environ.get("DILOCO_OPENENV_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("openenv") else None


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """WORLD's two tools: that of kind 0 adds, that of kind 1 always fails."""
    python = openenv_python()
    if python is None:
        pytest.skip("no openenv here: pip install openenv==0.10.0 somewhere, and name it in DILOCO_OPENENV_PYTHON")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("openenv_server.py")
    command = [python, "-W", "ignore", str(script), str(port), "20", WORLD.right_name(0), WORLD.right_name(1)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 150
        while time.monotonic() < until and process.poll() is None:
            with suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            time.sleep(0.2)
        else:
            pytest.fail("the OpenEnv server did not come up")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_servers_tools_errors_and_history(server: str) -> None:
    made = openenv_environment(server)
    good, bad = WORLD.right_name(0), WORLD.right_name(1)
    assert tool_names(made) == sorted([good, bad])
    environment: Any = made()
    environment.reset(kind=0)
    assert getattr(environment, good)(a=3, b=4) == "7"
    failure = getattr(environment, bad)(a=3, b=4)
    assert failure["error_kind"] == "execution_error" and failure["hint_template_key"] == "refused"
    assert "not allowed today" in failure["error"]
    assert environment._call("nope")["error_kind"] == "unknown_tool"
    assert getattr(environment, good)(a="x", b=4)["error_kind"] == "execution_error"
    assert environment.get_reward() == 0.5
    assert [site["t"] for site in environment._sites] == [2, 3, 4]
    remembered = environment._messages_before(5)
    assert environment._server_history() is not None
    environment._server_history = lambda: None
    assert environment._messages_before(5) == remembered  # the conversation says the same
    sessions = [made() for _ in range(19)]
    assert all(session.reset() is None for session in sessions)
    with pytest.raises(InnerError, match="max_concurrent_envs"):
        made().reset()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_grpo_step_through_a_real_server(server: str, tmp_path: Path) -> None:
    """Nothing forced: the warm-started ToolWorld model calls the server's tools and learns from its errors."""
    time.sleep(0.5)  # the sessions of the test before are let go
    (tmp_path / "env.py").write_text(
        f"from inner.worlds.openenv import openenv_environment\nWorld = openenv_environment({server!r})\n"
    )
    files = {"environment": tmp_path / "env.py"}
    sampling = {"environment": "env.py:World", "max_completion_length": 64}  # the errors have room
    config = InnerConfig(**{**SMALL, "batch_size": 16}, sampling=sampling, sdpo={"weight": 0.1})
    check_inner(config, files)
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    before = [p.detach().clone() for p in loop.model.parameters()]
    numbers: list[dict[str, float]] = []
    samples: list[Any] = []

    def stop() -> bool:
        numbers.append(loop.pop_metrics())
        samples.append(loop.sample(16))
        return len(numbers) == 3

    loop.train(stop)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert sum(n["reward"] for n in numbers) > 0 and all(n["sdpo_coverage"] > 0 for n in numbers)
    sampled = [(rollout, one["tools"]) for one in samples for rollout in one["rollouts"]]
    states = [state for rollout, tools in sampled for state in rollout_states(rollout, "r", tools)]
    kinds = {state.get("hint_template_key") for state in states if state.get("error")}
    assert kinds == {None, "refused"}  # TRL's own "not found", and the server's
    assert all(len(state["tools"]) == 2 for state in states)
