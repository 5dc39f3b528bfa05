"""Harbor tasks whose Dockerfile must be built, as nearly all tasks of others: of 3,633 public ones 28 need no build."""

import base64
import importlib.util
import io
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpclib import Status

from inner.errors import InnerError
from inner.extras.boxes import images
from inner.extras.boxes.box import BoxOwner, BoxRecipe, BuildFailed, ProviderFailed
from inner.extras.boxes.episode import Episode, box_recipes
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.starting import BoxStarter, open_provider
from inner.tasks.harbor import build_fault, load_harbor, make_rows, read_tasks
from inner.tasks.spec import TaskSpec
from tests.inner.test_boxes import APART, write_task
from tests.inner.test_boxes_apart import environment
from tests.support.e2b_server import E2bServer
from tests.support.modal_server import ModalPlatform
from tests.support.planted_boxes import namespaces, namespaces_work

OWNER = BoxOwner("r", "0", 1, "g")
REAL = """FROM ubuntu:24.04
ENV DEBIAN_FRONTEND=noninteractive

# tools of the task
RUN mkdir -p /task && \\
    echo 42 > /task/made
COPY repo/given.txt /task/given.txt
WORKDIR /task
"""
JUDGE = '[ "$(cat /task/made)$(cat /task/out)" = 42given ] && echo 1 > /logs/verifier/reward.txt\n'
isolated = pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")
E2B = importlib.util.find_spec("e2b") is not None


@pytest.fixture
def platform() -> Iterator[ModalPlatform]:
    with ModalPlatform() as platform:
        yield platform


# -------------------------------------------------------------------------- reading


@pytest.mark.parametrize(
    "docker",
    [
        REAL,
        "FROM x\nCOPY a**b /app\n",
        "FROM x\nCOPY repo/given[!0].txt /app\n",
        'FROM x\nCOPY ["repo", "/app"]\n',
        "FROM x AS one\nFROM one\nCOPY repo /app\n",
        "FROM --platform=linux/amd64 x\nCOPY repo /app\n",
        "ARG V=1\nFROM x:$V\n",
        "FROM x\nCOPY repo /app\nENTRYPOINT []\n",
    ],
)
def test_a_dockerfile_that_needs_a_build_is_carried_whole(tmp_path: Path, docker: str) -> None:
    folder = write_task(tmp_path / "task", docker=docker)
    (folder / "environment/repo/given.txt").chmod(0o755)
    (task,) = read_tasks(folder)
    assert (task.image, task.base, task.files) == ("", "", {}) and task.odd
    assert task.folder == ("/task" if docker == REAL else "/app")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(task.build))) as archive:
        modes = {member.name: member.mode for member in archive}
        assert archive.extractfile("Dockerfile").read().decode() == docker  # type: ignore[union-attr]
    assert modes == {"Dockerfile": 0o644, "repo/given.txt": 0o755}
    assert load_harbor(task.dump()).build == task.build == read_tasks(folder)[0].build, "the same bytes again"
    (recipe,) = box_recipes(task)
    with pytest.raises(InnerError, match=r"and boxes of local build no images\. Use boxes of modal or e2b, or build"):
        LocalBoxes(tmp_path / "boxes", wrap=namespaces).start(OWNER, recipe, timeout_s=1)


@pytest.mark.parametrize(
    ("docker", "work"),
    [
        ("FROM x\nWORKDIR /one\nRUN cat > y <<'EOF'\nFROM z\nWORKDIR /two\nEOF\n", "/one"),
        ("FROM x\nRUN <<-EOF\n\tWORKDIR /two\n\tEOF\nWORKDIR /one\n", "/one"),
        ("FROM x\nRUN echo $((1 << 3)) <<<four\nWORKDIR /one\n", "/one"),
        ("FROM x\nRUN echo \\\n  WORKDIR \\\n  /two\n", "/app"),
    ],
)
def test_only_instructions_of_a_dockerfile_count(tmp_path: Path, docker: str, work: str) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker=docker))
    assert task.folder == work and task.build


def test_a_line_may_go_on_in_the_next(tmp_path: Path) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker="FROM x\nCOPY repo/given.txt \\\n  /data/\n"))
    assert (task.build, [*task.files]) == ("", ["/data/given.txt"])


def test_a_dockerfile_without_steps_names_its_image(tmp_path: Path) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker="FROM rust:1.80 AS it\nCOPY repo .\n"))
    assert (task.base, task.build, box_recipes(task)[0].base) == ("rust:1.80", "", "rust:1.80")


def test_an_image_has_the_working_folder_of_the_dockerfile_beside_it(tmp_path: Path) -> None:
    (task,) = read_tasks(write_task(tmp_path / "task", docker=REAL), {"image": "built"})
    assert (task.image, task.folder, task.build) == ("built", "/task", "")


def test_a_verifiers_own_dockerfile_is_built_and_a_copy_has_that_of_the_episode(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", docker=REAL, toml=APART)
    (task,) = read_tasks(folder)
    first, copy = box_recipes(task)
    assert first.build and copy.build == first.build and copy.folder == "/task"
    (folder / "tests/Dockerfile").write_text("FROM x\nRUN y\nCOPY . /tests/\n")
    (task,) = read_tasks(folder)
    first, own = box_recipes(task)
    assert own.build and own.build != first.build and own.folder == "/app" and task.tests == {}
    words = r"tests/Dockerfile has the line 'RUN y', .* docker_image of \[verifier.environment\]"
    assert task.apart is not None
    with pytest.raises(InnerError, match=words):
        raise InnerError(build_fault("hf", task.apart.odd, of_verifier=True))


def test_tasks_are_left_out_by_name_and_all_faults_are_told_at_once(tmp_path: Path) -> None:
    for name in ("a-good", "b-compose", "c-compose", "d-without"):
        write_task(tmp_path / name, docker=REAL, compose="services: {}\n" * ("compose" in name))
    (tmp_path / "d-without/instruction.md").unlink()
    words = (
        r'b-compose has docker-compose.yaml.* 2 cannot be read, .*without = ."b-compose", "c-compose", "d-without".\.'
    )
    with pytest.raises(InnerError, match=words):
        read_tasks(tmp_path)
    assert [task.name for task in read_tasks(tmp_path, {"without": ["*-compose", "d-without"]})] == ["a-good"]
    with pytest.raises(InnerError, match=r"leaves all tasks of .* out"):
        read_tasks(tmp_path, {"without": ["*"]})
    with pytest.raises(InnerError, match=r"without = '[*]' must be a list of texts"):
        read_tasks(tmp_path, {"without": "*"})


# -------------------------------------------------------------------------- Modal


@isolated
def test_modal_builds_a_tasks_image_once_and_its_boxes_have_it(tmp_path: Path, platform: ModalPlatform) -> None:
    provider, folder = open_provider("modal"), write_task(tmp_path / "task", docker=REAL, test=JUDGE)
    env = environment(provider, folder)
    assert env.bash("pwd; cat made given.txt") == "/task\n42\ngiven"
    env.bash("cp given.txt out")
    assert env.get_reward() == 1.0
    before = len(platform.server.images)
    (row,) = make_rows(TaskSpec(f"harbor:{folder}", 1, 0))
    env.reset(**row)
    assert len(platform.server.images) == before and env.get_reward() != 1.0


@isolated
def test_modal_starts_from_the_image_that_from_names(platform: ModalPlatform) -> None:
    open_provider("modal").start(OWNER, BoxRecipe(base="rust:1.80"), timeout_s=60)
    assert any("FROM rust:1.80" in image.dockerfile_commands for image in platform.server.images.values())


@isolated
def test_a_failed_build_is_told_with_the_tasks_name_and_its_last_lines(
    tmp_path: Path, platform: ModalPlatform, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    platform.server.build_fails = ["Collecting absent", "ERROR: No matching distribution found for absent"]
    write_task(tmp_path / "tasks/bad", docker="FROM x\nRUN pip install absent\n")
    write_task(tmp_path / "tasks/good", docker=REAL)
    provider, told = open_provider("modal"), list[str]()
    (task,) = read_tasks(tmp_path / "tasks/bad")
    for place in ("a", "b"):
        starter = BoxStarter(provider)
        begun = Episode(starter, BoxOwner("r", "0", 1, place), task, lambda event, text: told.append(f"{event} {text}"))
        assert not begun.begin() and begun.reward() is None and starter.counts["provider"] == 1
    words = (
        r"image_failed the Harbor task bad: the image of its Dockerfile cannot be built: (.|\n)*   ERROR: No .*absent"
    )
    assert re.match(words, told[0]) and told[0] == told[1]
    assert len(platform.server.lines) == 2, "the same build would fail again"
    platform.refuse("ImageBuildChainGet", 1, Status.NOT_FOUND)
    (other,) = read_tasks(write_task(tmp_path / "other", docker="FROM x\nRUN pip install -U absent\n"))
    with pytest.raises(BuildFailed, match="modal image logs im-"):
        provider.start(OWNER, box_recipes(other)[0], timeout_s=60)
    monkeypatch.setattr(sys, "argv", ["images", "modal", str(tmp_path / "tasks")])
    with pytest.raises(SystemExit) as ended:
        images.main()
    told = capsys.readouterr().out
    assert ended.value.code == 1 and "good: built" in told and "    ERROR: No matching distribution" in told
    monkeypatch.setattr(sys, "argv", ["images", "modal", str(tmp_path / "tasks"), "b*"])
    with pytest.raises(SystemExit) as ended:
        images.main()
    assert ended.value.code == 0 and capsys.readouterr().out == "good: built\n"


# -------------------------------------------------------------------------- E2B


@isolated
@pytest.mark.skipif(not E2B, reason="needs e2b (make test-boxes)")
def test_e2b_builds_a_tasks_template_and_its_boxes_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inner.extras.boxes import e2b_boxes

    monkeypatch.setattr(e2b_boxes, "ASK_S", 0.0)
    with E2bServer(tmp_path / "server") as server:
        provider = open_provider("e2b", **server.options)
        folder = write_task(tmp_path / "task", docker=REAL, test=JUDGE)
        env = environment(provider, folder)
        assert env.bash("pwd; cat made given.txt; cp given.txt out") == "/task\n42\ngiven"
        assert env.get_reward() == 1.0
        (row,) = make_rows(TaskSpec(f"harbor:{folder}", 1, 0))
        env.reset(**row)
        (template,) = server.templates.values()
        assert template["name"].startswith("diloco-") and template["fromImage"] == "ubuntu:24.04"
        env._end()
        provider.start(OWNER, BoxRecipe(base="rust:1.80"), timeout_s=60).stop()
        assert [one["fromImage"] for one in server.templates.values()] == ["ubuntu:24.04", "rust:1.80"]
        server.fail_build = "apt-get returned 100"
        for docker, why in (("FROM x\nRUN y\n", "apt-get returned 100"), ("FROM x\nFROM y\n", "does not read it")):
            (task,) = read_tasks(write_task(tmp_path / why[:3] / "bad", docker=docker))
            with pytest.raises(BuildFailed, match=f"the image of its Dockerfile cannot be built: .*{why}"):
                BoxStarter(provider).start(OWNER, box_recipes(task)[0])
        server.builds = False
        with pytest.raises(ProviderFailed, match=r"does not build a template: 404: .*task_options.image = \"NAME\""):
            provider.start(OWNER, BoxRecipe(base="rust:1.81"), timeout_s=60)
        provider.start(OWNER, BoxRecipe("its-own", base="rust:1.81"), timeout_s=60).stop()
        server.shutdown()
