"""ModalExecutor through the real SDK, against support/modal_server.py; what every platform must do is in the contract.

Here: what is Modal's own.  The app and its functions, crashes and time limits, the register of launches and a launcher
that dies at its worst moments, wrong input, the supervisor as a function, and one run of ToolWorld from end to end.
"""

# ruff: noqa: F811

import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import modal
import pytest
from packaging import markers

from diloco.audit.inner import recompute_offers
from diloco.process import exitcodes
from diloco.run.record import Run, read_run
from diloco.runlog.reader import SUPERVISOR, read_report
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Unavailable
from executors.platforms.on_modal import client, image
from executors.platforms.on_modal.app import CRASHES, app_name
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.on_modal.image import pinned_requirements
from executors.platforms.on_modal.kinds import USD_PER_HOUR, Kind
from executors.platforms.places import Place, build_executor, places_of
from executors.supervision.hosted import start_hosted, supervisor_spec
from executors.supervision.supervisor import Supervisor
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from tests.diloco.test_s3_fleet import downloaded
from tests.support.absent import HAS_TORCHFT, needs_torchft
from tests.support.audit import check_run
from tests.support.entrypoints import marks
from tests.support.modal_fixtures import (  # noqa: F401
    HOME,
    KEYS,
    ROOT,
    TOOLWORLD,
    WAIT_S,
    bucket,
    executor,
    founded,
    platform,
    run,
    spec,
    started,
    state,
    until,
)
from tests.support.modal_server import Line, ModalPlatform, forget_client
from tests.support.s3_server import S3Server

# -------------------------------------------------------------------- the app


@pytest.mark.slow
def test_one_app_per_run_with_a_function_per_kind_of_container(platform, executor, run, tmp_path) -> None:
    modal.Secret.objects.create("keys", {"STORE_KEY": "opensesame"}, allow_existing=True)
    first = spec(run, tmp_path, "environment", gpu=("H100", "a100-80gb"), timeout_s=3600, secrets=("keys",))
    (handle,) = executor.launch_replicas([first])
    executor.launch_replicas([spec(run, tmp_path, "returns", "r01")])  # another kind, later: the first one stays
    app = platform.server.deployed(app_name(run))
    functions = [platform.server.functions[f] for f in app.functions.values()]
    by_gpu = {tuple(f.gpus): f.definition for f in functions if f.definition.implementation_name == "replica"}
    assert set(by_gpu) == {("H100", "A100-80GB"), ("",)} and "supervise" in app.functions
    asked = by_gpu["H100", "A100-80GB"]
    assert (asked.timeout_secs, asked.retry_policy.retries, asked.single_use_containers) == (3600, 0, True)
    assert asked.startup_timeout_secs == 1800 and not by_gpu["",].secret_ids
    assert handle.usd_per_hour == pytest.approx(USD_PER_HOUR["H100"] + 4 * 0.0472 + 16 * 0.008)
    assert json.loads(json.dumps(handle.to_dict())) == handle.to_dict()
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert result.value["STORE_KEY"] == "opensesame" and result.value["DILOCO_PLACE"] == handle.place == "modal/r00.1"
    assert "MODAL_TOKEN_SECRET" not in result.value
    assert result.value["PYTHONPATH"].startswith(str(platform.server.folder / "mounts")), "the code that was shipped"


def test_the_image_is_what_runs_here_and_the_code_is_mounted(platform, executor, run, tmp_path) -> None:
    executor.launch_replicas([spec(run, tmp_path, "returns")])
    commands = [c for image in platform.server.images.values() for c in image.dockerfile_commands]
    install = next(c for c in commands if "uv pip install" in c)
    assert any("apt-get install" in c and "gcc" in c for c in commands), "else the codecs' kernels are not compiled"
    for name in ("torch", "trl", *["torchft"] * HAS_TORCHFT, "obstore", "transformers", "safetensors"):
        version = importlib.import_module("importlib.metadata").version(name).partition("+")[0]
        assert f"{name}=={version}" in install.replace("'", "").split()
    assert not [
        p for p in pinned_requirements() if "+" in p or p.startswith(("modal==", "pytest==", "serverless-diloco=="))
    ]
    files = {f.filename for mount in platform.server.mounts.values() for f in mount}
    assert {
        f"{HOME}/{name}" for name in ("diloco/demo.toml", "rendezvous/codecs/kernels/cpu.c", "inner/train/build.py")
    } <= files
    assert f"{HOME}/tests/support/entrypoints.py" in files and not [f for f in files if f.endswith(".pyc")]


@needs_torchft
def test_a_macs_image_has_the_packages_of_a_container(monkeypatch) -> None:
    """torchft has wheels for Linux on x86-64 alone: on a Mac it is not installed, and its marker is false."""
    here = pinned_requirements()
    assert any(one.startswith("torchft==") for one in here)
    mac = {**markers.default_environment(), "sys_platform": "darwin", "platform_machine": "arm64"}
    monkeypatch.setattr(markers, "default_environment", lambda: mac)
    assert pinned_requirements() == here
    installed = image._installed_version
    monkeypatch.setattr(image, "_installed_version", lambda name: None if name == "torchft" else installed(name))
    without = pinned_requirements()
    assert set(without) - set(here) == {"torchft<0.3,>=0.2"}
    assert {"torch", "trl", "obstore"} <= {one.partition("==")[0] for one in without}


@pytest.mark.slow
def test_an_image_of_ones_own(platform, run, tmp_path) -> None:
    before = set(platform.server.images)
    ModalExecutor(image="nvcr.io/nvidia/cuda:13.0.1-devel-ubuntu24.04").launch_replicas(
        [spec(run, tmp_path, "returns")]
    )
    built = [c for id in set(platform.server.images) - before for c in platform.server.images[id].dockerfile_commands]
    assert any("nvcr.io/nvidia/cuda" in c for c in built) and any("uv pip install" in c for c in built)
    complete = modal.Image.debian_slim().apt_install("git")
    ModalExecutor(image=complete).launch_replicas([spec(run, tmp_path, "returns", "r01")])
    assert any("apt-get" in c for image in platform.server.images.values() for c in image.dockerfile_commands)


def test_a_plan_asks_modal_who_we_are_where_and_for_each_secret(platform, executor, run, monkeypatch) -> None:
    """Before: no token, a wrong environment and a missing secret had a price each, and the run was founded."""
    asked = ReplicaSpec(run, "r00", secrets=("nope",))
    with pytest.raises(ExecutorError, match="Modal has no secret called 'nope'"):
        executor.plan([asked])
    monkeypatch.setenv("MODAL_ENVIRONMENT", "tpyo")
    with pytest.raises(ExecutorError, match="Modal has no environment 'tpyo'"):
        executor.plan([replace(asked, secrets=())])
    monkeypatch.delenv("MODAL_ENVIRONMENT")
    assert executor.plan([replace(asked, secrets=())]).lines
    monkeypatch.delenv("MODAL_TOKEN_ID")
    monkeypatch.delenv("MODAL_TOKEN_SECRET")
    forget_client()
    with pytest.raises(ExecutorError, match="Modal does not know who you are"):
        executor.plan([replace(asked, secrets=())])
    monkeypatch.undo()
    forget_client()


def test_names_of_apps() -> None:
    names = {app_name(run) for run in ("s3://b/runs/a", "s3://b/runs/b", "gs://b/runs/a", "s3://b/" + "x/" * 60)}
    assert len(names) == 4 and all(len(n) <= 64 and n.startswith("diloco-") for n in names)
    assert app_name("s3://b/runs/a").startswith("diloco-b-runs-a-")


@pytest.mark.parametrize("many", [3, pytest.param(32, marks=pytest.mark.slow)])
def test_many_are_launched_at_once(platform, executor, run, tmp_path, monkeypatch, many: int) -> None:
    """They take as many round trips as one: what is asked for every replica is in flight together."""
    server = platform.server
    monkeypatch.setattr("executors.platforms.on_modal.executor.ANSWER_S", WAIT_S)

    def requests(act: Callable[[], object]) -> Counter[str]:
        before = Counter(server.requests)
        act()
        return Counter(server.requests) - before

    def launch(first: int, end: int) -> None:
        handles = executor.launch_replicas([spec(run, tmp_path, "returns", f"r{i:02d}") for i in range(first, end)])
        assert len({h.native for h in handles} - {""}) == end - first

    platform.hold(True)  # this is about launching
    launch(0, 1)  # deploys
    assert requests(lambda: launch(1, 2)) == {"DictContents": 1, "FunctionMap": 1, "DictUpdate": 2}
    spawned = server.gather("FunctionMap", many)
    noted = server.gather("DictUpdate", many, lambda request: request.if_not_exists)  # the announcement is for all
    assert requests(lambda: launch(2, 2 + many)) == {"DictContents": 1, "FunctionMap": many, "DictUpdate": many + 1}
    handles = executor.find(run)
    looked = server.gather("FunctionGetOutputs", many), server.gather("DictContains", many)
    assert requests(lambda: pending(executor, handles)) == {"FunctionGetOutputs": many + 2, "DictContains": many + 2}
    assert [t.most for t in (spawned, noted, *looked)] == [many] * 4, "one waited for the other"


def pending(executor: ModalExecutor, handles: list[Handle]) -> None:
    assert {s.state for s in executor.poll(handles)} == {State.PENDING}


def test_prices(executor) -> None:
    def planned(**more: Any) -> float | None:
        return ModalExecutor(**more.pop("made", {})).plan([ReplicaSpec("s3://b/r", "r00", **more)]).usd_per_hour

    base = 4 * 0.0472 + 16 * 0.008  # at the hard limits: what is used is billed, too
    assert planned() == pytest.approx(base, abs=1e-3)
    assert planned(gpu=("T4", "H100")) == pytest.approx(3.95 + base, abs=1e-3)  # the dearest that it may become
    assert planned(gpu=("H100:8",)) == pytest.approx(8 * 3.95 + base, abs=1e-3)
    assert planned(made={"region": "eu", "gpu": "L4"}) == pytest.approx(1.75 * (0.80 + base), abs=1e-3)
    assert planned(made={"prices": {"h100": 1.0}}, gpu=("H100",)) == pytest.approx(1.0 + base, abs=1e-3)
    two = executor.plan([ReplicaSpec("s3://b/r", "r00"), ReplicaSpec("s3://b/r", "r01", gpu=("L4",))])
    assert two.usd_per_hour == pytest.approx(0.80 + 2 * base, abs=1e-3)
    assert "modal secret create" in two.lines[-1] and "2026-" in two.lines[-2]


# -------------------------------------------------------------------- crashes and limits


@pytest.mark.slow
def test_a_crashed_container_starts_again_and_a_crash_loop_ends(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    for n in range(1, CRASHES + 1):
        started(tmp_path, times=n)
        assert state(executor, handle) is State.RUNNING
        platform.crash(handle)
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert result.state is State.LOST and f"died {CRASHES} times" in result.reason
    assert len(marks(tmp_path, "start", "r00.1")) == CRASHES


@pytest.mark.slow
def test_preemptions_are_no_crashes(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "polite")])
    for n in range(1, CRASHES + 2):
        started(tmp_path, times=n)
        platform.preempt(handle)
    started(tmp_path, times=CRASHES + 2)
    (tmp_path / "go").touch()
    assert executor.collect([handle], timeout=WAIT_S)[0].ok


@pytest.mark.slow
def test_it_leaves_before_its_time_limit_to_be_started_again(executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "polite", timeout_s=4)])
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.RESUME)
    assert len(marks(tmp_path, "left", "r00.1")) == 1


@pytest.mark.slow
def test_a_replica_that_does_not_leave_is_ended_by_modal(executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "stubborn", timeout_s=4)])
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert result.state is State.FAILED and "time limit" in result.reason


# -------------------------------------------------------------------- the register of launches


@pytest.mark.slow
def test_of_two_calls_of_one_launch_one_runs(platform, executor, run, tmp_path) -> None:
    """The reply was lost before the first call could be noted, and that one begins when the second is noted."""
    executor.launch_replicas([spec(run, tmp_path, "returns", "r09")])
    platform.hold(True)
    platform.lose_reply()
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    two = [c for c in platform.server.calls.values() if b"waits" in c.input.args and run.encode() in c.input.args]
    assert len(two) == 2 and handle.native == two[1].id
    platform.hold(False)
    started(tmp_path)
    until(lambda: two[0].result is not None, "the call too many still runs")
    assert state(executor, handle) is State.RUNNING and len(marks(tmp_path, "start", "r00.1")) == 1


@pytest.mark.slow
def test_a_call_that_a_log_names_and_that_is_another_run_s_is_left_alone(platform, executor, run, tmp_path) -> None:
    (theirs,) = executor.launch_replicas([spec(f"{run}-two", tmp_path, "waits", "r01")])
    (ours,) = executor.launch_replicas([spec(run, tmp_path, "polite")])
    started(tmp_path)
    started(tmp_path, "r01.1")
    fresh = platform.executor()
    fresh.cancel([replace(theirs, run=run)], grace_s=0.0)
    fresh.poll([replace(theirs, run=run)])
    fresh.cancel([ours], grace_s=20.0)
    assert fresh.collect([ours], timeout=WAIT_S)[0].state is State.CANCELLED
    (tmp_path / "go").touch()
    assert executor.collect([theirs], timeout=WAIT_S)[0].ok
    fresh.close()


@pytest.mark.slow
def test_an_old_attempt_that_begins_late_goes(platform, executor, run, tmp_path) -> None:
    platform.hold(True)
    (old,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    (new,) = executor.launch_replicas([spec(run, tmp_path, "waits", attempt=2)])
    platform.hold(False)
    (result,) = executor.collect([old], timeout=WAIT_S)
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.FENCED)
    started(tmp_path, "r00.2")
    assert not marks(tmp_path, "start", "r00.1") and executor.find(run) == [new]


LAUNCHER = """
import sys, json
from executors.platforms.base import ReplicaSpec
from executors.platforms.on_modal.executor import ModalExecutor
specs = [ReplicaSpec.from_dict(raw) for raw in json.loads(sys.argv[1])]
print("launching", flush=True)
ModalExecutor().launch_replicas(specs)
print("launched", flush=True)
"""


def launcher(platform: ModalPlatform, specs: list[ReplicaSpec]) -> subprocess.Popen[str]:
    env = {**os.environ, **platform.environ, "PYTHONPATH": str(ROOT)}
    told = json.dumps([s.to_dict() for s in specs])
    return subprocess.Popen([sys.executable, "-c", LAUNCHER, told], env=env, stdout=subprocess.PIPE, text=True)


def check_after_death(platform: ModalPlatform, run: str, folder: Path, specs: list[ReplicaSpec]) -> None:
    """Another executor launches the same: each runs once, all are found, and all can be ended."""
    executor = platform.executor()
    handles = executor.launch_replicas(specs)
    for s in specs:
        started(folder, f"{s.slot}.1")
    assert platform.executor().find(run) == handles
    until(lambda: platform.live() == len(specs), "more containers than replicas")
    assert {s.state for s in executor.poll(handles)} == {State.RUNNING}
    assert all(len(marks(folder, "start", f"{s.slot}.1")) == 1 for s in specs)
    executor.shutdown(run)
    until(lambda: platform.live() == 0, "something was orphaned")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["FunctionMap", "AppPublish", "DictUpdate"])
def test_a_launcher_that_dies_at_its_worst_moment(platform, run, tmp_path, moment) -> None:
    """After the request was done and before any client heard of it: deployed, not spawned; spawned, not noted; …"""
    specs = [spec(run, tmp_path, "waits", f"r0{i}") for i in range(2)]
    process = launcher(platform, specs)
    platform.server.after(moment, process.kill)
    assert process.wait(WAIT_S) == -signal.SIGKILL
    check_after_death(platform, run, tmp_path, specs)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launcher_killed_at_ten_random_moments(platform, tmp_path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print("seed", seed)
    for i in range(10):
        folder = tmp_path / str(i)
        folder.mkdir()
        run = platform.url(f"{tmp_path.parent.name}/killed/{i}")
        specs = [spec(run, folder, "waits", f"r0{i}") for i in range(2)]
        process = launcher(platform, specs)
        assert process.stdout is not None and process.stdout.readline() == "launching\n"
        time.sleep(rng.uniform(0.0, 3.0))
        process.kill()
        process.wait()
        check_after_death(platform, run, folder, specs)


# -------------------------------------------------------------------- the way there


@pytest.mark.slow
def test_short_trouble_is_nothing_and_long_trouble_is_stale(platform, executor, run, tmp_path) -> None:
    platform.refuse("FunctionMap", 2)
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    started(tmp_path)
    assert state(executor, handle) is State.RUNNING
    platform.refuse("FunctionGetOutputs", 2)
    assert not executor.poll([handle])[0].stale
    platform.refuse("FunctionGetOutputs", 4)
    (status,) = executor.poll([handle])
    assert (status.state, status.stale) == (State.RUNNING, True) and "did not answer" in status.reason
    assert not executor.poll([handle])[0].stale


def test_a_service_that_is_away_is_told_before_anything_is_started(platform, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("executors.platforms.on_modal.client.PATIENCE_S", 0.0)
    platform.refuse("DictGetOrCreate", 4)
    with pytest.raises(Unavailable, match=r"Modal did not answer the request to prepare a launch .*Try again"):
        platform.executor().launch_replicas([spec(run, tmp_path, "waits")])


@pytest.mark.slow
def test_results_that_modal_has_lost(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "returns")])
    call = platform.server.calls[handle.native]
    until(lambda: call.result is not None, "no result")
    platform.server.calls.pop(handle.native)
    assert executor.poll([handle])[0].state is State.LOST


@pytest.mark.slow
def test_more_log_lines_than_one_answer_holds(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "returns")])
    executor.collect([handle], timeout=WAIT_S)
    call, app = platform.server.calls[handle.native], app_name(run)
    call.created -= 100  # as if it had begun so long ago, and had gone on to talk
    began, id = int(call.created * 1e9) + 1_000_000, platform.server.deployed(app).id
    platform.server.lines += [Line(began + i * 30_000_000, f"line {i}\n", id, "ta-x", call.id) for i in range(2500)]
    asked = platform.server.requests["AppFetchLogs"]
    assert [ln for ln in executor.logs(handle) if ln.startswith("line")] == [f"line {i}" for i in range(2500)]
    assert platform.server.requests["AppFetchLogs"] > asked + 1
    assert executor.logs(handle, 3) == executor.logs(handle)[-3:] == list(executor.follow(handle, 3))


@pytest.mark.slow
def test_following_from_the_tail_tells_nothing_older(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "speaks", kwargs={"lines": 100, "pause_at": 80})])
    until(lambda: executor.logs(handle, 1) == ["line 79"], "it did not speak")
    followed = executor.follow(handle, 2)
    first = next(followed)
    (tmp_path / "go").touch()
    assert [first, *followed] == [f"line {i}" for i in range(78, 100)]


# -------------------------------------------------------------------- wrong input


def test_without_the_sdk(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ExecutorError, match=r"pip install 'serverless-diloco\[serverless\]'"):
        ModalExecutor().launch_replicas([ReplicaSpec("s3://b/r", "r00")])


def test_without_credentials(platform, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("MODAL_TOKEN_SECRET", "wrong")
    forget_client()
    with pytest.raises(ExecutorError, match="`modal token new`"):
        ModalExecutor().launch_replicas([spec("s3://b/r", tmp_path, "waits")])
    env = {k: v for k, v in os.environ.items() if not k.startswith("MODAL_TOKEN")}
    told = json.dumps([ReplicaSpec("s3://b/r", "r00").to_dict()])
    done = subprocess.run([sys.executable, "-c", LAUNCHER, told], env=env, cwd=ROOT, capture_output=True, text=True)
    assert "`modal token new`" in done.stderr
    monkeypatch.undo()
    os.environ.update(platform.environ)
    forget_client()


def test_a_folder_of_this_machine(platform, executor, tmp_path) -> None:
    before = platform.server.requests.total()
    for here in (f"file://{tmp_path}", str(tmp_path), "memory://x"):
        with pytest.raises(ExecutorError, match=r"cannot reach it\. Put the run into a bucket"):
            executor.launch_replicas([ReplicaSpec(here, "r00")])
        assert executor.plan([ReplicaSpec(here, "r00")]).refused
    assert platform.server.requests.total() == before, "nothing was asked of Modal"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"gpu": ("H1000",)}, "no GPU called 'H1000'. It has T4, L4, A10, .* H100:8"),
        ({"gpu": ("A10:8",)}, "1 to 4 of A10"),
        ({"gpu": ("H100:x",)}, "1 to 8 of H100"),
        ({"gpu": ("H100:٣",)}, "1 to 8 of H100"),
        ({"timeout_s": 86401}, "1 s to 24 h"),
        ({"timeout_s": 0.5}, "1 s to 24 h"),
    ],
)
def test_what_modal_does_not_have(executor, more, match) -> None:
    wrong = ReplicaSpec("s3://b/r", "r00", **more)
    with pytest.raises(ExecutorError, match=match):
        executor.launch_replicas([wrong])
    assert executor.plan([wrong]).refused
    with pytest.raises(ExecutorError, match=match):
        ModalExecutor(**more)


def test_a_secret_that_is_missing(executor, run) -> None:
    with pytest.raises(ExecutorError, match=r"no secret called 'nowhere'.*`modal secret create nowhere AWS_ACCESS_KEY"):
        executor.launch_replicas([ReplicaSpec(run, "r00", secrets=("nowhere",))])
    assert executor.find(run) == []


def test_an_image_that_cannot_be_built(platform, executor, run, tmp_path) -> None:
    platform.server.build_fails = [f"step {i}" for i in range(30)] + ["No solution found: torch==99 is not there"]
    try:
        with pytest.raises(ExecutorError, match=r"(?s)could not build the image.*step 29.*No solution found") as told:
            executor.launch_replicas([spec(run, tmp_path, "waits")])
    finally:
        platform.server.build_fails = []
    assert "step 10" not in str(told.value) and "modal image logs im-" in str(told.value)
    assert executor.find(run) == [] and platform.live() == 0


@pytest.mark.slow
def test_a_store_that_cannot_be_reached_from_inside(executor, run) -> None:
    with S3Server(access_key="SOMEBODY") as s3:
        modal.Secret.objects.create("refused", {**KEYS, "AWS_ENDPOINT_URL": s3.endpoint}, allow_existing=True)
        (handle,) = executor.launch_replicas([ReplicaSpec(run, "r00", secrets=("refused",))])
        (result,) = executor.collect([handle], timeout=WAIT_S)
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.USER_ERROR)
    assert "from inside modal" in result.reason and result.reason in result.tail


@pytest.mark.slow
def test_code_that_does_not_import_in_the_container(platform, executor, run, tmp_path) -> None:
    executor.launch_replicas([spec(run, tmp_path, "returns", "r09")])  # deploys
    for function in platform.server.functions.values():
        if function.app.name == app_name(run):
            function.definition.module_name = "executors.gone"
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert result.state is State.FAILED and "No module named 'executors.gone'" in result.reason


# -------------------------------------------------------------------- a whole run


def preempt_r01(platform: Any, preempted: list[Handle]) -> Any:
    """A hook of the supervisor that preempts r01 once, in the middle of an outer step, and notes its handle."""

    def hook(supervisor: Supervisor, report: Any) -> None:
        handle, beat = supervisor.handle("r01"), report.beats.get("r01")
        if handle and beat and beat.phase == "train" and beat.step >= 1 and not preempted:
            preempted.append(handle)
            platform.preempt(handle)

    return hook


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_replicas_of_toolworld_one_preempted_and_no_bit_is_lost(platform, run, bucket, tmp_path) -> None:
    found = founded(run, bucket, tmp_path, inner=TOOLWORLD)
    preempted: list[Handle] = []
    executor = build_executor(read_control(found.store).places)
    outcome = Supervisor(found, executor, SystemClock(), each_tick=preempt_r01(platform, preempted)).supervise()
    assert outcome.code == 0, outcome.text + "".join(line.data for line in platform.server.lines[-60:])
    assert [h.attempt for h in executor.find(run) if h.slot == "r01"] == [1], "Modal restarts it, and we do not"
    assert platform.server.calls[preempted[0].native].starts == 2
    audited = check_run(downloaded(run, tmp_path / "bucket"), 4)
    assert {(step, slot) for step, slot in audited.listed if step == 3} == {(3, f"r0{i}") for i in range(3)}
    hosts = {json.loads(body)["host"] for body in bodies(found, "replicas/r01/")}
    assert hosts == {"modal/r01.1"}, "both lives tell the launch that they belong to"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_container_of_two_devices_is_one_replica_and_modal_restarts_it_whole(
    platform, run, bucket, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(Place, "devices", property(lambda place: 2))  # as --gpu H100:2; no GPU is here
    found = founded(run, bucket, tmp_path, inner=TOOLWORLD, fleet={"replicas": 2, "min_replicas": 2, "steps": 4})
    preempted: list[Handle] = []
    executor = build_executor(read_control(found.store).places)
    outcome = Supervisor(found, executor, SystemClock(), each_tick=preempt_r01(platform, preempted)).supervise()
    assert outcome.code == 0, outcome.text + "".join(line.data for line in platform.server.lines[-60:])
    assert platform.server.calls[preempted[0].native].starts == 2
    check_run(downloaded(run, tmp_path / "bucket"), 4)
    of_both_ranks = {step.samples["r00"] for step in read_report(found.store).steps}
    assert of_both_ranks == {2.0 * 2 * found.config.inner.batch_size}, "two ranks, two inner steps, a batch each"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actors_run_on_modal_and_an_audit_takes_their_steps_again(platform, run, bucket, tmp_path) -> None:
    """A replica and two actors, one of which Modal preempts: the platform starts it again as the same actor."""
    fleet = {"replicas": 1, "min_replicas": 1, "steps": 1000, "record_rollouts": True, "broadcast_weights": True}
    found = founded(run, bucket, tmp_path, inner={**TOOLWORLD, "batch_size": 64}, fleet={**fleet, "staleness": 1})
    places = read_control(found.store).places
    theirs = [replace(places_of(places)[0], actors=True, count=2).to_dict()]
    write_control(found.store, SystemClock(), places=[*places, *theirs], actors=2)
    preempted: list[Handle] = []

    def preempt_once(supervisor: Supervisor, report: Any) -> None:
        handle, beat = supervisor.handle("a00"), report.beats.get("a00")
        if handle and beat and beat.inner >= 1 and not preempted:
            preempted.append(handle)
            platform.preempt(handle)
        again = preempted and beat and beat.generation > 1 and beat.inner >= 1
        if again and report.wanted.steps == 1000:
            write_control(found.store, SystemClock(), steps=report.head + 2)

    executor = build_executor(read_control(found.store).places)
    outcome = Supervisor(found, executor, SystemClock(), each_tick=preempt_once).supervise()
    assert outcome.code == 0, outcome.text + "".join(line.data for line in platform.server.lines[-60:])
    report = read_report(found.store)
    assert [h.attempt for h in executor.find(run) if h.slot == "a00"] == [1], "Modal restarts it, and we do not"
    assert {x.slot for x in report.sessions} == {"r00", "a00", "a01"}
    assert sum(event["bundles"] for event in report.of_kind("rollouts_found")) >= 2
    assert not report.of_kind("rollouts_refused")
    again = recompute_offers(read_run(str(downloaded(run, tmp_path / "bucket"))))
    assert not again.off and not again.unchecked and again.equal == report.head, again


def bodies(run: Run, prefix: str) -> list[bytes]:
    return [run.store.get(key) or b"" for key in run.store.list(prefix)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_detached_supervisor_lives_on_modal_and_outlives_its_time_limit(
    platform, executor, run, bucket, tmp_path
) -> None:
    """No process of this machine is needed: a small function launches, watches, and is followed by the next one."""
    found = founded(run, bucket, tmp_path, fleet={"replicas": 2, "min_replicas": 2, "steps": 3})
    spec, replicas = supervisor_spec(executor.name, run, 1)
    first = executor.start_supervisor(replace(spec, timeout_s=20.0), replicas)
    until(lambda: platform.server.calls[first.native].container is not None, "it did not start")
    platform.hold(True)  # its replicas wait for a machine for longer than it lives
    assert first.slot == SUPERVISOR and first.usd_per_hour < 0.05
    assert start_hosted(executor, run) == first, "the one that runs already"
    until(lambda: any(h.attempt == 2 for h in executor.find(run) if h.slot == SUPERVISOR), "no second one", 180)
    platform.hold(False)
    assert executor.collect([first], timeout=WAIT_S)[0].exit_code == exitcodes.RESUME
    second = next(h for h in executor.find(run) if h.slot == SUPERVISOR)
    until(lambda: read_report(found.store).done, "the run did not end", 240)
    assert second.attempt >= 2
    assert all(h.attempt == 1 for h in executor.find(run) if h.slot.startswith("r0")), "nobody was launched twice"
    check_run(downloaded(run, tmp_path / "bucket"), 3)


def example(*more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modal", "run", "-m", "examples.modal_grpo", *more]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_modal_run_starts_shows_and_can_be_left(platform, executor, run, bucket, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("one plus one is two. " * 300)
    (tmp_path / "run.toml").write_text(
        'name = "test"\n[outer]\nsync_every = 2\nsnapshot_every = 2\n[fleet]\nreplicas = 2\nsteps = 3\n'
        '[inner]\nloop = "supervised"\nmodel = "tiny"\nbatch_size = 4\n'
        '[inner.data]\ntext = "text.txt"\ncontext_length = 16\n'
    )
    options = ["--run", run, "--secret", bucket.secret, "--replicas", "2", "--config", str(tmp_path / "run.toml")]
    left = example(*options, "--detach")
    assert left.returncode == 0, left.stdout + left.stderr
    assert "r01: a container on Modal, T4" in left.stdout and "ends by itself before $2.00" in left.stdout
    looked_on = example(*options)
    assert looked_on.returncode == 0 and "all 3 outer steps are committed" in looked_on.stdout, looked_on.stdout
    supervisors = [
        c for c in platform.server.calls.values() if c.function.definition.implementation_name == "supervise"
    ]
    assert len([c for c in supervisors if run.encode() in c.input.args]) == 1
    check_run(downloaded(run, tmp_path / "bucket"), 3)


@pytest.mark.slow
def test_modal_run_says_what_is_wrong_before_anything_is_rented(platform, bucket, tmp_path) -> None:
    done = example("--run", f"file://{tmp_path}/run", "--secret", "keys")
    assert done.returncode == 1 and "replicas on modal cannot reach it" in done.stderr and not list(tmp_path.iterdir())
    done = example("--run", platform.url("dear"), "--secret", bucket.secret, "--gpu", "B200:8", "--max-usd", "0.5")
    assert done.returncode == 1 and "would pass max_usd = 0.5" in done.stderr
    assert platform.live() == 0 and platform.server.deployed(app_name(platform.url("dear"))) is None


def test_kinds_are_plain_data() -> None:
    kind = Kind(("H100",), 60.0, ("keys",), "", 2.0, 1024)
    assert Kind.from_dict(json.loads(json.dumps(kind.to_dict()))) == kind
    assert kind.function == Kind.from_dict(json.loads(json.dumps(kind.to_dict()))).function != kind.small.function


def test_a_proxy_that_the_client_would_not_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with modal 1.6.4: without python-socks, a proxy is like no network, and the client's words name none."""
    monkeypatch.setenv("HTTPS_PROXY", "http://joe:s3cr3t@127.0.0.1:9")
    monkeypatch.setattr(client, "find_spec", lambda name: None)
    with pytest.raises(Unavailable) as told, client.translated_errors("check the login"):
        raise modal.exception.ConnectionError("Could not connect to the Modal server.")
    assert "(HTTPS_PROXY is set). Modal's client uses a proxy only with pip install 'modal[api-" in str(told.value)
    assert "s3cr3t" not in str(told.value)
