"""Ten tasks from each of five packages of PyPI, with their own tests: the solution scores 1, cheating 0.

make test-deletion fetches the archives; nothing of them is in this repository.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from inner.errors import InnerError
from inner.extras.deletion.generate import check_task
from inner.extras.deletion.judge import DeletionTask
from inner.extras.deletion.repository import make_repository_tasks, read_repository
from inner.extras.deletion.world import FeatureDeletion
from tests.support.deletion_cheats import CHEATS

PLACE = Path(os.environ.get("DILOCO_SDISTS", "/nowhere"))
pytestmark = pytest.mark.skipif(not PLACE.is_dir(), reason="make test-deletion fetches the archives")
TASKS = int(os.environ.get("DILOCO_SDIST_TASKS", "10"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["boltons", "cachetools", "humanize", "parse", "toolz"])
def test_ten_tasks_of_a_package(name: str) -> None:
    (folder,) = PLACE.glob(f"{name}-*/")
    began = time.monotonic()
    repository = read_repository(folder, "pytest", PLACE / "packages")
    tasks, refused = list[DeletionTask](), 0
    for task in make_repository_tasks(repository, docstrings=True, seed=0):
        try:
            check_task(task)  # the environment gives the solution 1, also beside a test of the agent's own
            tasks.append(task)
        except InnerError as error:
            refused += 1
            print(f"\npassed over: {error}")
        if len(tasks) == TASKS:
            break
    made = time.monotonic() - began
    assert len(tasks) == TASKS
    won = {(task.name, kind) for task in tasks for kind in CHEATS if cheated(task, kind) != 0.0}
    assert not won
    fail = sum(len(task.fail_to_pass) for task in tasks)
    kept = sum(len(task.tests) for task in tasks) - fail
    whole = sum("the whole of" in task.instruction for task in tasks)
    print(
        f"\n{folder.name}: {len(repository.tests)} tests can be hidden; {TASKS} tasks ({whole} whole modules), "
        f"{fail} fail-to-pass, {kept} pass-to-pass, {refused} refused, {made:.0f} s; "
        f"{len(CHEATS)} kinds of cheating: 0 of {TASKS * len(CHEATS)} scored, {time.monotonic() - began - made:.0f} s"
    )


def cheated(task: DeletionTask, kind: str) -> float:
    """The reward of a cheat. The pass-to-pass tests are left out: they can only lower it."""
    world = FeatureDeletion()
    world.reset(replace(task, tests=[t for t in task.tests if t.name in task.fail_to_pass]).dump())
    for path, text in CHEATS[kind](task).items():
        world.write_file(path, text)
    return world.get_reward()
