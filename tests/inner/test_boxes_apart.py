"""Harbor tasks whose verifier has a box of its own, as `harbor init` writes them (harbor 0.26)."""

import gzip
import io
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inner.errors import InnerError
from inner.extras.boxes import artifacts as module
from inner.extras.boxes.artifacts import collect
from inner.extras.boxes.box import Box, BoxGone, BoxOwner, BoxRecipe, ProviderFailed, Ran
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.starting import BoxStarter, open_provider
from inner.extras.boxes.world import HarborEnvironment, harbor_environment
from inner.tasks.harbor import build_fault, load_harbor, make_rows, read_tasks
from inner.tasks.spec import TaskSpec
from inner.usercode.attempts import AtMostWorst
from tests.inner.test_boxes import APART, write_task
from tests.support.modal_server import ModalPlatform
from tests.support.planted_boxes import VirtualClock, namespaces_work

bubblewrapped = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
OUT = 'artifacts = ["/app/out", {source = "/app/more", exclude = ["*.log"]}]\n' + APART
OWNER = BoxOwner("r", "0", 1, "g")


def environment(provider: Any, folder: Path) -> HarborEnvironment:
    clock = VirtualClock()
    env = harbor_environment(BoxStarter(provider, clock=clock, sleep=clock.sleep, seed=0))()
    (row,) = make_rows(TaskSpec(f"harbor:{folder}", 1, 0))
    env.reset(**row)
    return env


def judge(body: str) -> str:
    """A verifier that gives 1 if `body`, shell commands, succeeds, and else 0."""
    return f"cd /app; if {{ {body}; }} > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


@bubblewrapped
def test_the_verifier_gets_the_artifacts_and_nothing_else(tmp_path: Path) -> None:
    """It judged in the episode's box, where the model had changed what it wanted."""
    test = judge('[ "$(cat out)" = 42 ] && [ "$(cat given.txt)" = given ] && [ ! -e evil ] && ls /logs/artifacts/a')
    provider = LocalBoxes(tmp_path / "boxes")
    env = environment(provider, write_task(tmp_path / "task", test=test, toml=OUT))
    env.bash("echo 42 > out; echo no > given.txt; touch evil; mkdir -p /logs/artifacts; touch /logs/artifacts/a")
    env.bash("mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh")
    assert env.get_reward() == 1.0 and not provider.find({})
    env = environment(provider, tmp_path / "task")
    assert env.get_reward() == 0.0, "no artifact: the verifier judges what is there"


@bubblewrapped
def test_a_folder_replaces_that_of_the_verifiers_box(tmp_path: Path) -> None:
    docker = "FROM x\nCOPY repo /app/more\nWORKDIR /app\n"
    body = "[ ! -e more/given.txt ] && [ -x more/run ] && [ ! -e more/a.log ] && [ ! -e more/passwd ] && cat more/sub/b"
    provider = LocalBoxes(tmp_path / "boxes")
    env = environment(provider, write_task(tmp_path / "task", test=judge(body), toml=OUT, docker=docker))
    env.bash(
        "cd more; rm given.txt; touch run a.log; chmod +x run; ln -s /etc/passwd passwd; mkdir sub; ln -s ../run sub/b"
    )
    assert env.get_reward() == 1.0


@bubblewrapped
def test_a_file_may_come_where_a_folder_was_and_the_other_way_round(tmp_path: Path) -> None:
    """The artifacts could not be unpacked, which counted as the provider's fault: a way out for a policy that fails."""
    docker = "FROM x\nCOPY repo /app/more\nCOPY repo/given.txt /app/out\nWORKDIR /app\n"
    provider, test = LocalBoxes(tmp_path / "boxes"), judge("[ -f more ] && [ -f out/a ]")
    env = environment(provider, write_task(tmp_path / "task", test=test, toml=OUT, docker=docker))
    env.bash("rm -r more out; touch more; mkdir out; touch out/a")
    assert env.get_reward() == 1.0 and env._starter.counts["provider"] == 0


@bubblewrapped
@pytest.mark.parametrize("own", [True, False])
def test_a_box_with_tests_of_its_own_keeps_them_from_the_model(tmp_path: Path, own: bool) -> None:
    test = judge('cat /tests/hidden && [ "$A$B" = 12 ] && grep 42 out')
    toml = '[environment.env]\nA = "0"\n[verifier.environment]\nworkdir = "/app"\nenv = {A = "1"}\n'
    toml = f'{OUT}{toml}[verifier.env]\nB = "2"\n'
    folder = write_task(tmp_path / "task", test=test, toml=toml)
    (folder / "tests/hidden").write_text("")
    if own:
        (folder / "tests/Dockerfile").write_text("FROM python:3.12-slim\nWORKDIR /app\nCOPY . /tests/\n")
    (task,) = read_tasks(folder)
    assert load_harbor(task.dump()) == task and bool(task.tests) is not own
    env = environment(LocalBoxes(tmp_path / "boxes"), folder)
    env.bash("echo 42 > out; find / -name hidden > seen 2>/dev/null; [ -s seen ] && rm out")
    assert env.get_reward() == 1.0


def test_images_of_the_verifier(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task", toml='[environment]\ndocker_image = "a"\n' + APART)
    (task,) = read_tasks(folder)
    assert task.apart is not None and (task.apart.image, task.apart.files) == ("a", None) and task.tests
    (folder / "tests/Dockerfile").write_text("FROM x\nRUN pip install pytest\n")
    (task,) = read_tasks(folder)
    assert task.apart is not None and task.apart.build and not task.build and task.tests == {}
    words = (
        r"tests/Dockerfile has the line 'RUN .* docker_image of \[verifier.environment\] .*options.verifier_image = "
    )
    assert re.match(words, build_fault("hf", task.apart.odd, of_verifier=True))
    (task,) = read_tasks(folder, {"verifier_image": "b"})
    assert task.apart is not None and (task.apart.image, task.image, task.tests) == ("b", "a", {})
    (folder / "tests/Dockerfile").write_text("FROM x\n")
    with pytest.raises(InnerError, match=r"copies no /tests/test.sh, the verifier. Copy it: COPY . /tests/"):
        read_tasks(folder)
    (folder / "task.toml").write_text('[verifier.environment]\ndocker_image = "c"\nallow_internet = false\n')
    (task,) = read_tasks(folder)
    assert task.apart is not None and task.apart.image == "c" and task.apart.offline and not task.offline
    shutil.rmtree(folder / "tests")
    assert read_tasks(folder) == [task], "its image has the tests"


class Dying(LocalBoxes):
    """Boxes for verifiers, of which the first ones die at the verifier, or at their start.  There is room for one."""

    deaths, refusals, judged = 0, 0, 0

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> Any:
        if self.find({}):
            raise ProviderFailed("the account's one box still runs")
        made = super().start(owner, recipe, timeout_s=timeout_s)
        if "fresh" not in owner.place:
            return made
        if self.refusals:
            made.stop()
            raise ProviderFailed("full")
        self.judged += 1
        run = made.exec

        def exec_or_die(command: str, **how: Any) -> Any:
            if "test.sh" in command and self.judged <= self.deaths:
                raise BoxGone("lost")
            return run(command, **how)

        made.exec = exec_or_die  # type: ignore[method-assign]
        return made


@bubblewrapped
@pytest.mark.parametrize(
    ("deaths", "refusals", "reward", "blamed"),
    [(0, 0, 1.0, (0, 0)), (1, 0, 1.0, (0, 0)), (2, 0, 0.0, (1, 0)), (3, 0, None, (0, 1)), (0, 1, None, (0, 1))],
)
def test_a_lost_box_of_the_verifier_costs_nothing_and_a_broken_one_its_rollout(
    tmp_path: Path, deaths: int, refusals: int, reward: float | None, blamed: tuple[int, int]
) -> None:
    """Two deaths with the artifacts and none without: the artifacts broke it."""
    provider = Dying(tmp_path / "boxes")
    env = environment(provider, write_task(tmp_path / "task", test=judge("grep 42 out"), toml=OUT))
    provider.deaths, provider.refusals = deaths, refusals
    env.bash("echo 42 > out")
    found = env.get_reward()
    assert found == reward and isinstance(found, AtMostWorst) == bool(blamed[0])
    counts = env._starter.counts
    assert (counts["policy"], counts["provider"]) == blamed and not provider.find({})


@pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")
def test_artifacts_go_through_modals_sdk(tmp_path: Path) -> None:
    with ModalPlatform() as platform:
        folder = write_task(tmp_path / "task", test=judge("grep 42 out && [ ! -e evil ]"), toml=OUT)
        env = environment(open_provider("modal"), folder)
        env.bash("echo 42 > out; touch evil")
        assert env.get_reward() == 1.0 and platform.server.boxes == {}


# ------------------------------------------------------------------- archives of hostile boxes


class Forged:
    """An episode's box whose tar is the given archive."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive

    def exec(self, command: str, *, user: str, timeout_s: float) -> Any:
        return Ran(0, "/tmp/artifact-1\n")

    def read(self, path: str) -> bytes:
        return self._archive


def archive_of(*members: tuple[str, Callable[[tarfile.TarInfo], Any], bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, change, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            change(member)
            made.addfile(member, io.BytesIO(data))
    return out.getvalue()


def link(to: str, kind: bytes = tarfile.SYMTYPE) -> Callable[[tarfile.TarInfo], None]:
    def change(member: tarfile.TarInfo) -> None:
        member.type, member.linkname = kind, to

    return change


def kind(of: bytes) -> Callable[[tarfile.TarInfo], None]:
    return lambda member: setattr(member, "type", of)


PLAIN = kind(tarfile.REGTYPE)


@pytest.mark.parametrize(
    ("members", "kept"),
    [
        ([("app/out", PLAIN, b"1")], ["app/out"]),
        ([("/app/out/a", PLAIN, b"1"), ("app/out/./b", PLAIN, b"2")], ["app/out/a", "app/out/b"]),
        (
            [("app/out/../../tests/test.sh", PLAIN, b"1"), ("tests/test.sh", PLAIN, b"1"), ("app/outer", PLAIN, b"1")],
            [],
        ),
        ([("app/out/a", link("/etc/passwd"), b""), ("app/out/b", link("../../../x"), b"")], []),
        ([("app/out/a", link("b"), b""), ("app/out/b", link("a"), b"")], []),
        (
            [("app/out/b", PLAIN, b"1"), ("app/out/a", link("app/out/b", tarfile.LNKTYPE), b"")],
            ["app/out/b", "app/out/a"],
        ),
        ([("app/out/d", kind(tarfile.CHRTYPE), b""), ("app/out/f", kind(tarfile.FIFOTYPE), b"")], []),
        ([("app/out", link("/tests"), b""), ("app/out/test.sh", PLAIN, b"1")], ["app/out/test.sh"]),
        ([("app/out/a", PLAIN, b"1" * 600), ("app/out/b", PLAIN, b"1" * 600)], ["app/out/a"]),
    ],
    ids=["file", "names", "elsewhere", "links out", "circle", "hard link", "devices", "link as folder", "too much"],
)
def test_of_a_forged_archive_only_files_below_the_path_are_kept(
    members: Any, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST", 1000)
    box: Any = Forged(archive_of(*members))
    with tarfile.open(fileobj=io.BytesIO(collect(box, [["/app/out"]], print).tar)) as made:
        assert made.getnames() == kept and all(member.isreg() and not member.mode & 0o7000 for member in made)


def nested(of: bytes, deep: int) -> bytes:
    """An archive of headers that each announce another one."""
    return archive_of(("x", kind(of), b""))[:512] * deep


@pytest.mark.parametrize(
    "archive",
    [
        b"", b"x" * 2000, archive_of(("app/out", PLAIN, b"1" * 5000))[:3000],
        gzip.compress(archive_of(("app/out", PLAIN, b"1"))), nested(b"x", 3000), nested(b"L", 3000),
    ],
    ids=["empty", "noise", "cut", "compressed", "pax", "long names"],
)  # fmt: skip
def test_a_broken_archive_has_no_artifacts(archive: bytes) -> None:
    box: Any = Forged(archive)
    with tarfile.open(fileobj=io.BytesIO(collect(box, [["/app/out"]], print).tar)) as made:
        assert made.getnames() == []


@bubblewrapped
def test_a_large_artifact_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 1 << 20)
    told = list[str]()
    box: Box = LocalBoxes(tmp_path / "boxes").start(OWNER, BoxRecipe(), timeout_s=1)
    box.exec("head -c 2000000 /dev/zero > /app/out; mkdir /app/b; echo 1 > /app/b/c", user="user", timeout_s=30)
    found = collect(box, [["/app/out"], ["/app/b"], ["/app/absent"]], told.append)
    with tarfile.open(fileobj=io.BytesIO(found.tar)) as made:
        assert made.getnames() == ["app/b/c"] and found.places == {"/app/b": True}
    assert told == ["the artifact /app/out has 1 MiB or more, so the verifier did not get it."]
    assert box.exec("ls /tmp", user="user", timeout_s=30).output == ""
