"""The real Monarch: a replica in real processes, each of which is killed.  `make test-backends`."""

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from inner.errors import InnerError
from inner.extras.monarch.rounds import Weights, read_weights
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import load_start
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/monarch/replica.py"
ROLES = ("trainer", "generator", "sdpo_teacher", "replay_client_0")
WAIT_S = 200.0
SEEDS = Seeds(data=1, noise=2)
pytestmark = [
    pytest.mark.skipif(find_spec("monarch") is None, reason="torchmonarch is not installed: make test-backends"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


# -------------------------------------------------------------------- processes


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, from /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def name_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def wait_for_process(pid: int, role: str, instead_of: Sequence[int] = ()) -> int:
    return wait_for(
        lambda: next((p for p in descendants(pid) if name_of(p) == role and p not in instead_of), 0), f"no {role}"
    )


def wait_for(look: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < until, what
        time.sleep(0.02)
    return found


class Example:
    """examples/monarch/replica.py as a process; its lines as they come."""

    def __init__(self, run: Path, *options: str) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, str(EXAMPLE), str(run), *options]
        self.process = subprocess.Popen(
            command, env=env, cwd=run.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def steps(self) -> list[str]:
        return [line for line in self.lines if re.match(r"outer step \d+: .*θ \w+$", line)]

    @property
    def digests(self) -> list[str]:
        return [line.rpartition(" ")[2] for line in self.steps]

    def wait_for_steps(self, count: int) -> None:
        wait_for(lambda: len(self.digests) >= count or self.process.poll() is not None, f"no outer step {count}")
        assert len(self.digests) >= count, "\n".join(self.lines)

    def end(self) -> list[str]:
        assert self.process.wait(WAIT_S) == 0, "\n".join(self.lines)
        self.thread.join(WAIT_S)
        return self.digests


@contextmanager
def example(run: Path, *options: str) -> Iterator[Example]:
    one = Example(run, *options)
    try:
        yield one
    finally:
        below = descendants(one.process.pid)
        one.process.kill()
        one.process.wait()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# -------------------------------------------------------------------- a replica of a run


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Its lines, one for each outer step; it has left no process behind."""
    with example(tmp_path_factory.mktemp("monarch") / "run") as one:
        pids = {role: wait_for_process(one.process.pid, role) for role in ROLES}
        digests = one.end()
        wait_for(lambda: not [p for role, p in pids.items() if name_of(p) == role], "a process is left")
    assert len(digests) == len(set(digests)) == 4
    return one.steps


@pytest.fixture(scope="module")
def undisturbed(printed: list[str]) -> list[str]:
    return [line.rpartition(" ")[2] for line in printed]


def test_the_page_shows_what_the_example_prints(printed: list[str]) -> None:
    """Its digests were those of the week in which the page was written. Another kind of CPU adds in another order."""
    page = (ROOT / "docs/from-the-notes.md").read_text()
    told = re.findall(r"^outer step \d+: .*θ \w+$", page, re.M)
    cpu = re.findall(r"on a CPU with (\w+)", page)
    if cpu != [torch.backends.cpu.get_cpu_capability()]:
        told, printed = ([line.split(":")[0] for line in lines] for lines in (told, printed))
    assert told == printed, "write these lines into docs/from-the-notes.md"


def test_every_role_is_killed_and_the_digests_are_those_of_a_run_without(
    undisturbed: list[str], tmp_path: Path
) -> None:
    """kill -9 to another role in each round."""
    with example(tmp_path / "run") as one:
        killed: list[int] = []
        for step, role in enumerate(ROLES):
            one.wait_for_steps(step)
            pid = wait_for_process(one.process.pid, role)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
            one.wait_for_steps(step + 1)
        assert one.end() == undisturbed
    text = "\n".join(one.lines)
    for role in ROLES[:3]:  # the clients are asked for answers that their ledgers do not have
        assert f"the {role} has ended" in text
    assert "Killed(sig=9)" in text


@pytest.mark.parametrize("victim", ["root", "replica_actor"])
def test_a_dead_owner_takes_its_actors_along_and_the_same_command_goes_on(
    undisturbed: list[str], tmp_path: Path, victim: str
) -> None:
    with example(tmp_path / "run") as one:
        one.wait_for_steps(1)
        pids = {role: wait_for_process(one.process.pid, role) for role in ROLES}
        owner = one.process.pid if victim == "root" else wait_for_process(one.process.pid, victim)
        os.kill(owner, signal.SIGKILL)
        wait_for(lambda: one.process.poll() is not None, "the root lives on")
        wait_for(lambda: not [p for role, p in pids.items() if name_of(p) == role], "an orphan is left")
        before = one.digests
    with example(tmp_path / "run") as again:
        after = again.end()
    assert before == undisturbed[: len(before)] and before  # of the owner's death alone a run may not even hear
    assert len(after) == 4 - len(before)  # no step is done twice, none is lost


# -------------------------------------------------------------------- a Replica in this process


def make_plan(**changes: Any) -> Any:
    from inner.extras.monarch.actors import ReplicaPlan

    config = InnerConfig(**merge_tables(SMALL, {"batch_size": 8, "sdpo": {"weight": 0.1}}, changes.pop("inner", {})))
    given: dict[str, Any] = {"config": config.to_dict(), "model_dir": str(small_folder()), "files": {}, "seeds": SEEDS}
    return ReplicaPlan(**given, steps=2, **changes)


def start_weights() -> Weights:
    return read_weights(load_start(small_folder(), "float32")[0])


PRELUDE = """
import json, os, pathlib, tempfile
import torch
from inner import InnerError, Teacher, ToolWorld
from inner.extras.monarch.replica import Replica
from inner.extras.monarch.rounds import RoundTrainer
from tests.inner.test_monarch import SEEDS, make_plan, small_folder, start_weights, wait_for_process
"""


def in_a_process(body: str, *, timeout: float = WAIT_S) -> subprocess.CompletedProcess[str]:
    """Monarch's client lives once per process, and takes it along when an actor of its own is lost."""
    code = f"{PRELUDE}\n{body}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def answer_of(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stdout + done.stderr
    return ast.literal_eval(done.stdout.strip().splitlines()[-1])


BY_ITSELF = """
plan = make_plan()
alone = RoundTrainer(plan.inner, small_folder(), {}, SEEDS, steps=2)
want = alone.run(0, start_weights())
with Replica(plan) as replica:
    got = replica.run_round(0, start_weights())
print([sorted(n for n in want.weights if not torch.equal(want.weights[n], got.weights[n])), len(got.weights)])
"""


def test_a_replica_of_actors_has_the_bits_of_one_process() -> None:
    differ, count = answer_of(in_a_process(BY_ITSELF))
    assert differ == [] and count > 3


LEFT_CLEANLY = """
folder = pathlib.Path(tempfile.mkdtemp())
flag = folder / "left"
(folder / "process.py").write_text(
    f"import os, pathlib\\nflag = pathlib.Path({str(flag)!r})\\n"
    "def score(rollouts):\\n    if not flag.exists():\\n        flag.touch()\\n        os._exit(0)\\n"
    "    return [[0.0] * max(1, len(r.turns)) for r in rollouts]\\n"
)
plan = make_plan(inner={"process": {"function": "process.py:score"}})
plan.files["process"] = str(folder / "process.py")
with Replica(plan) as replica:
    got = replica.run_round(0, start_weights())
flag.touch()
want = RoundTrainer(plan.inner, small_folder(), {"process": folder / "process.py"}, SEEDS, steps=2)
want = want.run(0, start_weights())
print(all(torch.equal(want.weights[n], got.weights[n]) for n in want.weights))
"""


def test_a_process_that_exits_with_0_is_replaced_though_monarch_takes_that_for_a_wish() -> None:
    assert answer_of(in_a_process(LEFT_CLEANLY)) is True


TOO_OFTEN = """
with Replica(make_plan(restarts=1)) as replica:
    for n in range(2):
        pid = wait_for_process(os.getpid(), "generator", killed if n else ())
        killed = [pid]
        os.kill(pid, 9)
    try:
        replica.run_round(0, start_weights())
    except InnerError as error:
        print(repr(str(error)))
"""


def test_a_role_that_dies_again_and_again_is_given_up_with_its_reason() -> None:
    said = answer_of(in_a_process(TOO_OFTEN))
    assert "the generator was started 2 times" in said and "Killed(sig=9)" in said
    assert "Look at what it printed above" in said


NOBODY_LEFT = """
import monarch.actor
monarch.actor.unhandled_fault_hook = lambda failure: None
with Replica(make_plan()) as replica:
    first = replica.run_round(0, start_weights())
    for role in ("replica_actor", "generator"):
        os.kill(wait_for_process(os.getpid(), role), 9)
    try:
        replica.run_round(1, first.weights)
    except InnerError as error:
        print(repr(str(error)))
"""


def test_without_an_owner_nobody_waits_for_another_generator() -> None:
    assert "so has the ReplicaActor" in answer_of(in_a_process(NOBODY_LEFT))


BROKEN_REWARD = """
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "process.py").write_text("def score(rollouts):\\n    return 7\\n")
plan = make_plan(inner={"process": {"function": "process.py:score"}})
plan.files["process"] = str(folder / "process.py")
with Replica(plan) as replica:
    try:
        replica.run_round(0, start_weights())
    except InnerError as error:
        print(repr(str(error)))
"""


def test_an_error_in_the_users_code_comes_out_as_it_was_raised() -> None:
    assert "the process reward score answered a int" in answer_of(in_a_process(BROKEN_REWARD))


NO_TEACHER_THERE = """
teachers = (Teacher("nobody", 0.0, 0.0, base_url="http://127.0.0.1:9/v1", key_env=None),)
plan = make_plan(teachers=teachers, ledger=tempfile.mkdtemp() + "/ledger", replay_actors=2)
state = {"state_id": "s", "state_messages": [{"role": "user", "content": "op0 1 2"}], "student_action": "giveup"}
with Replica(plan) as replica:
    try:
        replica.ask_teachers([state])
    except InnerError as error:
        print(repr(str(error)))
"""


def test_teachers_that_do_not_answer_are_told() -> None:
    assert "the replay stopped" in answer_of(in_a_process(NO_TEACHER_THERE, timeout=400))


POOL = """
from examples.local_teachers import serving
ledger = pathlib.Path(tempfile.mkdtemp()) / "ledger"
states = [
    {"state_id": f"s{i}", "state_messages": [{"role": "user", "content": f"op0 {i} 2"}], "student_action": "giveup"}
    for i in range(7)
]
with serving(ToolWorld(2, 4)) as url:
    teachers = tuple(Teacher(f"expert-{n}", 0.0, 0.0, base_url=url, key_env=None) for n in range(2))
    plan = make_plan(teachers=teachers, ledger=str(ledger), replay_actors=2)
    with Replica(plan) as replica:
        first = replica.ask_teachers(states)
        os.kill(wait_for_process(os.getpid(), "replay_client_1"), 9)
        second = replica.ask_teachers(states)
sent = [len([l for l in pathlib.Path(f"{ledger}.{k}").read_text().splitlines() if '"sent"' in l]) for k in range(2)]
print([[a["state_id"] for a in first], [a["action"] for a in first] == [a["action"] for a in second], sent])
"""


def test_a_killed_client_of_teachers_pays_for_nothing_twice() -> None:
    order, same, sent = answer_of(in_a_process(POOL))
    assert order == [f"s{i}" for i in range(7) for _ in range(2)] and same
    assert sum(sent) == 14 and min(sent) > 0


def test_plans_that_would_end_an_actor_are_refused() -> None:
    with pytest.raises(InnerError, match="changes at each inner step"):
        make_plan(inner={"sdpo": {"teacher": "live"}}).check()
    with pytest.raises(InnerError, match="learns from rewards"):
        text = InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"})
        replace(make_plan(), config=text.to_dict()).check()
    with pytest.raises(InnerError, match="inside a generation"):
        make_plan(inner={"grpo": {"steps_per_generation": 4}}).check()
    with pytest.raises(InnerError, match="Give all three"):
        make_plan(replay_actors=2).check()
    from inner.extras.monarch.actors import ask_pool

    with pytest.raises(InnerError, match="not a TrainerActor"):
        ask_pool([])
