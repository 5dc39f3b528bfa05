"""The OpenEnv environment against openenv 0.10.0 itself, over its own WebSocket: `make test-backends`.

Its pins do not go with ours, so servers and its own clients run under the Python that DILOCO_OPENENV_PYTHON names.

    our client  ──▶ our servers (examples/openenv, tests/support/openenv_server.py)
                ──▶ a server that we did not write: `openenv init`
    their clients (EnvClient, MCPToolClient) ──▶ our servers
"""

import gc
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import get_json_schema

from inner.extras.openenv import client
from inner.extras.openenv.client import GONE, OVER, openenv_environment
from inner.rollouts.at_once.environments import methods_at_once
from inner.rollouts.at_once.lanes import Lanes
from inner.rollouts.at_once.tools import ToolsAtOnce
from inner.rollouts.rollout_states import rollout_states
from inner.settings.inner import InnerConfig, InnerError, Seeds
from inner.train.build import build_inner
from inner.usercode.attempts import AtMostWorst
from inner.usercode.check import check_inner
from inner.usercode.userfiles import load_environment, tool_names
from tests.inner.test_openenv import failure_in, patient
from tests.inner.test_toolworld import SMALL, WORLD, small_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
torch.set_num_threads(1)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "openenv"
GOOD, BAD = WORLD.right_name(0), WORLD.right_name(1)


def openenv_python() -> str:
    if named := os.environ.get("DILOCO_OPENENV_PYTHON"):
        return os.path.abspath(named)  # some start in another folder; not resolved: an environment's python is a link
    if importlib.util.find_spec("openenv"):
        return sys.executable
    pytest.skip(
        "no openenv here: `make test-backends` installs 0.10.0, or name a Python with it in DILOCO_OPENENV_PYTHON"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(*command: str, ports: tuple[int, ...], cwd: Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([openenv_python(), "-W", "ignore", *command], cwd=cwd, stdout=subprocess.DEVNULL)
    try:
        for port in ports:
            _wait_for_health(process, port)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_health(process: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            return
        time.sleep(0.2)
    pytest.fail(f"the OpenEnv server did not come up on port {port} (exit code {process.poll()})")


def address(port: int) -> str:
    return f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def sessions_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trainer.train collects garbage, which closes the sessions of a former trainer; tests leave that out.  A log has
    a few lines of a kind alone; each test has a log of its own."""
    monkeypatch.setattr(client, "_TOLD", set())
    yield
    gc.collect()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """tests/support/openenv_server.py: {"world": URL, "odd": URL, …}"""
    ports = {name: free_port() for name in ("world", "odd", "one", "idle", "own", "waits")}
    given = [f"{name}={port}" for name, port in ports.items()]
    with running("tests/support/openenv_server.py", GOOD, BAD, *given, ports=tuple(ports.values())):
        yield {name: address(port) for name, port in ports.items()}


@pytest.fixture(scope="module")
def arithmetic() -> Iterator[str]:
    port = free_port()
    with running("examples/openenv/server.py", "--port", str(port), ports=(port,)):
        yield address(port)


@pytest.fixture(scope="module")
def guessing() -> Iterator[str]:
    port = free_port()
    with running("examples/openenv/typed_server.py", "--port", str(port), ports=(port,)):
        yield address(port)


@cache
def their_client(kind: str, url: str) -> dict[str, Any]:
    command = [openenv_python(), "-W", "ignore", str(ROOT / "tests" / "support" / "openenv_client.py"), kind, url]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=300).stdout.splitlines()[-1])


def test_the_version_that_the_documents_name() -> None:
    code = "import importlib.metadata as m; print(m.version('openenv'))"
    found = subprocess.run([openenv_python(), "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0.10.0"


# a server that we did not write


def test_their_template_server_and_our_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`openenv init` as it comes: an echo, one session."""
    bin_only = {**os.environ, "PATH": str(Path(openenv_python()).parent)}  # without uv, which would ask a registry
    made = [openenv_python(), "-m", "openenv.cli", "init", "echo_env", "--output-dir", str(tmp_path)]
    subprocess.run(made, env=bin_only, capture_output=True, check=True, timeout=200)
    port = free_port()
    with running("-m", "server.app", "--port", str(port), ports=(port,), cwd=tmp_path / "echo_env"):
        environment: Any = openenv_environment(address(port))()
        assert "ready!" in environment.reset()
        assert json.loads(environment.step(message="häß 😀"))["echoed_message"] == "häß 😀"
        assert environment.get_reward() == pytest.approx(0.5)
        assert failure_in(environment.step, message=["a list"])["error_kind"] == "bad_arguments"
        assert environment._server_history() is None and len(environment._messages_before(2)) == 3
        second = patient(address(port), [])
        with pytest.raises(InnerError, match=r"1/1 sessions.*max_concurrent_envs"):
            second.reset()
        assert "Waiting up to" not in capsys.readouterr().err  # this process holds the session
        environment._close()
        assert second.reset() is not None


# clients that we did not write


def test_metadata_and_history_survive_the_wire_to_their_client(guessing: str) -> None:
    found = their_client("typed", guessing)
    site = {"error_kind": "invalid_args", "hint_template_key": "refused", "t": 2}
    assert [step["metadata"] for step in found["steps"]] == [{}, site, {}]
    assert [step["reward"] for step in found["steps"]] == [
        None,
        None,
        pytest.approx(1 / 3),
    ]  # delayed, and None is null
    assert [entry["t"] for entry in found["history"]] == [0, 1, 2, 3]
    assert found["history"][2]["observation"]["metadata"] == site
    assert found["forbids_extra_fields"]  # so facts have no place but metadata


def test_what_their_mcp_client_sees_and_does_not(arithmetic: str) -> None:
    found = their_client("mcp", arithmetic)
    assert found["asked"] == "What is 3 + 4?" and found["tools"] == ["add", "divide", "answer"]
    kinds = [step["metadata"].get("error_kind") for step in found["steps"]]
    assert kinds == [None, "execution_error", "tool_not_found", None]
    assert [step["reward"] for step in found["steps"]] == [0.0, 0.0, 0.0, pytest.approx(0.8)]  # once, at the end
    assert [entry["t"] for entry in found["history"]] == [0, 1]
    assert "history" not in found["state_of_mcp_client"]  # 0.10.0: its _parse_state keeps two fields
    assert found["call_tool"] == 7 and found["steps_that_call_tool_counts"] == 0  # /mcp goes round `step`: no reward


# our servers and our client


def test_the_example_with_mcp_tools(arithmetic: str) -> None:
    made = openenv_environment(arithmetic)
    assert tool_names(made) == ["add", "answer", "divide"]
    environment: Any = made()
    assert environment.reset(a=3, b=4) == "\nWhat is 3 + 4?"
    assert environment.add(a=3, b=4) == "7"
    assert failure_in(environment.divide, a=1, b=0)["error_kind"] == "execution_error"
    assert failure_in(environment.add, a="q", b=0)["hint_template_key"] == "bad_arguments"
    assert environment.get_reward() == 0.0
    environment.answer(value=7)
    assert environment.get_reward() == pytest.approx(0.8) and environment.answer(value=7) == OVER
    remembered = environment._messages_before(4)
    assert environment._server_history() is not None
    environment._server_history = lambda: None
    assert environment._messages_before(4) == remembered  # the conversation says the same
    assert [site["t"] for site in environment._sites] == [2, 3]


def test_the_typed_example(guessing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENENV_URL", guessing)
    config = InnerConfig(
        model="x", data={"prompts": "rows.jsonl"}, sampling={"environment": "typed_environment.py:Guessing"}
    )
    made: Any = load_environment(config, {"environment": EXAMPLE / "typed_environment.py"})[0]
    environment: Any = made()
    environment.reset(secret=5)
    assert environment.guess(value=3) == "higher"
    failure = failure_in(environment.guess, value=33)
    assert failure == {
        "error": "33 is not from 0 to 20.",
        "error_kind": "bad_arguments",
        "hint_template_key": "refused",
    }
    assert environment.get_reward() == 0.0 and environment._server_history() is not None
    assert environment.guess(value=5) == "right" and environment.get_reward() == pytest.approx(1 / 3)
    environment.reset(secret=3)
    assert environment._sites == [] and len(environment._server_history()) == 1  # nothing of the episode before
    assert failure_in(environment.guess, value="x")["error"].startswith("value: Input should be a valid integer")
    assert environment._server_history() is None  # the server kept no entry of an action that it refused to read
    for _ in range(6):
        environment.guess(value=4)
    assert environment.get_reward() == 0.0 and environment.guess(value=3) == OVER


def test_a_real_servers_tools_errors_and_history(servers: dict[str, str]) -> None:
    made = openenv_environment(servers["world"])
    assert tool_names(made) == sorted([GOOD, BAD])
    environment: Any = made()
    environment.reset(kind=0, mode="steps")
    assert getattr(environment, GOOD)(a=3, b=4) == "7"
    failure = failure_in(getattr(environment, BAD), a=3, b=4)
    assert failure["error_kind"] == "execution_error" and failure["hint_template_key"] == "refused"
    assert "not allowed today" in failure["error"]
    assert failure_in(environment._call, "nope")["error_kind"] == "unknown_tool"
    assert failure_in(getattr(environment, GOOD), a="x", b=4)["error_kind"] == "bad_arguments"
    assert failure_in(getattr(environment, GOOD), a=1)["error_kind"] == "bad_arguments"
    assert environment.get_reward() == 0.5
    assert [site["t"] for site in environment._sites] == [2, 3, 4, 5]
    remembered = environment._messages_before(6)
    assert environment._server_history() is not None
    environment._server_history = lambda: None
    assert environment._messages_before(6) == remembered
    with pytest.raises(InnerError, match="could not begin an episode: no such level"):
        environment.reset(mode="broken")


@pytest.mark.parametrize(
    ("mode", "reward_is", "expected"),
    [
        ("delayed", "sum", 0.5), ("none", "sum", 0.5), ("steps", "sum", 1.0), ("total", "last", 1.0),
        ("total", "sum", 1.5), ("never", "sum", 0.0),
    ],
)  # fmt: skip
def test_rewards_of_a_real_server(servers: dict[str, str], mode: str, reward_is: Any, expected: float) -> None:
    """A running total that is added up is too much: that server needs reward_is="last"."""
    environment: Any = openenv_environment(servers["world"], reward_is=reward_is)()
    for _ in range(2):
        environment.reset(mode=mode)
        failure_in(getattr(environment, BAD), a=1, b=1)
        assert environment.get_reward() == 0.0
        for _ in range(2):
            getattr(environment, GOOD)(a=1, b=1)
        assert environment.get_reward() == expected


def test_strange_tools(servers: dict[str, str]) -> None:
    made = openenv_environment(servers["odd"])
    expected = ["big", "echo", "look-at.it", "missing", "nothing", "schema", "slow", "tool_get_reward"]
    assert tool_names(made) == expected
    environment: Any = made()
    environment.reset(mode="never")
    schema = get_json_schema(environment.schema)["function"]["parameters"]
    assert schema["required"] == ["point", "colour"] and schema["properties"]["colour"]["enum"] == ["red", "blue"]
    assert '"y": {"default": 0.5, "type": "number"}' in schema["properties"]["point"]["description"]
    told = environment.schema(point={"x": 1}, colour="red", tool="hammer", perhaps=None)
    assert json.loads(told) == {"point": 1.5, "colour": "red", "perhaps": None, "counts": {}, "tool": "hammer"}
    assert environment.tool_get_reward() == "not a reward" and environment.get_reward() == 0.0
    assert getattr(environment, "look-at.it")(x=3) == "[3]" and environment.nothing() == "None"
    assert failure_in(environment.missing)["error_kind"] == "execution_error"  # OpenEnv says tool_not_found
    assert failure_in(environment.slow, seconds=2)["error_kind"] == "timeout"


def test_long_and_strange_texts(servers: dict[str, str]) -> None:
    environment: Any = openenv_environment(servers["odd"])()
    environment.reset(mode="never")
    text = "naïve 😀 \x00 \u2028 \\ \" '"
    assert environment.echo(text=text) == text
    assert (
        failure_in(environment.echo, text="\ud800")["error_kind"] == "exception"
    )  # no UTF-8 for it; the session lives
    assert environment.echo(text="on") == "on"
    assert environment.big(size=5_000_000) == "x" * 5_000_000
    assert environment.big(size=20_000_000) == GONE  # above our own 16 MiB
    environment.reset(mode="never")
    assert environment.echo(text="y" * 20_000_000) == GONE  # above uvicorn's 16 MiB the server hangs up
    environment.reset(mode="never")
    assert environment.echo(text="again") == "again"


def test_a_server_that_is_too_slow_for_us(servers: dict[str, str]) -> None:
    """The late answer must not be taken for the next call's."""
    environment: Any = openenv_environment(servers["odd"], timeout_s=0.3)()
    environment._patience_s = 0.0
    environment.reset(mode="never")
    assert environment.slow(seconds=0.9) == GONE
    assert isinstance(environment.get_reward(), AtMostWorst), "a fresh session answers, so the call was too slow"
    environment.reset(mode="never")
    assert environment.echo(text="on time") == "on time"


def test_sessions_have_a_limit_and_come_back(servers: dict[str, str]) -> None:
    made: Any = openenv_environment(servers["one"])
    first, second = made(), made()
    naps: list[float] = []

    def release(pause: float) -> None:
        naps.append(pause)
        if len(naps) == 3:
            first._close()
        time.sleep(0.2)

    second._sleep = release
    first.reset()
    first._busy = True  # as in a call that lasts
    assert second.reset() is None and len(naps) >= 3
    assert getattr(second, GOOD)(a=1, b=1) == "2"


def test_an_idle_session_is_let_go_behind_an_open_connection(servers: dict[str, str]) -> None:
    """0.10.0's reaper closes the environment and leaves the socket: the tool's error is not the student's."""
    environment: Any = openenv_environment(servers["idle"])()
    environment.reset(mode="steps")
    until = time.monotonic() + 120
    while getattr(environment, GOOD)(a=1, b=1) != GONE:
        assert time.monotonic() < until
        time.sleep(8)  # the reaper looks every five seconds
    assert environment.get_reward() is None and environment._sites == []
    environment.reset(mode="steps")
    assert getattr(environment, GOOD)(a=1, b=1) == "2"


def test_a_server_that_restarts_in_the_middle_of_an_episode(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    given = ("tests/support/openenv_server.py", GOOD, BAD, f"world={port}")
    with running(*given, ports=(port,)):
        environment: Any = openenv_environment(address(port))()
        environment.reset(mode="steps")
        assert getattr(environment, GOOD)(a=1, b=1) == "2"
    assert getattr(environment, GOOD)(a=1, b=1) == GONE and environment.get_reward() is None
    assert [m["content"] for m in environment._messages_before(2)] == ["", "2"]  # from the conversation
    again = subprocess.Popen([openenv_python(), "-W", "ignore", *given], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        environment._patience_s = 200.0
        environment.reset(mode="steps")  # waits for it
        assert getattr(environment, GOOD)(a=1, b=1) == "2" and environment.get_reward() == 0.5
    finally:
        again.kill()
        again.wait()
    assert "gives no session" in capsys.readouterr().err


# servers that others write


def test_a_typed_server_gets_a_tool_from_its_own_schema(guessing: str) -> None:
    environment: Any = openenv_environment(guessing)()
    assert tool_names(type(environment)) == ["step"]
    assert get_json_schema(environment.step)["function"]["parameters"]["required"] == ["value"]
    environment.reset(secret=5)
    assert environment.step(value=3) == "higher" and failure_in(environment.step, value=33)["error_kind"]
    assert failure_in(environment.step, value="x")["error"].startswith("value: Input should be a valid integer")
    assert environment._messages_before(2)[1]["tool_calls"][0]["function"] == {
        "name": "step",
        "arguments": {"value": 3},
    }
    assert environment.step(value=5) == "right" and environment.get_reward() == pytest.approx(1 / 3)


def test_an_mcp_server_with_its_own_class_of_calls(servers: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """openenv 0.10 reads list_tools for its own classes alone, and a ValueError of a validator ends the session."""
    environment: Any = openenv_environment(servers["own"])()
    assert environment.reset(mode="asks") == '\n{"question": "How much?"}'
    assert getattr(environment, GOOD)(a=1, b=2) == "3"
    assert environment.get_reward() == 0.5  # without the 0.25 of the reset
    assert environment._call("refused") == GONE and isinstance(environment.get_reward(), AtMostWorst)
    assert "PydanticCustomError" in capsys.readouterr().err
    environment.reset(mode="over")
    assert environment.get_reward() is None and "Its rollout has no reward" in capsys.readouterr().err


# TRL's loop


def test_a_grpo_step_through_a_real_server(servers: dict[str, str], tmp_path: Path) -> None:
    """Nothing forced: the warm-started ToolWorld model calls the server's tools; the reward comes with the last."""
    (tmp_path / "env.py").write_text(
        "from inner.extras.openenv.client import openenv_environment\n"
        f"World = openenv_environment({servers['world']!r})\n"
    )
    files = {"environment": tmp_path / "env.py"}
    sampling = {"environment": "env.py:World", "max_completion_length": 64}  # the errors have room
    config = InnerConfig(**{**SMALL, "batch_size": 16}, sampling=sampling, sdpo={"weight": 0.1})
    check_inner(config, files)
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    before = [p.detach().clone() for p in loop.model.parameters()]
    numbers: list[dict[str, float]] = []
    samples: list[Any] = []
    advantages: list[torch.Tensor] = []
    score = loop.trainer._generate_and_score_completions

    def keep_advantages(inputs: Any) -> Any:
        scored = score(inputs)
        advantages.append(scored["advantages"].clone())
        return scored

    loop.trainer._generate_and_score_completions = keep_advantages

    def stop() -> bool:
        numbers.append(loop.pop_metrics())
        samples.append(loop.sample(16))
        return len(numbers) == 3

    loop.train(stop)
    assert any(not torch.equal(a, b) for a, b in zip(before, loop.model.parameters(), strict=True))
    assert sum(n["reward"] for n in numbers) > 0 and all(n["sdpo_coverage"] > 0 for n in numbers)
    assert any(n["reward_std"] > 0 for n in numbers) and any(a.abs().max() > 0 for a in advantages)
    rollouts = [rollout for one in samples for rollout in one["rollouts"]]
    assert {rollout["reward"] for rollout in rollouts} == {0.0, 0.5}  # delayed, and never twice
    sampled = [(rollout, one["tools"]) for one in samples for rollout in one["rollouts"]]
    states = [state for rollout, tools in sampled for state in rollout_states(rollout, "r", tools)]
    kinds = {state.get("hint_template_key") for state in states if state.get("error")}
    assert kinds == {None, "refused"}  # TRL's own "not found", and the server's
    assert all(len(state["tools"]) == 2 for state in states)


FORMS = {"returned": "failed.record", "returned as text": "str(failed)", "raised": None}


@pytest.mark.parametrize("form", FORMS)
def test_only_a_failure_that_is_raised_is_one_for_trl(servers: dict[str, str], tmp_path: Path, form: str) -> None:
    """tools/failure_frequency does not see what a tool returns, even an error. So the client raises."""
    answer = f"return {FORMS[form]}" if FORMS[form] else "raise"
    (tmp_path / "env.py").write_text(
        "from inner.extras.openenv.client import ToolFailed, openenv_environment\n"
        f"class World(openenv_environment({servers['world']!r})):\n"
        "    _failures = []\n"
        "    def _call(self, tool, /, **arguments):\n"
        "        try:\n"
        "            return super()._call(tool, **arguments)\n"
        "        except ToolFailed as failed:\n"
        "            self._failures.append(tool)\n"
        f"            {answer}\n"
    )
    files = {"environment": tmp_path / "env.py"}
    config = InnerConfig(**{**SMALL, "batch_size": 8}, sampling={"environment": "env.py:World"})
    loop: Any = build_inner(config, small_folder(), files, Seeds(data=0, noise=0))
    counted: list[tuple[int, int]] = []
    loop_of_trl = loop.trainer._tool_call_loop

    def count(*args: Any) -> Any:
        found = loop_of_trl(*args)
        said = [m for completion in found[1] for m in completion if m["role"] == "tool" and "not found" in m["content"]]
        counted.append((found[5], len(said)))  # tool_failure_count; TRL's own "Tool … not found."
        return found

    loop.trainer._tool_call_loop = count
    loop.train(lambda: len(counted) >= 2)
    failures = sum(len(world._failures) for world in [type(loop.trainer.environments[0])])
    assert failures > 0
    trl_counts, unknown = (sum(column) for column in zip(*counted, strict=True))
    assert trl_counts >= unknown + failures if form == "raised" else trl_counts < unknown + failures


# many sessions at once


@pytest.mark.parametrize("rollouts", [16, 64])
def test_sessions_wait_at_the_same_time(servers: dict[str, str], rollouts: int) -> None:
    """A second per call: a turn of all rollouts takes less than two, and they were in the server together."""
    environments: Any = [openenv_environment(servers["waits"])() for _ in range(rollouts)]
    call = {"type": "function", "function": {"name": GOOD, "arguments": {"a": 1, "b": 2}}}
    began = time.monotonic()
    lanes = Lanes(rollouts, 30.0)
    with methods_at_once(environments, "reset", [{"mode": "steps"}] * rollouts, lanes):
        for environment in environments:
            environment.reset(mode="steps")
    reset = time.monotonic()
    tools = ToolsAtOnce(
        [{GOOD: getattr(environment, GOOD)} for environment in environments],
        [[{"role": "assistant", "tool_calls": [call]}]] * rollouts,
        lanes,
        environments=environments,
    ).tools()
    assert [of_row[GOOD](a=1, b=2) for of_row in tools] == ["3"] * rollouts
    took = time.monotonic() - reset
    assert max(int(one._send_request("state", None)["episode_id"]) for one in environments) == rollouts
    print(f"{rollouts} resets {reset - began:.2f} s, a turn of {rollouts} calls of a second {took:.2f} s")
    assert took < 2
    for environment in environments:
        environment._close()
