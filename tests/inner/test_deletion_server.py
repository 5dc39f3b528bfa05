"""Feature Deletion as an OpenEnv server: a process on loopback, openenv 0.10.0's own client and ours.

make test-openenv       the server and their client run under the Python that DILOCO_OPENENV_PYTHON names
"""

import importlib
import importlib.util
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect

from inner.errors import InnerError
from inner.extras.deletion.harbor import write_harbor
from inner.extras.deletion.judge import DeletionTask
from inner.extras.openenv.client import OVER, OpenEnv, ToolFailed, openenv_environment
from inner.usercode.userfiles import tool_names
from tests.inner.test_deletion_verdicts import SHIPPED
from tests.inner.test_openenv_real import ROOT, address, free_port, openenv_python, running
from tests.support.deletion_cheats import CHEATS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not here: apt-get install bubblewrap"),
]
SERVER = "inner.extras.deletion.server"
TOTALS, QUOTES = SHIPPED["rowlet-totals"], SHIPPED["rowlet-quotes"]
HANG_S = 120.0
FOREVER = "while True: pass"
Call = tuple[str, dict[str, Any]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for task in (TOTALS, QUOTES):
        write_harbor(task, folder / task.name)
    return folder


@pytest.fixture(scope="module")
def server(tasks: Path) -> Iterator[tuple[str, int]]:
    """(URL, pid)"""
    port = free_port()
    with running("-m", SERVER, str(tasks), "--port", str(port), "--sessions", "24", ports=(port,)) as process:
        yield address(port), process.pid


@pytest.fixture(scope="module")
def short(tasks: Path) -> Iterator[str]:
    """One session, episodes of three calls."""
    port = free_port()
    given = ("--port", str(port), "--sessions", "1", "--steps", "3")
    with running("-m", SERVER, str(tasks), *given, ports=(port,)):
        yield address(port)


def play(url: str, *episodes: tuple[dict[str, Any], list[Call]]) -> dict[str, Any]:
    """What openenv's own clients saw: a session per episode, one call of each in turn."""
    told = json.dumps([{"reset": reset, "calls": calls} for reset, calls in episodes])
    command = [openenv_python(), "-W", "ignore", str(ROOT / "tests/support/openenv_client.py"), "play", url]
    done = subprocess.run(command, input=told, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def written(files: Any) -> list[Call]:
    return [("write_file", {"path": path, "text": text}) for path, text in files.items()]


SUBMIT: Call = ("submit", {})


def solve(task: DeletionTask) -> list[Call]:
    return [*written(task.solution), SUBMIT]


def rewards(seen: dict[str, Any]) -> list[float | None]:
    assert all(steps[-1]["done"] for steps in seen["steps"])
    assert all(step["reward"] is None and not step["done"] for steps in seen["steps"] for step in steps[:-1])
    return [steps[-1]["reward"] for steps in seen["steps"]]


def test_their_client_the_solution_gets_1_and_nothing_gets_0(server: tuple[str, int]) -> None:
    path = next(iter(TOTALS.solution))
    looks: list[Call] = [("list_files", {}), ("read_file", {"path": path}), ("run_python", {"program": "print(6 * 7)"})]
    seen = play(server[0], ({"task": TOTALS.name}, [*looks, *solve(TOTALS)]), ({"task": QUOTES.name}, [SUBMIT]))
    assert rewards(seen) == [1.0, 0.0]
    listed, read, ran, *_ = seen["steps"][0]
    assert listed["text"].split("\n") == sorted(TOTALS.files) and read["text"] == TOTALS.files[path]
    assert ran["text"] == "42\n"
    assert [TOTALS.instruction in seen["begun"][0], QUOTES.instruction in seen["begun"][1]] == [True, True]
    assert seen["steps"][0][-1]["metadata"] == {"task": TOTALS.name, "flags": 0}


def test_no_cheating_gets_more_than_0(server: tuple[str, int]) -> None:
    """Eleven sessions at once, the last of which is honest: another session's cheating costs it nothing."""
    episodes = [({"task": TOTALS.name}, [*written(cheat(TOTALS)), SUBMIT]) for cheat in CHEATS.values()]
    longest = max(len(calls) for _, calls in episodes)
    looks: list[Call] = [("list_files", {})] * (longest - len(solve(TOTALS)))
    seen = play(server[0], *episodes, ({"task": TOTALS.name}, [*looks, *solve(TOTALS)]))
    assert rewards(seen) == [0.0] * len(CHEATS) + [1.0]
    assert any(steps[-1]["metadata"]["flags"] for steps in seen["steps"][:-1])


def test_sessions_at_once_do_not_mix(server: tuple[str, int]) -> None:
    path, text = next(iter(TOTALS.solution.items()))
    one: list[Call] = [*written(TOTALS.solution), ("read_file", {"path": path}), SUBMIT]
    other: list[Call] = [("list_files", {}), ("read_file", {"path": path}), SUBMIT]
    seen = play(server[0], ({"task": TOTALS.name}, one), ({"task": TOTALS.name}, other))
    assert seen["steps"][0][1]["text"] == text
    assert seen["steps"][1][1]["text"] == TOTALS.files[path] != text
    assert rewards(seen) == [1.0, 0.0]


@pytest.fixture(scope="module")
def ours(server: tuple[str, int]) -> type[OpenEnv]:
    return openenv_environment(server[0])


def test_our_adapter_plays_it(ours: type[OpenEnv]) -> None:
    world: Any = ours()
    tools = ["edit_file", "list_files", "read_file", "run_python", "submit", "write_file"]
    assert sorted(tool_names(ours)) == tools
    assert TOTALS.instruction in world.reset(task=TOTALS.name, answer=3)
    for name, given in written(TOTALS.solution):
        getattr(world, name)(**given)
    assert world.get_reward() == 0.0  # not over
    world.submit()
    assert world.get_reward() == 1.0 and world.list_files() == OVER
    world.reset(task=TOTALS.name)  # the same session, as it was
    assert world.read_file(path=next(iter(TOTALS.solution))) == next(
        text for path, text in TOTALS.files.items() if path in TOTALS.solution
    )
    world.submit()
    assert world.get_reward() == 0.0
    world._close()


def test_a_rollout_that_does_not_submit_can_be_judged_where_it_ends(ours: type[OpenEnv]) -> None:
    """docs/feature-deletion.md shows this class."""

    class Judged(ours):
        def get_reward(self) -> float | None:
            self._call("submit")
            return super().get_reward()

    world: Any = Judged()
    world.reset(task=QUOTES.name)
    for name, given in written(QUOTES.solution):
        getattr(world, name)(**given)
    assert world.get_reward() == world.get_reward() == 1.0
    world._close()


@pytest.mark.parametrize(
    "name, given, words, kind",
    [
        ("read_file", {"path": "nope.py"}, "there is no file 'nope.py'", "execution_error"),
        ("read_file", {"path": 3}, "string_type", "bad_arguments"),
        ("read_file", {"path": "\ud800"}, "there is no file", "execution_error"),
        ("write_file", {"path": "../x.py", "text": ""}, "not a path inside the repository", "execution_error"),
        ("write_file", {"path": "x.py", "text": "\ud800"}, "surrogates", "execution_error"),
        ("write_file", {"path": "x.py", "text": "x" * 200_001}, "at most 200000 characters", "execution_error"),
        ("edit_file", {"path": "rowlet/__init__.py", "old": "", "new": ""}, "occurs 0 times", "execution_error"),
        ("run_python", {"program": "x" * 200_001}, "at most 200000 characters", "execution_error"),
        ("run_python", {}, "missing", "bad_arguments"),
        ("nope", {}, "Unknown tool", "unknown_tool"),
        ("reset", {}, "Unknown tool", "unknown_tool"),
        ("_verdict", {}, "Unknown tool", "unknown_tool"),
    ],
)
def test_a_bad_call_is_answered_and_the_episode_goes_on(
    ours: type[OpenEnv], name: str, given: dict[str, Any], words: str, kind: str
) -> None:
    world: Any = ours()
    world.reset(task=TOTALS.name)
    with pytest.raises(ToolFailed) as failed:
        world._call(name, **given)
    assert words in failed.value.record["error"] and failed.value.record["error_kind"] == kind
    for good, arguments in solve(TOTALS):
        world._call(good, **arguments)
    assert world.get_reward() == 1.0
    world._close()


@pytest.mark.parametrize("message", ['{"type": "step", "data": {"type": "x"}}', "{", '{"type": "step"}', '{"type": 3}'])
def test_a_message_that_is_no_action_is_answered(server: tuple[str, int], message: str) -> None:
    with connect(server[0].replace("http", "ws") + "/ws", proxy=None) as ws:
        ws.send(message)
        assert json.loads(ws.recv(timeout=HANG_S))["type"] == "error"
        ws.send('{"type": "step", "data": {"type": "call_tool", "tool_name": "list_files"}}')
        assert "call reset first" in ws.recv(timeout=HANG_S)
        ws.send('{"type": "reset", "data": {"index": 0}}')
        assert QUOTES.instruction in json.loads(ws.recv(timeout=HANG_S))["data"]["observation"]["text"]


@pytest.mark.parametrize("message", ["[1]", '{"type": "step", "data": {"type": "call_tool", "tool_name": "\\ud800"}}'])
def test_a_message_that_openenv_itself_cannot_answer_costs_its_own_session(
    server: tuple[str, int], message: str
) -> None:
    with connect(server[0].replace("http", "ws") + "/ws", proxy=None) as ws:
        ws.send(message)
        ws.recv(timeout=HANG_S)
    assert rewards(play(server[0], ({"task": TOTALS.name}, [SUBMIT]))) == [0.0]


def begun(world: Any, **asked: Any) -> str:
    """The name of the task that a reset began."""
    text = world.reset(**asked)
    return next(task.name for task in (TOTALS, QUOTES) if task.instruction in text)


def test_which_task_a_reset_begins(ours: type[OpenEnv]) -> None:
    world = ours()
    in_order = sorted([TOTALS.name, QUOTES.name])
    assert [begun(world, index=n) for n in (0, 1)] == in_order
    assert [begun(world, seed=n) for n in (4, 7, -1)] == [in_order[0], in_order[1], in_order[1]]
    assert begun(world) != begun(world)  # the next one, in turn
    for wrong in (
        {"index": 2},
        {"index": -1},
        {"seed": "x"},
        {"index": 0.5},
        {"task": "nope"},
        {"task": TOTALS.dump()},
    ):
        with pytest.raises(InnerError, match=r"could not begin an episode: (index must be|there is no task)"):
            world.reset(**wrong)
    world._close()


def test_openenvs_task_api(server: tuple[str, int]) -> None:
    def asked(path: str, **body: Any) -> Any:
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"{server[0]}/{path}", data, {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=HANG_S))

    assert asked("list_environments") == ["feature_deletion"]
    assert asked("feature_deletion/splits") == [{"name": "train", "type": "train"}]
    assert asked("feature_deletion/num_tasks", split="train") == {"num_tasks": 2}
    found = asked("feature_deletion/tasks", split="train")["tasks"]
    assert found[1] == {"id": TOTALS.name, "index": 1, "prompt": TOTALS.instruction}
    assert asked("feature_deletion/task", split="train", index=1) == {"task": found[1]}
    assert asked("feature_deletion/task_range", split="train", start=1) == {"tasks": found[1:]}


def test_the_last_call_ends_the_episode_with_its_verdict(short: str) -> None:
    looks: list[Call] = [("list_files", {})] * 3
    both = play(short, ({"task": TOTALS.name}, [*written(TOTALS.solution), *looks][:3]))
    assert rewards(both) == [1.0]


def test_a_full_server_says_so(short: str) -> None:
    with connect(short.replace("http", "ws") + "/ws", proxy=None) as first:
        first.send('{"type": "state"}')
        first.recv(timeout=HANG_S)
        with connect(short.replace("http", "ws") + "/ws", proxy=None) as second:
            assert "CAPACITY_REACHED" in second.recv(timeout=HANG_S)


def below(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | below(child)
    return found


def until(true: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def hang_in_a_sandbox(url: str, pid: int) -> Any:
    """A connection whose program runs, and runs."""
    ws = connect(url.replace("http", "ws") + "/ws", proxy=None).__enter__()
    ws.send(json.dumps({"type": "reset", "data": {"task": TOTALS.name}}))
    ws.recv(timeout=HANG_S)
    step = {"type": "call_tool", "tool_name": "run_python", "arguments": {"program": FOREVER}}
    ws.send(json.dumps({"type": "step", "data": step}))
    until(lambda: bool(below(pid)), "no sandbox has started")
    return ws


def test_a_client_that_vanishes_leaves_no_sandbox(server: tuple[str, int]) -> None:
    url, pid = server
    until(lambda: not below(pid), "an earlier test has left a sandbox")
    ws = hang_in_a_sandbox(url, pid)
    ws.socket.shutdown(socket.SHUT_RDWR)  # no goodbye
    until(lambda: not below(pid), "a sandbox is left")
    assert rewards(play(url, ({"task": TOTALS.name}, solve(TOTALS)))) == [1.0]


def test_a_server_that_is_killed_leaves_no_sandbox(tasks: Path) -> None:
    port = free_port()
    with running("-m", SERVER, str(tasks), "--port", str(port), ports=(port,)) as process:
        hang_in_a_sandbox(address(port), process.pid)
        left = below(process.pid)
    until(lambda: not any(Path(f"/proc/{pid}/stat").exists() for pid in left), f"of {left}, one is left")


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    command = [openenv_python(), "-W", "ignore", "-m", SERVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 1 and "there is no task in" in done.stderr and "Traceback" not in done.stderr


def test_a_task_that_needs_packages_is_refused_without_them(tmp_path: Path) -> None:
    write_harbor(TOTALS, tmp_path / "one")
    cases = tmp_path / "one/tests/cases.json"
    told = json.loads(cases.read_text())
    told["around"]["beside"] = {"tests/test_one.py": ""}
    cases.write_text(json.dumps({**told, "requires": ["toolz==1.2.0"]}))
    command = [openenv_python(), "-W", "ignore", "-m", SERVER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.returncode == 1 and "--target packages toolz==1.2.0`, and start the server" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("openenv") is not None, reason="openenv is here")
def test_without_openenv_it_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install openenv==0\.10\.0"):
        importlib.import_module(SERVER)
