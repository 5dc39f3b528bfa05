"""A run whose episodes have boxes: what `diloco plan` refuses, and that `diloco stop` leaves no box."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.run.config import RunConfig
from diloco.run.record import read_run
from diloco.runlog.reader import read_report
from executors.cli.looking.box_costs import BoxCosts, box_costs
from executors.platforms.on_host.executor import claimed_process, newest_claims
from executors.platforms.places import Place
from executors.preflight.needs import box_faults
from executors.preflight.needs.box_faults import check_boxes, check_tasks, refuse_unpriced
from executors.preflight.quote import fitted_places
from executors.preflight.run_url import UsageError
from executors.supervision import boxes
from executors.supervision.money.budget import Budget
from inner.errors import InnerError
from inner.extras.boxes.e2b_boxes import E2bBoxes
from inner.extras.boxes.local import LocalBoxes
from inner.extras.boxes.modal_boxes import ModalBoxes
from inner.settings.task import SamplingSettings
from inner.tasks.spec import PRICED, PROVIDERS
from tests.executors.test_preflight import Told, plan
from tests.inner.test_boxes import write_task
from tests.inner.test_toolworld import small_folder
from tests.support.e2b_server import E2bServer
from tests.support.hf_boxes import BoxHub
from tests.support.modal_server import ModalPlatform
from tests.support.planted_boxes import namespaces_work, write_bwrap

RUN = '[inner]\nmodel = "toolworld"\n[inner.data]\ntask = "harbor:tasks"\n[inner.sampling]\nboxes = "{boxes}"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN.format(boxes="local"))
    write_task(tmp_path / "tasks/one")
    return tmp_path


@pytest.fixture
def bwrap(tmp_path: Path) -> str:
    return f"{write_bwrap(tmp_path / 'bin')}:/usr/bin:/bin"


HELD_OUT = '\n[eval]\ntask = "harbor:tasks"\ntask_size = 9\nevery = 2\n'


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What plan says to two tasks, of which one is trained on, with links; once: it builds a trainer for it."""
    folder = tmp_path_factory.mktemp("planned")
    write_task(folder / "tasks/one")
    write_task(folder / "tasks/two")
    (folder / "tasks/two/instruction.md").write_text("another one")
    for i in range(5):
        (folder / f"tasks/one/tests/{i}.txt").symlink_to("../instruction.md")
    config = RUN.format(boxes="local").replace('"harbor:tasks"', '"harbor:tasks"\ntask_size = 1') + HELD_OUT
    (folder / "run.toml").write_text(config)
    return plan(folder, PATH=f"{write_bwrap(folder / 'bin')}:/usr/bin:/bin")


def test_a_run_toml_is_all_that_a_user_writes(planned: Told) -> None:
    assert planned.code == 0 and "harbor:tasks" in planned.err and "nothing was started" in planned.out


def test_a_task_without_a_verifier_is_named(folder: Path, bwrap: str) -> None:
    (folder / "tasks/one/tests/test.sh").unlink()
    told = plan(folder, PATH=bwrap)
    assert told.code == 2 and "tasks/one has no verifier: tests/test.sh is missing" in told.err


def test_a_task_that_no_local_box_holds_is_named(folder: Path, bwrap: str) -> None:
    (folder / "tasks/one/environment/Dockerfile").write_text("FROM x\nWORKDIR /usr/src/app\n")
    told = plan(folder, PATH=bwrap)
    assert told.code == 2 and "the Harbor task one: a local box has this machine's /usr" in told.err


@pytest.mark.parametrize(("provider", "refused"), [("hf", True), ("e2b", False), ("local", False)])
def test_a_task_without_a_network_needs_a_provider_that_can_do_without(
    folder: Path, provider: str, refused: bool
) -> None:
    (folder / "tasks/one/task.toml").write_text("[environment]\nallow_internet = false\n")
    inner = {"model": "toolworld", "data": {"task": "harbor:tasks"}, "sampling": {"boxes": provider}}
    config = RunConfig.from_dict({"inner": inner}, folder)
    words = "the Harbor task one: a box on Hugging Face always has a network"
    with pytest.raises(InnerError, match=words) if refused else nullcontext():
        check_tasks(config)


@pytest.mark.parametrize("provider", ["modal", "e2b", "hf", "local"])
def test_an_image_is_built_by_a_provider_that_can(folder: Path, provider: str) -> None:
    (folder / "tasks/one/environment/Dockerfile").write_text("FROM x\nRUN apt-get update\n")
    data = {"task": "harbor:tasks", "task_options": {"without": ["a b"]}, "task_size": 9}
    config = RunConfig.from_dict(
        {"inner": {"model": "toolworld", "data": data, "sampling": {"boxes": provider}}}, folder
    )
    if provider in ("hf", "local"):
        words = (
            f"the Harbor task one: environment/Dockerfile has the line 'RUN apt-get update', and boxes of {provider}"
        )
        with pytest.raises(InnerError, match=words):
            check_tasks(config)
        return
    note = next(note for note in check_tasks(config) if "Dockerfiles" in note)
    assert f"{provider} builds the images of 1 Dockerfiles" in note
    assert note.endswith(f"boxes.images {provider} {folder}/tasks 'a b' --size 9`")


def test_links_that_no_box_gets_are_named(planned: Told) -> None:
    assert planned.code == 0 and "boxes do not get these links of Harbor tasks" in planned.out, planned
    assert "tasks/one/tests/0.txt" in planned.out and "2.txt and 2 more. If a task needs such a link" in planned.out


@pytest.mark.slow  # as the one above, with another number
def test_a_link_that_no_box_gets_is_named(folder: Path, bwrap: str) -> None:
    (folder / "tasks/one/tests/0.txt").symlink_to("../instruction.md")
    told = plan(folder, PATH=bwrap)
    assert told.code == 0 and "tasks/one/tests/0.txt. If a task needs such a link" in told.out, told


def test_held_out_tasks_are_others_and_need_boxes_too(folder: Path, bwrap: str, planned: Told) -> None:
    assert planned.code == 0, planned
    assert "eval.task: 1 rows that are among the training prompts were left out" in planned.err, planned
    bare = f"[inner]\nmodel = 'toolworld'\n{HELD_OUT}"
    (folder / "run.toml").write_text(bare)
    assert "eval.task = 'harbor:tasks' runs in boxes" in plan(folder, PATH=bwrap).err


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"local"', '"nowhere"', "inner.sampling.boxes = 'nowhere' is not known. Use one of: local, e2b"),
        (
            'boxes = "local"',
            "tool_workers = 2",
            "inner.data.task = 'harbor:tasks' runs in boxes. Set, e.g., inner.sampling",
        ),
        ('task = "harbor:tasks"', "", "inner.sampling.boxes = 'local' has no Harbor tasks"),
        ("harbor:tasks", "harbor:absent", "absent has no Harbor task"),
        ('"harbor:tasks"', '"harbor:tasks"\ntask_options = {color = 1}', "Harbor tasks have no option 'color'"),
    ],
)
def test_settings_that_cannot_work(folder: Path, bwrap: str, old: str, new: str, says: str) -> None:
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace(old, new))
    assert says in plan(folder, PATH=bwrap).err


def test_local_boxes_without_bubblewrap(folder: Path) -> None:
    told = plan(folder, PATH=str(folder))
    assert told.code == 2 and 'boxes = "local" needs `bwrap`, which is not on the PATH' in told.err


def test_a_provider_without_its_package_or_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here, far = [Place("local")], [Place("hf-jobs")]
    monkeypatch.setattr(box_faults.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InnerError, match=r'"e2b": the package e2b is not installed here. `pip install e2b`'):
        check_boxes("e2b", here, {})
    with pytest.raises(InnerError, match="not in the image on hf-jobs"):
        check_boxes("e2b", far, {})
    monkeypatch.setattr(box_faults.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(InnerError, match="E2B_API_KEY is not set"):
        check_boxes("e2b", here, {})
    assert check_boxes("e2b", here, {"E2B_API_KEY": "k"}) == []
    with pytest.raises(InnerError, match="replicas on hf-jobs need E2B_API_KEY"):
        check_boxes("e2b", far, {"E2B_API_KEY": "k"})
    assert check_boxes("e2b", [Place("hf-jobs", secrets=("E2B_API_KEY",))], {}) == []
    assert check_boxes("e2b", [Place("modal", secrets=("mine",))], {}) == [
        "not checked: that the Modal secret mine holds E2B_API_KEY"
    ]


def test_replicas_elsewhere_get_the_providers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from executors.preflight.needs import task_packages

    monkeypatch.setattr(task_packages.metadata, "version", lambda name: "2.63.0")
    monkeypatch.setattr(task_packages, "_is_local", lambda name: False)
    config = RunConfig.from_dict({"inner": {"data": {"task": "harbor:tasks"}, "sampling": {"boxes": "e2b"}}})
    (place,) = fitted_places([Place("modal")], config)
    assert place.options["pip"] == ["e2b==2.63.0"]


# -------------------------------------------------------------------- kill -9, then stop


LIVE = RUN.replace(
    '"toolworld"', '"{model}"\nbatch_size = 4\n[outer]\nsync_every = 1\n[fleet]\nreplicas = 1\nsteps = 1'
) + ("num_generations = 4\ntool_workers = 4\nmax_completion_length = 24\n")
real = pytest.mark.skipif(not namespaces_work(), reason="unshare may not make namespaces here")


@pytest.fixture(
    params=["local", "e2b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("modal", "hf"))], ids=str
)
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, dict[str, str], Callable[[], int]]]:
    """-> its name, the variables that lead to it, a function that counts its live boxes."""
    if request.param == "local":
        env = {"PATH": f"{write_bwrap(tmp_path / 'bin')}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
        yield "local", env, lambda: len(list(tmp_path.glob("diloco-boxes-*/*/box.json")))
        return
    if request.param == "modal":
        with ModalPlatform() as modal:
            yield "modal", modal.environ, lambda: len(modal.server.boxes)
        return
    if request.param == "hf":
        with BoxHub() as hub:
            yield "hf", hub.environ, hub.live_boxes
        return
    pytest.importorskip("e2b", reason="make test-boxes has it")
    with E2bServer(tmp_path / "server") as server:
        url = server.options["api_url"]
        env = {"E2B_API_KEY": server.options["api_key"], "E2B_API_URL": url, "E2B_SANDBOX_URL": url}
        yield "e2b", {**env, "E2B_HTTP_VERSION": "1.1"}, lambda: len(server.boxes)
        server.shutdown()


@real
@pytest.mark.slow
def test_a_killed_replica_leaves_no_box_after_stop(
    tmp_path: Path, provider: tuple[str, dict[str, str], Callable[[], int]]
) -> None:
    name, env, count = provider
    write_task(tmp_path / "tasks/one", test="sleep 1000\n")  # the boxes live as long as the verifier
    (tmp_path / "run.toml").write_text(LIVE.format(boxes=name, model=small_folder()))
    url, env = str(tmp_path / "run"), {**os.environ, **env}
    command = [sys.executable, "-m", "executors.cli"]
    train = [*command, "train", str(tmp_path / "run.toml"), "--run", url]
    with subprocess.Popen(train, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env) as launcher:
        _wait(lambda: count() == 4 or launcher.poll() is not None)
        launcher.kill()
    for claim in newest_claims(read_run(url).store):
        if (process := claimed_process(url, claim)) is not None:
            os.kill(process.pid, signal.SIGKILL)
    assert count() == 4, "boxes whose replica is gone"
    other = subprocess.run([*command, "stop", url, "--json"], capture_output=True, text=True, env=env, timeout=120)
    boxes = next(end for end in json.loads(other.stdout)["ends"] if end["name"] == "boxes")
    assert boxes["live"] is False and boxes["text"].startswith("0 boxes left") and "4 stopped" in boxes["text"]
    assert other.returncode == 0 and count() == 0
    assert len(read_run(url).record.nonce) > 8, "the label that they had"


@real
@pytest.mark.slow
def test_a_run_to_its_end_says_that_no_box_is_left(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/one", test="echo $((RANDOM % 2)) > /logs/verifier/reward.txt\n")
    (tmp_path / "run.toml").write_text(LIVE.format(boxes="local", model=small_folder()))
    env = {**os.environ, "PATH": f"{write_bwrap(tmp_path / 'bin')}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command = [
        sys.executable,
        "-m",
        "executors.cli",
        "train",
        str(tmp_path / "run.toml"),
        "--run",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = read_report(read_run(str(tmp_path / "run")).store)
    (swept,) = [event["text"] for event in report.events if event["event"] == "boxes_swept"]
    assert swept == "0 boxes left on this machine, 0 stopped"
    asked = subprocess.run([*command[:3], "costs", str(tmp_path / "run"), "--json"], capture_output=True, env=env)
    used = json.loads(asked.stdout)["boxes"]
    assert (used["provider"], used["usd"]) == ("local", 0.0) and used["boxes"] >= 4 and used["hours"] > 0
    assert list(tmp_path.glob("diloco-boxes-*/*/box.json")) == []


def test_box_hours_and_dollars_are_summed() -> None:
    one = {"event": "boxes_used", "boxes": 3, "box_s": 1800.0}
    forged = {"event": "boxes_used", "boxes": "3", "box_s": None}
    sampling: dict[str, Any] = {"boxes": "hf"}
    found = box_costs(sampling, [one, one, {"event": "step"}, forged], 0.01)
    assert found is not None and found == BoxCosts("hf", 6, 1.0, 0.01)
    assert found.line == "  boxes      hf              6    1.00     0.01"
    flavored = {**one, "usd_per_hour": None}  # of an environment file with options={"flavor": …}
    unpriced = box_costs(sampling, [{**one, "usd_per_hour": 0.01}, flavored], 0.0)
    assert unpriced is not None and unpriced.usd is None and "not in the sum" in unpriced.line
    sampling["boxes"] = "e2b"
    unpriced = box_costs(sampling, [one], 0.0)
    assert unpriced is not None and unpriced.usd is None and "inner.sampling.box_usd_per_hour" in unpriced.line
    sampling["box_usd_per_hour"] = 0.1
    assert (priced := box_costs(sampling, [one], 0.05)) is not None and priced.usd == 0.05
    assert box_costs({}, [one], 0.0) is None is box_costs({"boxes": 1}, [one], 0.0)


def test_the_providers_with_a_price_are_those_that_the_core_knows() -> None:
    kinds = {"local": LocalBoxes, "e2b": E2bBoxes, "modal": ModalBoxes}
    for name, kind in kinds.items():
        assert (kind.price_per_hour is not None) == (name in PRICED)
    assert set(PROVIDERS) == {*kinds, "hf"} and "hf" in PRICED  # of the flavor that a run uses (hf_boxes.py)


@pytest.mark.slow
def test_a_budget_that_cannot_count_the_boxes_is_refused_before_the_start(folder: Path) -> None:
    told = SamplingSettings(boxes="e2b")
    with pytest.raises(UsageError, match=r"max_usd = 5 cannot count boxes of e2b.*Set inner\.sampling\.box_usd"):
        refuse_unpriced(told, Budget(max_usd=5))
    refuse_unpriced(told, Budget(max_hours=5))
    refuse_unpriced(told, Budget(max_usd=5, allow_unknown_price=True))
    refuse_unpriced(replace(told, box_usd_per_hour=0.1), Budget(max_usd=5))
    refuse_unpriced(replace(told, boxes="hf"), Budget(max_usd=5))
    (folder / "run.toml").write_text(RUN.format(boxes="modal"))
    refused = plan(folder, "--max-usd", "5", MODAL_TOKEN_ID="i", MODAL_TOKEN_SECRET="s")
    assert refused.code == 2 and "cannot count boxes of modal" in refused.err


@real
@pytest.mark.slow
def test_the_boxes_of_a_run_count_for_its_spending_limit(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/one", test="echo 1 > /logs/verifier/reward.txt\n")
    settings = LIVE.format(boxes="local", model=small_folder()).replace("steps = 1", "steps = 500")
    (tmp_path / "run.toml").write_text(f"{settings}box_usd_per_hour = 100000.0\n")
    env = {**os.environ, "PATH": f"{write_bwrap(tmp_path / 'bin')}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    command, url = [sys.executable, "-m", "executors.cli"], str(tmp_path / "run")
    train = [*command, "train", str(tmp_path / "run.toml"), "--run", url, "--max-usd", "1"]
    done = subprocess.run(train, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode != 0 and "would pass max_usd = 1" in done.stdout + done.stderr, done.stdout + done.stderr
    asked = subprocess.run([*command, "costs", url, "--json"], capture_output=True, env=env)
    found = json.loads(asked.stdout)
    assert (
        found["usd"] == pytest.approx(found["usd_boxes"], abs=1e-3) and found["usd_boxes"] == found["boxes"]["usd"] > 1
    )


def test_a_sweep_that_proves_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(
        config=SimpleNamespace(inner=SimpleNamespace(sampling=SimpleNamespace(boxes="e2b"))),
        record=SimpleNamespace(nonce="n0"),
    )
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    swept = boxes.sweep_boxes(run)  # neither the package nor the key is here
    assert not swept.none_left and "boxes of E2B need" in swept.text
    assert "Try again: `python -m inner.extras.boxes.sweep e2b n0`, or look at e2b's console" in swept.text
    monkeypatch.setattr(boxes, "_ask", lambda command: {"stopped": 1, "left": 2})
    assert boxes.sweep_boxes(run).text.startswith("2 boxes left. Try again")


def _wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)
