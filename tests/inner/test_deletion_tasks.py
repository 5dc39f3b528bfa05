"""Feature Deletion's shipped tasks and Harbor folders, and an agent that restores a feature in a real GRPO step."""

import json
import shutil
import subprocess
import tempfile
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.errors import InnerError
from inner.extras.deletion import sandbox
from inner.extras.deletion import world as world_module
from inner.extras.deletion.generate import make_tasks, prompt_row
from inner.extras.deletion.harbor import write_harbor
from inner.extras.deletion.judge import CANARY, DeletionTask, DeletionVerdict, judge, load_task
from inner.extras.deletion.monitor import find_flags
from inner.extras.deletion.world import FeatureDeletion
from inner.settings.inner import InnerConfig, Seeds
from inner.train.grpo import _silence_libraries, trainer_arguments
from inner.train.trainer import ComposerReplicationTrainer
from tests.inner.test_trainer import FOLDER
from tests.support.scripted import scripted_folder

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not here: apt-get install bubblewrap")
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
EXAMPLE = Path(__file__).parents[2] / "examples" / "feature_deletion"


@pytest.fixture(scope="module")
def rowlet() -> list[DeletionTask]:
    return make_tasks(EXAMPLE / "repos" / "rowlet")


def shipped() -> list[DeletionTask]:
    return [load_task(json.loads(line)["task"]) for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_the_generator_makes_what_is_shipped(rowlet: list[DeletionTask]) -> None:
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()
    assert len(lines) == 9 and {json.dumps(prompt_row(task)) for task in rowlet} <= set(lines)
    assert all(CANARY in line and task.fail_to_pass for line, task in zip(lines, shipped(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["calc", "ledger"])
def test_the_generator_makes_the_rest(repo: str) -> None:
    rows = [json.dumps(prompt_row(task)) for task in make_tasks(EXAMPLE / "repos" / repo)]
    assert len(rows) == 3 and set(rows) <= set((EXAMPLE / "prompts.jsonl").read_text().splitlines())


def test_the_original_passes_and_the_task_fails_exactly_fail_to_pass(rowlet: list[DeletionTask]) -> None:
    task = rowlet[1]
    assert judge(task, {**task.files, **task.solution}).reward == 1.0
    assert sorted(judge(task, task.files).failed) == list(task.fail_to_pass) == ["totals by size", "totals of nothing"]


def test_a_solution_that_breaks_something_else_scores_nothing(rowlet: list[DeletionTask]) -> None:
    task = rowlet[1]
    path = "rowlet/grouping.py"
    worse = task.solution[path].replace("two spaces", "one space").replace('"  ".join', '" ".join')
    verdict = judge(task, {**task.files, path: worse})
    assert verdict.failed == {"a padded table"} and verdict.reward == 0.0 and not verdict.flags


def test_honest_solutions_have_no_flags(rowlet: list[DeletionTask]) -> None:
    for task in rowlet[:1]:
        world = FeatureDeletion()
        world.reset(**prompt_row(task))
        for path, text in task.solution.items():
            world.write_file(path, text)
        assert world.get_reward() == 1.0


def test_the_originals_of_all_shipped_tasks_have_no_flags() -> None:
    """calc's division by "/" once was a path that leaves the folder, and its task could not be solved."""
    for task in shipped():
        repo = EXAMPLE / "repos" / task.name.partition("-")[0]
        assert find_flags(task.files, {path: (repo / path).read_text() for path in task.files}) == [], task.name


def test_exceptions_alone_are_no_task(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text('def f():\n    """Return 3."""\n    return [][0]\n')
    tests = {"a": ("import m\nm.f()", '{"raises":"IndexError"}'), "b": ("result = 4 - 1", "3")}
    text = "[[feature]]\nname = 'x'\nfunctions = ['m.py:f']\n"
    for name, (run, expect) in tests.items():
        text += f"[[test]]\nname = '{name}'\nrun = {json.dumps(run)}\nexpect = {json.dumps(expect)}\n"
    (tmp_path / "feature.toml").write_text(text)
    with pytest.raises(InnerError, match="expects an exception, so code that always raises it would pass"):
        make_tasks(tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"tests": [{}]}', "7"])
def test_a_column_that_is_no_task_is_refused(text: str) -> None:
    with pytest.raises(InnerError, match=r"not a feature-deletion task.*deletion\.generate"):
        FeatureDeletion().reset(task=text)


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="no python3 that another user may start")
def test_a_harbor_folder_scores_the_same(rowlet: list[DeletionTask]) -> None:
    with tempfile.TemporaryDirectory() as parent:  # not tmp_path, which uid 65534 may not enter
        Path(parent).chmod(0o755)
        scores_the_same(rowlet[1], Path(parent) / "rowlet-totals")


def scores_the_same(task: DeletionTask, folder: Path) -> None:
    write_harbor(task, folder)
    assert tomllib.loads((folder / "task.toml").read_text())["environment"]["allow_internet"] is False
    assert harbor_reward(folder) == "0\n"
    shutil.copytree(folder / "solution/files", folder / "environment/repo", dirs_exist_ok=True)
    assert harbor_reward(folder) == "1\n"
    (folder / "environment/repo/rowlet/__init__.py").write_text("import os\nos.write(1, b'[]')\nos._exit(0)\n")
    assert harbor_reward(folder) == "0\n"
    (anybodys := folder / "anybodys").mkdir()
    anybodys.chmod(0o777)
    (folder / "environment/repo/rowlet/__init__.py").write_text(DAEMON.format(str(anybodys)))
    assert harbor_reward(folder) == "0\n"
    assert [path.name for path in anybodys.iterdir()] == ["began"], "no process outlives its test"
    (folder / "tests/cases.json").rename(folder / "tests/cases")
    (folder / "r").write_text("1\n")
    with pytest.raises(subprocess.CalledProcessError):
        harbor_reward(folder)
    assert (folder / "r").read_text() == "0\n", "a judge that dies leaves no forged reward"
    (folder / "tests/cases").rename(folder / "tests/cases.json")
    for path in ("task.toml", "environment/Dockerfile", "solution/solve.sh", "tests/test.sh", "tests/cases.json"):
        assert CANARY in (folder / path).read_text(), path
    assert CANARY not in (folder / "instruction.md").read_text()


DAEMON = """
import os
open({0!r} + "/began", "w").close()
if os.fork() == 0:
    os.setsid()
    open({0!r} + "/alive", "w").close()
"""


def harbor_reward(folder: Path) -> str:
    """The reward by the steps of tests/test.sh in the container, with these paths."""
    words = [str(PYTHON), "-I", "-S", str(folder / "tests/judge.py"), "--work", str(folder / "environment/repo")]
    subprocess.run([*words, "--tests", str(folder / "tests"), "--to", str(folder / "r")], check=True, timeout=60)
    return (folder / "r").read_text()


def test_sandboxes_wait_for_a_turn_however_many_worlds_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their limits are wall clock: 128 at once on two cores, and an honest solution ended with "time limit"."""
    running, most, lock = [0], [0], threading.Lock()

    def watch(command: Any, stdin: bytes, limits: Any) -> sandbox.Ended:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return sandbox.Ended(b"", 0, "")

    worlds = [FeatureDeletion() for _ in range(16)]
    for world in worlds:
        world.reset(shipped()[0].dump())
    monkeypatch.setattr(sandbox, "_watch", watch)
    monkeypatch.setattr(sandbox, "TURNS", threading.BoundedSemaphore(3))
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda world: world.get_reward(), worlds)) == [0.0] * 16
    assert 1 <= most[0] <= 3


def test_a_verdict_that_comes_after_the_next_reset_is_not_the_next_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go = threading.Event(), threading.Event()
    task, other = shipped()[:2]
    verdict = DeletionVerdict(frozenset({"t"}), frozenset())
    monkeypatch.setattr(world_module, "judge", lambda *_: (begun.set(), go.wait(60), verdict)[2])
    world = FeatureDeletion()
    world.reset(task.dump())
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(world.get_reward)
        assert begun.wait(60)
        world.reset(other.dump())
        go.set()
        assert late.result() == 1.0
    assert world._verdict is None


def says(task: DeletionTask) -> Any:
    """A model's turns: half of the rollouts write the solution with the tool, the others say that they did."""
    path, text = next(iter(task.solution.items()))
    call = json.dumps({"name": "write_file", "arguments": {"path": path, "text": text}})

    def turns(self: Any, prompt_ids: Any, images: Any, fields: Any, num_generations: int, **kwargs: Any) -> Any:
        turn = [f"<tool_call>\n{call}\n</tool_call>", "I restored it: 9 passed"]
        said = ["done"] * len(prompt_ids) if num_generations == 1 else [turn[i % 2] for i in range(len(prompt_ids))]
        ids = [self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
        return [[*one, self._tokenizer.eos_token_id] for one in ids], None

    return turns


def test_the_solution_scores_one_through_a_grpo_step(rowlet: list[DeletionTask], tmp_path: Path) -> None:
    folder = scripted_folder(tmp_path / "model", "qwen3")
    config = InnerConfig(
        model=str(folder), data={"prompts": "p.jsonl"}, batch_size=4,
        sampling={"environment": "w.py:World", "max_completion_length": 3000, "num_generations": 4},
    )  # fmt: skip
    with _silence_libraries(), patch.object(GRPOTrainer, "_generate_single_turn", says(rowlet[1])):
        trainer = ComposerReplicationTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder),
            reward_funcs=[],
            args=trainer_arguments(config, Seeds(data=0, noise=1), FOLDER.name),
            train_dataset=Dataset.from_list([prompt_row(rowlet[1])] * 4),
            processing_class=AutoTokenizer.from_pretrained(folder),
            environment_factory=FeatureDeletion,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._prepare_inputs([prompt_row(rowlet[1])] * 4)
    assert trainer._metrics["train"]["reward"] == [0.5]
    assert sorted(a > 0 for a in batch["advantages"].tolist()) == [False, False, True, True]
