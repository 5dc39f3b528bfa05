"""One verdict: the generator, the environment and Harbor's judge agree on each shipped task: on its solution, and on
ten kinds of cheating. The judge of a user who is not root gives nothing away."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from inner.errors import InnerError
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.starting import BoxStarter
from inner.extras.boxes.world import harbor_environment
from inner.extras.deletion.generate import OWN_TEST
from inner.extras.deletion.harbor import read_harbor, write_harbor
from inner.extras.deletion.judge import DeletionTask, load_task
from inner.extras.deletion.sandbox import write_files
from inner.extras.deletion.world import FeatureDeletion
from inner.tasks.harbor import make_rows
from inner.tasks.spec import TaskSpec
from tests.support.deletion_cheats import CHEATS
from tests.support.planted_boxes import namespaces, namespaces_work

PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin")
pytestmark = [
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not here: apt-get install bubblewrap"),
    pytest.mark.skipif(PYTHON is None, reason="no python3 that another user may start"),
]
EXAMPLE = Path(__file__).parents[2] / "examples" / "feature_deletion"
STRANGER = 1234


def shipped() -> dict[str, DeletionTask]:
    found = [load_task(json.loads(line)["task"]) for line in (EXAMPLE / "prompts.jsonl").read_text().splitlines()]
    return {task.name: solved(task) for task in found}


def solved(task: DeletionTask) -> DeletionTask:
    """The task with its solution, which a row leaves out: the files of the repository that differ."""
    repo = EXAMPLE / "repos" / task.name.partition("-")[0]
    whole = {path: (repo / path).read_text() for path in task.files}
    return DeletionTask(
        **{**vars(task), "solution": {path: text for path, text in whole.items() if text != task.files[path]}}
    )


SHIPPED = shipped()


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may enter, which pytest's own are not."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder) / "task"


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_shipped_is_what_the_repositories_are(name: str) -> None:
    """Messages in the repositories changed once, and the prompts did not."""
    task = SHIPPED[name]
    assert task.solution and all(path in task.files for path in task.solution)
    for path, text in task.solution.items():
        gone = task.files[path]
        for line in gone.splitlines():
            assert line in text.splitlines() or "this feature was taken out" in line, line


def test_a_written_folder_is_read_as_the_same_task(tmp_path: Path) -> None:
    for task in SHIPPED.values():
        write_harbor(task, tmp_path / task.name)
        assert read_harbor(tmp_path / task.name) == task
    (tmp_path / "odd/tests").mkdir(parents=True)
    for text in (None, "{", "[]", "{}"):
        if text is not None:
            (tmp_path / "odd/tests/cases.json").write_text(text)
        with pytest.raises(InnerError, match="odd is not a feature-deletion task"):
            read_harbor(tmp_path / "odd")


def asked(task: DeletionTask, written: Mapping[str, str]) -> float:
    world = FeatureDeletion()
    world.reset(task.dump())
    for path, text in written.items():
        world.write_file(path, text)
    return world.get_reward()


def harbor_said(
    folder: Path, task: DeletionTask, written: Mapping[str, str], uid: int | None = None, packages: Path | None = None
) -> float:
    """The reward by Harbor's judge.   uid: the user who runs it and owns all files."""
    write_harbor(task, folder)
    write_files(folder / "environment/repo", written)
    (folder / "verifier").mkdir()
    if uid is not None:
        for path in (folder, *folder.rglob("*")):
            shutil.chown(path, uid, uid)
    done = judged(folder, uid, packages=packages)
    assert done.returncode == 0, done.stdout + done.stderr
    return float((folder / "verifier/reward.txt").read_text())


def judged(
    folder: Path, uid: int | None, path: str = "/usr/bin:/bin", packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    words = [str(PYTHON), "-I", "-S", str(folder / "tests/judge.py"), "--work", str(folder / "environment/repo")]
    words += ["--tests", str(folder / "tests"), "--to", str(folder / "verifier/reward.txt")]
    words += ["--packages", str(packages)] if packages is not None else []
    user = {} if uid is None else {"user": uid, "group": uid, "extra_groups": []}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={"PATH": path}, **user)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "rowlet-totals" else pytest.mark.slow) for name in SHIPPED]
)
def test_all_judges_give_the_solution_1_also_beside_a_test_of_the_agents_own(name: str, place: Path) -> None:
    task = SHIPPED[name]
    for written in (task.solution, {**task.solution, **OWN_TEST}):
        assert asked(task, written) == harbor_said(place, task, written) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_all_judges_give_ten_kinds_of_cheating_0(name: str, place: Path) -> None:
    task = SHIPPED[name]
    assert len(CHEATS) == 10
    for kind, cheat in CHEATS.items():
        assert asked(task, cheat(task)) == harbor_said(place, task, cheat(task)) == 0.0, kind


root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.mark.quick(1)
@root
@pytest.mark.parametrize("uid", [None, STRANGER])
def test_the_wall_of_harbors_judge_stands_for_each_user(place: Path, uid: int | None) -> None:
    """Another user's tests once ran as that user, beside the expected values and the reward's file."""
    task = SHIPPED["rowlet-totals"]
    assert harbor_said(place, task, task.solution, uid) == 1.0
    for kind in ("nothing", "the expected values, where the judge has them", "the reward's file"):
        assert harbor_said(place, task, CHEATS[kind](task), uid) == 0.0, kind


@root
def test_a_judge_that_can_build_no_wall_gives_nothing(place: Path) -> None:
    task = SHIPPED["rowlet-totals"]
    harbor_said(place, task, task.solution, STRANGER)
    done = judged(place, STRANGER, path="/nowhere")
    assert done.returncode == 1 and "bubblewrap cannot make a sandbox here" in done.stderr
    assert not (place / "verifier/reward.txt").exists(), "0 would be a verdict on the solution"


@root
@pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")
def test_a_box_in_which_no_wall_stands_gives_none(place: Path) -> None:
    """Every rollout had 0.0 there, and no event said why."""
    write_harbor(SHIPPED["rowlet-totals"], place)
    text = (place / "tests/judge.py").read_text()
    text = text.replace("os.geteuid() == 0", "False").replace('shutil.which("bwrap") or "bwrap"', '"false"')
    (place / "tests/judge.py").write_text(text)
    env = harbor_environment(BoxStarter(LocalBoxes(place.parent / "boxes", wrap=namespaces)))()
    (row,) = make_rows(TaskSpec(f"harbor:{place}", 1, 0))
    env.reset(**row)
    assert env.get_reward() is None


@root
def test_a_judge_that_may_not_write_the_reward_says_so(place: Path) -> None:
    """The file of an earlier judge, or of the agent, once stayed beside an error that named no cause."""
    task = SHIPPED["rowlet-totals"]
    harbor_said(place, task, {})
    (place / "verifier/reward.txt").write_text("1\n")
    (place / "tests").chmod(0o755)
    done = judged(place, STRANGER)
    assert done.returncode == 1 and "cannot write the reward" in done.stderr
    (place / "verifier").chmod(0o777)
    judged(place, STRANGER)
    assert (place / "verifier/reward.txt").read_text() == "0\n", "another owner's file goes"
