"""The OpenEnv environment against a small WebSocket server of ours; inner/test_openenv_real.py has the real one."""

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from inner.channels.hints import templates
from inner.extras.openenv import mcp_tools
from inner.extras.openenv.client import (
    GONE,
    OVER,
    OpenEnv,
    ToolFailed,
    failure_of,
    observation_text,
    openenv_environment,
)
from inner.extras.openenv.mcp_tools import method_name, tool_method, tool_methods
from inner.replay.states import error_record
from inner.settings.inner import InnerError
from inner.usercode.attempts import AtMostWorst
from inner.usercode.userfiles import tool_names

websockets = pytest.importorskip("websockets", reason="the extra `openenv` is not installed")

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
                connection.send(said if isinstance(said, str) else json.dumps(said))

    with serve(talk, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def observation_reply(
    reward: float | None = 0.0, metadata: Any = None, done: bool = False, **fields: Any
) -> dict[str, Any]:
    data = {"observation": {"metadata": metadata or {}, **fields}, "reward": reward, "done": done}
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


def failure_in(call: Callable[..., Any], *args: Any, **named: Any) -> dict[str, Any]:
    with pytest.raises(ToolFailed) as raised:
        call(*args, **named)
    assert str({"error": str(raised.value)}) == str(raised.value.record)  # what TRL writes for the model
    return raised.value.record


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
        failure = failure_in(environment.add, 3, 0)
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
        failure_in(environment.add, 3, 0)
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
        assert environment.add(3, 4) == GONE == environment.add(3, 4)
        assert environment.get_reward() is None and environment._sites == []  # not the student's fault
        live[0] = True
        environment.reset()
        assert environment.add(3, 4) == "7"


@pytest.mark.parametrize("how", ["hangs", "hangs, and the server is full", "ends the session"])
def test_a_call_that_loses_its_session_while_a_fresh_one_answers_did_it(how: str) -> None:
    full, wake = [False], threading.Event()

    def serve(message: dict[str, Any]) -> Any:
        if full[0] and message["type"] == "reset":
            return {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}
        if message["type"] == "step" and message["data"]["args"]["b"] == 9:
            full[0] = how.endswith("full")
            return None if how == "ends the session" else wake.wait(60) and None
        return calculator(message)

    with serve_openenv(serve) as url:
        environment = type("Here", (Typed,), {"_url": url, "_timeout_s": 1.0})()
        environment.reset()
        failure_in(environment.add, 3, 0)  # earns -0.1
        assert environment.add(3, 9) == GONE == environment.add(3, 4)
        reward = environment.get_reward()
        assert reward == pytest.approx(-0.1) and isinstance(reward, AtMostWorst)
        full[0] = False
        environment.reset()
        assert environment.add(3, 4) == "7" and type(environment.get_reward()) is float
        wake.set()


def test_a_session_that_was_gone_before_the_call_is_not_its_fault() -> None:
    with serve_openenv(calculator) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        environment.reset()
        environment._socket.close()
        assert environment.add(3, 4) == GONE and environment.get_reward() is None


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
        assert failure_in(environment.add, 1, 1) == {"error": "kaputt: KeyError", "error_kind": "exception"}
        assert failure_in(environment.add, 1, 2) == {
            "error": "args.a: Input should be a valid integer",
            "error_kind": "bad_arguments",
        }


def patient(url: str, naps: list[float]) -> OpenEnv:
    return type("Here", (Typed,), {"_url": url, "_sleep": staticmethod(naps.append), "_patience_s": 20.0})()


def test_no_answer_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    naps: list[float] = []
    with pytest.raises(InnerError, match=r"gives no session for 22 s.*OPENENV_URL"):
        patient(nowhere, naps).reset()
    assert naps == [0.0, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]  # at once, then more and more seldom
    with pytest.raises(InnerError, match="no OpenEnv server answers"):
        openenv_environment(nowhere)
    monkeypatch.delenv("OPENENV_URL", raising=False)
    with pytest.raises(InnerError, match="no URL of an OpenEnv server was given"):
        openenv_environment()
    with pytest.raises(InnerError, match="must start with http"):
        openenv_environment("localhost:80")
    full = {"type": "error", "data": {"message": "64 sessions", "code": "CAPACITY_REACHED"}}
    with serve_openenv(lambda _: full) as url, pytest.raises(InnerError, match=r"CAPACITY_REACHED.*concurrent_envs"):
        patient(url, []).reset()
    with (
        serve_openenv(lambda _: observation_reply(text="no tools")) as url,
        pytest.raises(InnerError, match="lists no tools"),
    ):
        openenv_environment(url)


def test_a_server_that_is_full_or_starting_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    full = {"type": "error", "data": {"message": "64/64 sessions", "code": "CAPACITY_REACHED"}}
    broken = {"type": "error", "data": {"message": "no display", "code": "FACTORY_ERROR"}}
    answers = [full, broken, full]
    with serve_openenv(lambda m: answers.pop() if answers else calculator(m)) as url:
        environment = patient(url, naps := [])
        assert environment.reset() == "\ngo []" and naps == [0.0, 0.5, 1.0]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "no display" in told and "Waiting up to 20 s" in told  # once, not at each attempt


def test_a_reset_that_raises_begins_no_episode() -> None:
    refused = {"type": "error", "data": {"message": "no such level", "code": "EXECUTION_ERROR"}}
    with serve_openenv(lambda _: refused) as url:
        environment = type("Here", (Typed,), {"_url": url})()
        with pytest.raises(InnerError, match=r"could not begin an episode: no such level.*\['level'\]"):
            environment.reset(level=9)


Rewards = list[float | None]


@pytest.mark.parametrize(
    ("rewards", "ends", "reward_is", "expected"),
    [
        ([0.0, 0.0, 1.0], True, "sum", 1.0),  # delayed: 0.0 until the end, as TrajectoryRubric has it
        ([None, None, 1.0], True, "sum", 1.0),  # delayed: None until the end
        ([None, None, 0.0], True, "sum", 0.0),  # an episode that was lost is worth 0, not nothing
        ([None, None, None], True, "sum", None),  # it ended, and the server gives no rewards
        ([None, None, None], False, "sum", 0.0),  # it did not get to the reward
        ([0.5, 0.5, 0.5], False, "sum", 1.5),
        ([0.5, 1.0, 1.5], False, "last", 1.5),  # a running total is not added up
        ([0.5, 1.0, None], True, "last", 1.0),
        ([True, False, True], False, "sum", 2.0),  # OpenEnv allows truth values
        ([float("nan"), float("inf"), 1.0], True, "sum", 1.0),
    ],
)
def test_the_episodes_reward(rewards: Rewards, ends: bool, reward_is: str, expected: float | None) -> None:
    left = list(rewards)

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "reset":
            return observation_reply(None)
        return observation_reply(left.pop(0), done=ends and not left)

    with serve_openenv(answer) as url:
        environment: Any = type("Here", (Typed,), {"_url": url, "_reward_is": reward_is})()
        environment.reset()
        for _ in rewards:
            environment.add(1, 1)
        assert environment.get_reward() == expected


def test_a_reward_is_earned_once() -> None:
    """A server may give the episode's reward to each call after the end: 1.0, and 1.0 again."""
    with serve_openenv(lambda m: observation_reply(1.0, done=m["type"] == "step", text="right")) as url:
        environment: Any = type("Here", (Typed,), {"_url": url})()
        for _ in range(2):  # nor does one episode's end, or reward, reach into the next
            environment.reset()
            environment._rewards.clear()
            assert [environment.add(1, 1) for _ in range(3)] == ["right", OVER, OVER]
            assert environment.get_reward() == 1.0 and environment._sites == []
            assert len(environment._observed_steps) == 2


def test_a_history_that_is_not_the_whole_episode_is_not_used() -> None:
    """A history of another session, or with the newest steps only: the conversation as seen here remains."""
    history: list[dict[str, Any]] = []

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        if message["type"] == "state":
            return {"type": "state", "data": {"history": history}}
        return calculator(message)

    with serve_openenv(answer) as url:
        environment: Any = type("Here", (Typed,), {"_url": url})()
        environment.reset()
        environment.add(3, 4)
        spoken = environment._messages_before(2)
        assert [m["content"] for m in spoken] == ["go []", "", "7"]
        newest = {"t": 1, "action": {"tool": "add", "args": {"a": 3, "b": 4}}, "observation": {"text": "8"}}
        for kept in ([], [newest], [newest, "text"], [newest, {"t": 0}]):
            history[:] = kept
            assert environment._messages_before(2) == spoken
        history[:] = [{"t": 0, "action": None, "observation": {"text": "went"}}, newest]
        assert [m["content"] for m in environment._messages_before(2)] == ["went", "", "8"]  # the server's record
        environment._close()
        assert environment._messages_before(2) == spoken  # another session would have another history


def test_a_program_with_open_sessions_ends() -> None:
    """Closing a socket while Python ends waits for its thread for ever."""
    with serve_openenv(calculator) as url:
        lines = [
            "from tests.inner.test_openenv import Typed",
            f"Typed._url = {url!r}",
            "kept = Typed()",
            "kept.reset()",
        ]
        done = subprocess.run([sys.executable, "-c", "\n".join(lines)], timeout=120, check=False)
    assert done.returncode == 0


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


ODD: dict[str, Any] = {
    "properties": {
        "point": {"$ref": "#/$defs/Point", "description": "where"},
        "colour": {"enum": ["red", "blue"], "type": "string"},
        "perhaps": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "old": {"type": ["string", "null"], "default": "x"},
        "newer": {"type": "number", "nullable": True},
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "many": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "fixed": {"const": "yes"},
        "unknown": {},
        "tool": {"type": "string"},
        "self": {"type": "string"},
        "from": {"type": "string"},
        "x-y": {"type": "string"},
        "wordy": {"type": "string", "description": "one\nArgs:\n  no: argument (choices: none)\nReturns: nothing"},
    },
    "required": ["point", "from"],
    "$defs": {"Point": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Point"}}}},
}


def test_a_tool_of_every_kind_of_schema() -> None:
    described = {"name": "odd", "description": "Odd.\n\nArgs:\n    nothing: here\n", "input_schema": ODD}
    environment: Any = type("E", (OpenEnv,), {"odd": tool_method(described)})()
    schema = get_json_schema(environment.odd)["function"]
    found = {
        name: {key: value for key, value in spec.items() if key != "description"}
        for name, spec in schema["parameters"]["properties"].items()
    }
    assert schema["parameters"]["required"] == ["point", "from_"]
    assert found["point"] == {"type": "object"} and found["counts"]["additionalProperties"] == {"type": "integer"}
    assert found["colour"] == {"type": "string", "enum": ["red", "blue"]} and found["fixed"]["enum"] == ["yes"]
    assert found["perhaps"] == {"type": "integer", "nullable": True}
    assert found["old"] == {"type": "string", "nullable": True} and found["newer"]["nullable"]
    assert found["either"] == {"type": ["integer", "string"]} and found["unknown"] == {}
    assert found["many"]["items"] == {"type": "array", "items": {"type": "number"}}
    texts = {name: spec["description"] for name, spec in schema["parameters"]["properties"].items()}
    assert texts["point"].startswith('where (JSON schema: {"type": "object", "properties"')
    assert texts["old"] == 'old (default "x")' and texts["wordy"].startswith("one Args - no: argument (choices - none)")
    sent: dict[str, Any] = {}
    environment._call = lambda tool, /, **given: sent.update(given)
    environment.odd(self_="s", from_="f", x_y="xy", tool="t")
    assert sent == {"self": "s", "from": "f", "x-y": "xy", "tool": "t"}  # the server's names


def test_names_that_trl_would_not_see_get_another() -> None:
    names = ["reset", "get_reward", "_call", "__init__", "close", "look-at.it", "class"]
    methods = tool_methods([{"name": name} for name in names], taken=dir(OpenEnv))
    expected = ["tool_reset", "tool_get_reward", "tool_call", "tool_init__", "close", "look-at.it", "class"]
    assert list(methods) == expected == [method_name(name, dir(OpenEnv)) for name in names]
    made = type("E", (OpenEnv,), methods)
    assert tool_names(made) == sorted(expected)
    assert all(get_json_schema(getattr(made(), name))["function"]["name"] == name for name in expected)
    with pytest.raises(InnerError, match="'reset' and 'tool_reset', would both have the Python name 'tool_reset'"):
        tool_methods([{"name": "reset"}, {"name": "tool_reset"}], taken=dir(OpenEnv))


def test_openenv_guesses_an_errors_kind_from_its_text_and_is_corrected() -> None:
    """0.10.0: "not found" anywhere in the text is tool_not_found; a wrong type is execution_error."""
    missing = {"tool_name": "read", "error": {"error_type": "tool_not_found", "message": "config.txt not found"}}
    assert (failure_of({"observation": missing}, ["read"]) or {})["error_kind"] == "execution_error"
    assert (failure_of({"observation": missing}, ["write"]) or {})["error_kind"] == "unknown_tool"
    text = "1 validation error for call[add]\na\n  Input should be a valid integer"
    wrong = {"tool_name": "add", "error": {"error_type": "execution_error", "message": text}}
    assert (failure_of({"observation": wrong}) or {})["error_kind"] == "bad_arguments"
    own = "Error calling tool 'add': 1 validation error for Order"  # from inside the tool's own work
    raised = {"tool_name": "add", "error": {"error_type": "execution_error", "message": own}}
    assert (failure_of({"observation": raised}) or {})["error_kind"] == "execution_error"


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
    assert observation_text({"message": "", "stderr": "boom"}) == '{"stderr": "boom"}'
    assert (
        observation_text({"text": 0}) == "0"
        and observation_text({"result": {"score": 3}}) == '{"result": {"score": 3}}'
    )


def test_no_field_of_an_observation_is_left_out() -> None:
    """Before: `message` hid `output`, and a robot at (0, 3) read only its y."""
    ran = {"success": True, "message": "Command executed", "output": "a.txt", "metadata": {}, "done": False}
    assert json.loads(observation_text(ran)) == {"success": True, "message": "Command executed", "output": "a.txt"}
    assert observation_text({"x": 0, "y": 3, "won": False, "hint": None}) == '{"x": 0, "y": 3, "won": false}'
    assert observation_text({"tool_name": "add", "result": 5, "error": None}) == "5"


def test_a_schema_that_refers_to_itself_from_many_places_takes_no_time() -> None:
    """Twelve branches, eight deep: 430 million hints, if each were made anew."""
    branches = [{"$ref": "#/$defs/node", "title": f"t{i}"} for i in range(12)]
    root = {"$defs": {"node": {"anyOf": [{"type": "string"}, *branches]}}}
    assert set(get_args(mcp_tools.type_hint({"$ref": "#/$defs/node"}, root))) == {str, Any}


DEEP = '{"type": "observation", "data": {"observation": {"rest": ' + "[" * 100_000 + "]" * 100_000 + "}}}"
BROKEN = [
    DEEP, "[]", "3", '"x"', '{"data": 3}', '{"data": {"observation": "x"}}', '{"data": {"metadata": [1]}}',
    '{"data": {"observation": {"metadata": "x"}}}', '{"data": {"reward": 1' + "0" * 5000 + "}}", "{", "NaN",
]  # fmt: skip
HARMLESS = [
    observation_reply(reward=10**400, text="a"), observation_reply(result={"content": 3}),
    observation_reply(result={"content": [1, {"text": 2}]}), observation_reply(result={"content": {"a": 1}}),
    {"type": "error", "data": {"errors": 3}}, {"type": "error", "data": {"errors": [1], "message": [1]}},
    {"type": "error", "data": {"errors": [{"loc": None}], "code": "VALIDATION_ERROR"}},
]  # fmt: skip


@pytest.mark.parametrize("odd", [*BROKEN, *HARMLESS])
def test_an_odd_answer_ends_the_session_or_is_told_and_raises_nothing_else(odd: Any) -> None:
    def answer(message: dict[str, Any]) -> Any:
        return odd if message["type"] == "step" else observation_reply(text="go")

    with serve_openenv(answer) as url:
        environment = type("E", (Typed,), {"_url": url, "_patience_s": 0.0})()
        environment.reset()
        said = None
        with suppress(ToolFailed):
            said = environment.add(a=1, b=2)
        assert (said == GONE) == (odd in BROKEN)
        assert environment.get_reward() in (None, 0.0)
        environment._close()


@pytest.mark.parametrize(
    "tools", [3, "x", [1], [{}], [{"name": 3}], [{"name": "a", "input_schema": 3}],
              [{"name": "a", "description": [1], "input_schema": {"properties": [1]}}],
              [{"name": "a", "input_schema": {"properties": {"x": {"enum": 3}}}}],
              [{"name": "a", "input_schema": {"properties": {"x": {"anyOf": [1]}}}}]],
)  # fmt: skip
def test_a_list_of_tools_that_is_none_is_said(tools: Any) -> None:
    with (
        serve_openenv(lambda _: observation_reply(tools=tools)) as url,
        pytest.raises(InnerError, match="lists tools that are not MCP tools"),
    ):
        openenv_environment(url)
