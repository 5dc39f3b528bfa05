"""Servers as other people write them, by the shapes of their schemas, answers and limits, over a WebSocket of ours.

We ran the servers of public repositories (docs/internals/log.md, 2026-11-30). Each shape here is one of theirs.
"""

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from inner.extras.openenv.action_tools import action_tools
from inner.extras.openenv.client import GONE, openenv_environment
from inner.extras.openenv.mcp_tools import tool_methods
from inner.extras.openenv.observations import observation_text
from inner.extras.openenv.wire import next_step, server_urls
from inner.settings.inner import InnerError
from inner.usercode.attempts import AtMostWorst
from inner.usercode.userfiles import tool_names
from tests.inner.test_openenv import Answer, Typed, observation_reply, serve_openenv

websockets = pytest.importorskip("websockets", reason="the extra `openenv` is not installed")

METADATA = {"type": "object", "additionalProperties": True}
REFUSED = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "Invalid message"}}
MOVE = {
    "title": "MoveAction",
    "$defs": {"Way": {"enum": ["UP", "DOWN"], "type": "string"}},
    "properties": {
        "metadata": METADATA,
        "kind": {"const": "move", "default": "move"},
        "way": {"$ref": "#/$defs/Way", "description": "where"},
        "steps": {"type": "integer", "default": 1},
    },
    "required": ["way"],
}
LOOK = {
    "title": "LookAtAction",
    "properties": {"metadata": METADATA, "tool": {"const": "look"}, "at": {"type": "string"}},
}
GO = {
    "title": "GoNorthAction",
    "description": "Go.",
    "properties": {"tool": {"enum": ["go", "walk"]}},
    "required": ["tool"],
}
CHOICE = {
    "$defs": {"Look": LOOK, "Go": GO},
    "discriminator": {"propertyName": "tool"},
    "oneOf": [{"$ref": "#/$defs/Look"}, {"$ref": "#/$defs/Go"}],
}


@contextmanager
def serve_schema(answer: Answer, action: Any, asked: list[Any] | None = None) -> Iterator[str]:
    """A server with GET /schema beside its WebSocket.   asked: takes the headers of each request."""
    from websockets.sync.server import serve

    def request_answer(connection: Any, request: Any) -> Any:
        if asked is not None:
            asked.append(dict(request.headers.raw_items()))
        if request.path != "/schema":
            return None
        found = HTTPStatus.OK if action is not None else HTTPStatus.NOT_FOUND
        return connection.respond(found, json.dumps({"action": action}))

    def talk(connection: Any) -> None:
        with suppress(websockets.exceptions.ConnectionClosed):
            for raw in connection:
                connection.send(json.dumps(answer(json.loads(raw))))

    with serve(talk, "127.0.0.1", 0, process_request=request_answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


# a server without MCP tools


def test_a_server_without_mcp_tools_gets_a_tool_from_its_schema() -> None:
    """Of the 34 environments in OpenEnv's repository, 27 have an action of their own. Before, each needed a class."""
    taken: list[Any] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "state":
            played = {"action": {**taken[-1], "metadata": {}}, "observation": {"x": 0}}
            return {"type": "state", "data": {"history": [{"action": None, "observation": {}}, played]}}
        if message["type"] == "step" and message["data"].get("type") == "list_tools":
            return REFUSED
        taken.extend([message["data"]] * (message["type"] == "step"))
        return observation_reply(0.5, x=0)

    with serve_schema(answer, MOVE) as url:
        made = openenv_environment(url)
        assert tool_names(made) == ["step"]
        environment: Any = made()
        described = get_json_schema(environment.step)["function"]
        assert described["description"] == "Take one step in the environment (MoveAction)."
        assert described["parameters"]["required"] == ["way"]
        assert list(described["parameters"]["properties"]) == ["way", "steps"]  # neither metadata nor a constant
        assert described["parameters"]["properties"]["way"]["enum"] == ["UP", "DOWN"]
        environment.reset()
        assert environment.step(way="UP") == '{"x": 0}' and taken == [{"kind": "move", "way": "UP"}]
        assert environment.get_reward() == 0.5  # and not the reward of the reset, which no action earned
        calls = [m["tool_calls"][0]["function"] for m in environment._messages_before(2) if "tool_calls" in m]
        assert calls == [{"name": "step", "arguments": {"way": "UP"}}]
        environment._close()
        assert [m["tool_calls"][0]["function"] for m in environment._messages_before(2) if "tool_calls" in m] == calls


def test_an_action_that_is_a_choice_gets_a_tool_per_kind() -> None:
    taken: list[Any] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "step" and "type" in message["data"]:
            return REFUSED
        taken.append(message["data"])
        return observation_reply(text="seen")

    with serve_schema(answer, CHOICE) as url:
        made = openenv_environment(url)
        assert tool_names(made) == ["go_north", "look"]  # "tool" of the second has two values: its title names it
        environment: Any = made()
        environment.reset()
        environment.look(at="door")
        environment.go_north(tool="walk")
        assert taken[1:] == [{"tool": "look", "at": "door"}, {"tool": "walk"}]
        assert [environment._read_action(action)[0] for action in taken[1:]] == ["look", "go_north"]
    untitled = action_tools({"anyOf": [{"properties": {}}, {"title": "HTTPAction"}]})
    assert [tool["name"] for tool in untitled] == ["step_1", "http"]


def test_an_mcp_server_with_its_own_class_of_calls_lists_its_tools() -> None:
    """openenv reads {"type": "list_tools"} only for its own action classes; a subclass refuses it."""
    called: list[Any] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "mcp":
            tools = [{"name": "add", "inputSchema": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}]
            return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": {"tools": tools}}}
        if message["type"] == "step" and message["data"]["type"] != "call_tool":
            return REFUSED
        called.append(message["data"])
        return observation_reply(result={"content": [{"text": "3"}]})

    calling = {"properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": METADATA}}
    with serve_schema(answer, calling) as url:
        environment: Any = openenv_environment(url)()
        environment.reset()
        assert environment.add(a=3) == "3"
        assert called[-1] == {"type": "call_tool", "tool_name": "add", "arguments": {"a": 3}}


@pytest.mark.parametrize("action", [None, 3, [1]])
def test_a_server_with_neither_tools_nor_a_schema_is_said(action: Any) -> None:
    with (
        serve_schema(lambda _: REFUSED, action) as url,
        pytest.raises(InnerError, match=r"lists no tools.*no schema .* at /schema. Write a subclass of .*OpenEnv"),
    ):
        openenv_environment(url)


@pytest.mark.parametrize(
    "odd", [{"error": "Invalid request"}, {"status": "ok", "reward": 1.0}, {"type": "observation"}]
)
def test_a_websocket_with_messages_of_its_own_is_said(odd: dict[str, Any]) -> None:
    """Three public servers have a protocol of their own at /ws. Before, their resets were empty, their rewards 0."""
    with serve_openenv(lambda _: odd) as url:
        with pytest.raises(InnerError, match=r"not an OpenEnv server's answer: it has no data"):
            openenv_environment(url)
        with pytest.raises(InnerError, match=r"not an OpenEnv server's answer: it has no data"):
            type("E", (Typed,), {"_url": url, "_patience_s": 0.0})().reset()


def test_a_schema_that_is_named_within_an_argument_stands_in_its_description() -> None:
    """`Call | None`, a model that may be missing. Before, the model read a reference to nothing."""
    call = {"properties": {"name": {"type": "string"}, "next": {"$ref": "#/$defs/Other"}}}
    action = {
        "$defs": {"Call": call, "Other": {"properties": {"call": {"$ref": "#/$defs/Call"}}}, "Unused": {}},
        "properties": {"call": {"anyOf": [{"$ref": "#/$defs/Call"}, {"type": "null"}], "default": None}},
    }
    methods = tool_methods(action_tools(action), taken=())
    schema = get_json_schema(type("E", (), methods)().step)["function"]["parameters"]
    told = schema["properties"]["call"]["description"].partition("JSON schema: ")[2].removesuffix(")")
    assert json.loads(told)["$defs"] == {"Call": call, "Other": action["$defs"]["Other"]}


def test_an_action_that_ends_its_session_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    """openenv 0.10 ends the session if a validator of the action raises ValueError: it cannot send the error."""
    told = {"message": "Unable to serialize unknown type: <class 'ValueError'>", "code": "SESSION_ERROR"}

    def answer(message: dict[str, Any]) -> Any:
        return observation_reply(text="go") if message["type"] != "step" else {"type": "error", "data": told}

    with serve_openenv(answer) as url:
        environment: Any = type("E", (Typed,), {"_url": url})()
        for _ in range(2):
            environment.reset()
            assert environment.add(1, 2) == GONE and isinstance(environment.get_reward(), AtMostWorst)
    said = capsys.readouterr().err
    assert said.count("ended its session") == 1 and "(SESSION_ERROR)" in said and "PydanticCustomError" in said


# what a server says


def test_an_observation_that_has_only_metadata_tells_them() -> None:
    """The question of OpenEnv's finqa_env: its class of an observation has no field, so it goes into the metadata."""
    asked = {"metadata": {"question": "How much?", "company": "acme", "history": []}}
    assert observation_text(asked) == '{"question": "How much?", "company": "acme"}'
    assert observation_text({"metadata": {"message": "go", "error_kind": "x", "t": 3}}) == "go"
    assert (
        observation_text({"text": "", "metadata": {"answer": 7}}) == ""
    )  # a class with a field says what it has to say
    with serve_openenv(lambda _: observation_reply(None, {"question": "How much?"})) as url:
        assert type("E", (Typed,), {"_url": url})().reset() == '\n{"question": "How much?"}'


def test_screens_and_images_do_not_fill_the_context() -> None:
    """Atari's screen has 462,000 characters as JSON."""
    screen = [[[0, 1, 2]] * 160] * 210
    assert observation_text({"screen": screen, "lives": 3}) == '{"screen": "<100800 numbers>", "lives": 3}'
    picture = "iVBORw0KGgo" + "A" * 5000
    assert observation_text({"seen": {"png": picture, "url": "a.png"}}) == (
        '{"seen": {"png": "<an image, 5011 characters>", "url": "a.png"}}'
    )
    told = {"content": [{"type": "text", "text": "done"}, {"type": "image", "data": picture}], "data": None}
    assert observation_text({"tool_name": "plot", "result": told}) == "done\n<an image, 5011 characters>"
    board = {"board": [[0] * 45] * 45, "prices": [["A", 1.5, 2]] * 2000, "gene": "ACGT" * 1000}
    assert json.loads(observation_text(board)) == board


def test_a_result_beside_other_fields_hides_none_of_them() -> None:
    """Only an MCP tool's observation has nothing but its result."""
    seen = {"result": {"data": [1]}, "stdout": "3", "error": "", "metadata": {}}
    assert json.loads(observation_text(seen)) == {"result": {"data": [1]}, "stdout": "3"}


def test_an_episode_that_ends_at_its_reset_is_said() -> None:
    """A key that the server lacks. Before: no call was sent, and no rollout had a reward."""
    reply = observation_reply(None, {"status": "error", "error": "SANDBOX_KEY is not set"}, done=True)
    with (
        serve_openenv(lambda _: reply) as url,
        pytest.raises(InnerError, match=r"ended the episode at its `reset`.*SANDBOX_KEY is not set.*Correct it there"),
    ):
        type("E", (Typed,), {"_url": url})().reset()


def test_an_episode_that_ends_at_its_reset_costs_its_rollout_if_others_have_begun(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One odd row of thousands must not end the session."""

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        is_odd = message["data"].get("seed") == 7
        return observation_reply(None, {"text": "no such task" if is_odd else "Go."}, done=is_odd)

    with serve_openenv(answer) as url:
        kind = type("E", (Typed,), {"_url": url})
        assert "Go." in kind().reset(seed=1)
        odd = kind()
        odd.reset(seed=7)
        assert odd.get_reward() is None
    assert "no such task. Correct it there. Its rollout has no reward." in capsys.readouterr().err


# which servers


def one_session(answer: Answer) -> Any:
    """A server that allows one session, as create_app does by default."""
    from websockets.sync.server import serve

    lock = threading.Lock()

    def talk(connection: Any) -> None:
        full = {
            "message": "Server at capacity: 1/1",
            "code": "CAPACITY_REACHED",
            "active_sessions": 1,
            "max_sessions": 1,
        }
        if not lock.acquire(blocking=False):
            connection.send(json.dumps({"type": "error", "data": full}))
            return
        with lock_released(lock), suppress(websockets.exceptions.ConnectionClosed):
            for raw in connection:
                connection.send(json.dumps(answer(json.loads(raw))))

    server = serve(talk, "127.0.0.1", 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@contextmanager
def lock_released(lock: threading.Lock) -> Iterator[None]:
    try:
        yield
    finally:
        lock.release()


def address(server: Any) -> str:
    return f"http://127.0.0.1:{server.socket.getsockname()[1]}"


def test_copies_of_a_server_with_one_session_serve_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [one_session(lambda _: observation_reply(text="go")) for _ in range(3)]
    naps: list[float] = []
    made = type("E", (Typed,), {"_sleep": staticmethod(naps.append), "_patience_s": 60.0})
    monkeypatch.setenv("OPENENV_URL", " ".join(map(address, servers)))
    batch = [made() for _ in range(3)]
    assert [environment.reset() for environment in batch] == ["\ngo"] * 3 and naps == []
    stray = made()
    with pytest.raises(InnerError, match=r"1/1.*CAPACITY_REACHED.*max_concurrent_envs.*copies of it"):
        stray.reset()
    assert len(naps) == 1  # nothing here gives a session up, so a wait would not end
    batch[1]._busy = True  # as in a call that lasts, and then gives its session up
    stray._sleep = lambda _: (batch[1]._close(), time.sleep(0.2))
    assert stray.reset() == "\ngo"
    for environment in [*batch, stray]:
        environment._close()
    for server in servers:
        server.shutdown()


def test_a_private_server_gets_its_headers() -> None:
    asked: list[dict[str, str]] = []
    given = {"Authorization": "Bearer secret"}
    with serve_schema(lambda m: REFUSED if "type" in m["data"] else observation_reply(text="go"), MOVE, asked) as url:
        openenv_environment(url, headers=given)().reset()
    assert len(asked) == 3 and all(request["Authorization"] == "Bearer secret" for request in asked)


class OverHttpAlone(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.startswith("/old"):
            self.send_response(307)
            self.send_header("Location", "https://new.example/ws")
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.send_error(403)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_server_without_a_websocket_is_said() -> None:
    """Six of 45 public servers have /reset and /step over HTTP alone, and one episode for all."""
    server = HTTPServer(("127.0.0.1", 0), OverHttpAlone)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    with pytest.raises(InnerError, match=r"HTTP 403 at /ws.*Check the address; .*`headers`.*share one episode"):
        openenv_environment(url)
    with pytest.raises(InnerError, match=r"Check the address \(without /web\)"):
        openenv_environment(f"{url}/web")
    with pytest.raises(InnerError, match=r"redirects to https://new.example/ws. Give the address .* without /ws"):
        openenv_environment(f"{url}/old")
    server.shutdown()


def test_a_certificate_is_not_a_server_that_does_not_run() -> None:
    assert "SSL_CERT_FILE" in next_step(ssl.SSLCertVerificationError(1, "self-signed certificate"), "https://a")


def test_the_forms_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", "http://a:1/ \n https://b/env")
    assert server_urls(None) == ["http://a:1", "https://b/env"] and server_urls("http://c") == ["http://c"]
    assert server_urls(["ws://a:1/ws", "wss://b"]) == ["http://a:1", "https://b"]  # openenv's own clients take these
    with pytest.raises(InnerError, match=r"the page of a Space. Its server is https://me-my-env.hf.space"):
        server_urls("https://huggingface.co/spaces/Me/my_env")
    with pytest.raises(InnerError, match="must start with http"):
        server_urls("a:1")
