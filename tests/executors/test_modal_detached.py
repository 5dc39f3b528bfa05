"""Detached runs on Modal, in containers that hold what Modal's image holds: the packages, the mounts, not the project.

The server (support/modal_server.py) fails a test in which a container deploys.  Here: the command line and README's
example to the end of a run with a preempted and a killed replica, supervisors that cannot start, are killed for good,
or are silent, and the machine from which another supervisor takes over.
"""

# ruff: noqa: F811

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import modal
import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import SUPERVISOR, Report, read_report
from executors.platforms.base import ReplicaSpec
from executors.platforms.on_modal import app as modal_app
from executors.platforms.on_modal.app import app_name
from executors.platforms.on_modal.deployment import SUPERVISOR_CRASHES
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.places import Place
from executors.supervision import hosted, lease
from rendezvous import layout
from rendezvous.agreement.membership import read_beat, write_control
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.open import open_store
from tests.diloco.test_s3_fleet import downloaded
from tests.support.audit import check_run
from tests.support.modal_fixtures import ROOT, bucket, executor, founded, platform, run, until  # noqa: F401
from tests.support.modal_server import ModalPlatform

CONFIG = """
name = "test"
[outer]
sync_every = 2
snapshot_every = 2
[fleet]
replicas = 3
min_replicas = 2
steps = {steps}
[inner]
loop = "supervised"
model = "tiny"
data.text = "text.txt"
batch_size = 4
data.context_length = 16
"""


def config(folder: Path, steps: int) -> Path:
    (folder / "text.txt").write_text("one plus one is two. " * 300)
    (folder / "run.toml").write_text(CONFIG.format(steps=steps))
    return folder / "run.toml"


def diloco(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "executors.cli.main", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400)


def words(done: subprocess.CompletedProcess[str]) -> str:
    return f"rc {done.returncode}\n{done.stdout}{done.stderr}"


def log_of_all(platform: ModalPlatform) -> str:
    return "".join(f"{line.task_id[-3:]} {line.data}" for line in platform.server.lines[-120:])


def disturbed(platform: ModalPlatform, executor: ModalExecutor, url: str, steps: int) -> Report:
    """One replica preempted, another one killed without a word, once both train; -> the run at its end."""
    store, done = open_store(url), list[str]()
    for slot, act in (("r01", platform.preempt), ("r02", platform.crash)):
        until(lambda s=slot: _takes_part(store, s), lambda s=slot: f"{s} does not train:\n{log_of_all(platform)}", 240)
        act(next(h for h in executor.find(url) if h.slot == slot))
        done.append(slot)
    until(lambda: read_report(store).done, lambda: f"the run did not end:\n{log_of_all(platform)}", 400)
    report = read_report(store)
    for slot in done:
        assert sum(x.slot == slot for x in report.sessions) >= 2, f"{slot} was not started again"
    assert report.head == steps
    return report


def _takes_part(store: Any, slot: str) -> bool:
    """It trains, or waits for the others between two of its inner phases (a beat shows one moment of five seconds)."""
    beat = read_beat(store, slot)
    return beat is not None and beat.phase in ("train", "wait")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_train_detached_reaches_the_end_without_the_project_in_any_container(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    where = ("--run", run, "--executor", "modal", "--secret", bucket.secret)
    started = diloco("train", str(config(tmp_path, 12)), *where, "--max-usd", "2", "--yes", "--detach")
    assert started.returncode == 0, words(started) + log_of_all(platform)
    supervisor = read_beat(open_store(run), SUPERVISOR)
    assert supervisor is not None and supervisor.host == "modal/supervisor.1", "it returned before anybody supervised"
    again = diloco("resume", run, "--detach", "--yes")
    assert again.returncode == 0 and "on modal/supervisor.1 supervises this run already" in again.stdout, words(again)
    disturbed(platform, executor, run, 12)
    assert not platform.server.deploys
    check_run(downloaded(run, tmp_path / "bucket"), 12)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_a_bucket_reaches_the_end_as_setup_types_it(platform, executor, tmp_path) -> None:
    """`diloco setup modal` ends with this command: the run is on Modal's dict and volume, and there is no secret."""
    url = "modal://diloco/first"
    where = ("--run", url, "--executor", "modal", "--max-usd", "2", "--yes", "--detach")
    started = diloco("train", str(config(tmp_path, 60)), *where)
    assert started.returncode == 0, words(started) + log_of_all(platform)
    disturbed(platform, executor, url, 60)
    assert not platform.server.deploys
    assert "outer step 60 of 60" in (shown := diloco("status", url)).stdout, words(shown)
    check_run(downloaded(url, tmp_path / "bucket"), 60)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_reaches_the_end_without_the_project_in_any_container(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    """README's `modal run -m examples.modal_grpo`, with three replicas."""
    command = [sys.executable, "-m", "modal", "run", "-m", "examples.modal_grpo", "--run", run, "--secret"]
    command += [bucket.secret, "--gpu", "none", "--config", str(config(tmp_path, 12))]
    looking = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    disturbed(platform, executor, run, 12)
    said, _ = looking.communicate(timeout=120)
    assert looking.returncode == 0 and "all 12 outer steps are committed" in said, said
    assert not platform.server.deploys
    check_run(downloaded(run, tmp_path / "bucket"), 12)


@pytest.mark.slow
def test_the_last_words_of_a_supervisor_that_cannot_start(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    """Its secret has keys that the bucket refuses: said here, by the exit code, and in status."""
    wrong = {"AWS_ACCESS_KEY_ID": "SOMEBODY", "AWS_SECRET_ACCESS_KEY": "x", "AWS_ENDPOINT_URL": bucket.endpoint}
    modal.Secret.objects.create("wrong-keys", {**wrong, "AWS_REGION": "us-east-1"}, allow_existing=True)
    bucket.secret = "wrong-keys"
    founded(run, bucket, tmp_path)
    resumed = diloco("resume", run, "--detach", "--yes")
    assert resumed.returncode == 1 and "its supervisor, modal (fc-" in resumed.stdout, words(resumed)
    assert "AccessDenied" in resumed.stdout or "403" in resumed.stdout, words(resumed)
    status = diloco("status", run)
    assert "no supervisor; the last one ended with code 1" in status.stdout, words(status)
    assert diloco("resume", run, "--detach", "--yes").returncode == 1, "and the next try starts another one"
    assert [h.attempt for h in executor.find(run) if h.slot == SUPERVISOR] == [2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_supervisor_that_died_in_silence_is_succeeded_from_another_machine(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    """A claim and a beat without a goodbye are not a sign of life; status says since when it is silent."""
    found = founded(run, bucket, tmp_path, fleet={"replicas": 2, "min_replicas": 2, "steps": 2})
    old = lease.Lease.seize(found.store, SystemClock())
    dead = read_beat(found.store, SUPERVISOR)
    assert dead is not None and old.generation == 1
    silent = replace(dead, host="modal/supervisor.1", pid=7, at=dead.at - 2 * 3600)
    found.store.put(layout.beat_key(SUPERVISOR), silent.encode())
    far = {"DILOCO_PLACE": "another-machine", "HOME": str(tmp_path)}
    status = diloco("status", run, **far)
    assert "last heard 2 h 00 min ago" in status.stdout and "resume" in status.stdout, words(status)
    resumed = diloco("resume", run, "--detach", "--yes", **far)
    assert resumed.returncode == 0 and "resumed" in resumed.stdout, words(resumed) + log_of_all(platform)
    assert "supervised by modal (fc-" in resumed.stdout and "supervises this run already" not in resumed.stdout
    until(lambda: read_report(found.store).done, f"the run did not end:\n{log_of_all(platform)}", 240)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_supervisor_that_was_killed_eleven_times_is_succeeded_from_another_machine(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    found = founded(run, bucket, tmp_path, fleet={"replicas": 2, "min_replicas": 2, "steps": 100_000})
    far = {"DILOCO_PLACE": "another-machine", "HOME": str(tmp_path)}
    assert diloco("resume", run, "--detach", "--yes").returncode == 0
    (first,) = (h for h in executor.find(run) if h.slot == SUPERVISOR)
    call = platform.server.calls[first.native]
    for n in range(1, SUPERVISOR_CRASHES + 2):
        until(lambda n=n: call.starts >= n and (call.result is not None or _began(executor, run, n)), f"no start {n}")
        if call.result is None:
            platform.crash(first)
            until(lambda n=n: call.starts > n or call.result is not None, f"start {n} was not killed")
    until(lambda: call.result is not None, "the call went on")
    status = executor.poll([first])[0]
    assert status.state.ended and f"died {SUPERVISOR_CRASHES} times" in status.reason
    resumed = diloco("resume", run, "--detach", "--yes", **far)
    assert resumed.returncode == 0 and "supervised by modal (fc-" in resumed.stdout, words(resumed)
    write_control(found.store, SystemClock(), steps=read_report(found.store).head + 2)
    until(lambda: read_report(found.store).done, f"the run did not end:\n{log_of_all(platform)}", 240)
    assert [h.attempt for h in executor.find(run) if h.slot == SUPERVISOR] == [2]


def _began(executor: ModalExecutor, url: str, n: int) -> bool:
    entries = modal.Dict.from_name(app_name(url))
    return entries.contains(f"start/{SUPERVISOR}.1/{n}")


@pytest.mark.slow
def test_a_gpu_that_is_not_there_ends_the_run_before_a_slot_is_claimed(
    platform,
    executor,
    run,
    bucket,
    tmp_path,
) -> None:
    """The image's torch is for the CPU alone: it would train there, at the GPU's price."""
    found = founded(run, bucket, tmp_path)
    write_control(found.store, SystemClock(), places=[Place("modal", gpu=("T4",), secrets=(bucket.secret,)).to_dict()])
    platform.server.has_gpus = False
    try:
        until(lambda: diloco("resume", run, "--detach", "--yes").returncode in (0, 2), "it did not start")
        until(lambda: _ended(executor, run), f"the supervisor goes on:\n{log_of_all(platform)}", 120)
    finally:
        platform.server.has_gpus = True
    status = diloco("status", run)
    assert "the last one ended with code 2" in status.stdout, words(status)
    (end,) = read_report(found.store).of_kind("gave_up_on")
    assert "a GPU was asked for (T4)" in " ".join(end["tail"]) and "a build for the CPU alone" in " ".join(end["tail"])
    assert not [key for key in found.store.list("replicas/") if "supervisor" not in key], "a slot was claimed"


@pytest.mark.slow
def test_the_gpus_name_is_in_status(platform, executor, run, bucket, tmp_path) -> None:
    found = founded(run, bucket, tmp_path, fleet={"replicas": 2, "min_replicas": 2, "steps": 2})
    write_control(found.store, SystemClock(), places=[Place("modal", gpu=("T4",), secrets=(bucket.secret,)).to_dict()])
    assert diloco("resume", run, "--detach", "--yes").returncode == 0
    until(lambda: read_report(found.store).done, f"the run did not end:\n{log_of_all(platform)}", 240)
    assert {x.device for x in read_report(found.store).sessions} == {"NVIDIA Stub 16GB"}
    told = json.loads(diloco("status", run, "--json").stdout)
    assert {session["device"] for session in told["sessions"]} == {"NVIDIA Stub 16GB"}


def _ended(executor: ModalExecutor, url: str) -> bool:
    (supervisor,) = (h for h in executor.find(url) if h.slot == SUPERVISOR)
    return executor.poll([supervisor])[0].state.ended


@pytest.mark.parametrize(
    ("code", "next_one", "cut_off", "again"),
    [
        (exitcodes.RESUME, True, True, False), (exitcodes.RESUME, False, True, True), (-9, True, True, True),
        (exitcodes.DONE, True, False, False),
    ],
)  # fmt: skip
def test_modal_is_asked_to_start_a_supervisor_again_that_has_no_successor(
    monkeypatch: pytest.MonkeyPatch, code: int, next_one: bool, cut_off: bool, again: bool
) -> None:
    """Before: a failed handover and a killed supervisor ended the call as well as a finished run."""
    found = {modal_app.NEXT_SUPERVISOR: lambda *_: next_one, modal_app.CUT_OFF: lambda *_: cut_off}
    monkeypatch.setattr(modal_app, "load_name", found.__getitem__)
    monkeypatch.setattr(modal_app, "replica", lambda raw, note: {"exit_code": code, "reason": "its end"})
    if again:
        with pytest.raises(RuntimeError, match="Modal starts"):
            modal_app.supervise({"run": "modal://x/y"}, {})
    else:
        assert modal_app.supervise({"run": "modal://x/y"}, {})["exit_code"] == code


class Entries(dict[str, Any]):
    """Modal's dict, without Modal."""

    def put(self, key: str, value: Any, skip_if_exists: bool = False) -> bool:
        return False if skip_if_exists and key in self else not self.update({key: value})

    def contains(self, key: str) -> bool:
        return key in self


URL = "modal://x/y"
NOTE = modal_app.Note("register", 0.0, 0.1, crashes=10)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> modal_app.Register:
    """The register of a container that runs the call fc-1."""
    found = modal_app.Register(Entries())
    here = SimpleNamespace(current_function_call_id=lambda: "fc-1", exception=modal.exception)
    monkeypatch.setattr(modal_app, "sdk", lambda: here)
    monkeypatch.setattr(modal_app.Register, "open", lambda name, create: found)
    return found


def test_a_supervisor_whose_successor_was_announced_and_never_spawned_supervises_again(
    register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: Modal's next try found the announcement, and ended as well as a finished run; nobody supervised."""
    ran = list[int]()
    monkeypatch.setattr(
        modal_app, "run_replica", lambda raw, *_, **__: ran.append(1) or {"exit_code": exitcodes.RESUME}
    )
    monkeypatch.setattr(modal_app, "load_name", lambda name: lambda *_: register.announce({SUPERVISOR: 2}))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="Modal starts this one again"):
            modal_app.supervise(ReplicaSpec(URL, SUPERVISOR, 1).to_dict(), NOTE.to_dict())
    assert len(ran) == 3
    register.announce({"r00": 2})
    assert modal_app.replica(ReplicaSpec(URL, "r00", 1).to_dict(), NOTE.to_dict())["exit_code"] == exitcodes.FENCED


def test_of_a_supervisor_and_its_successor_the_run_s_lease_lets_one_act(monkeypatch: pytest.MonkeyPatch) -> None:
    """The successor's spawn had no answer, so both run."""
    store = MemoryStore()
    monkeypatch.setattr(lease, "host_name", lambda: "modal/supervisor.2")
    second = lease.Lease.take(store, SystemClock())
    second.beat("left")
    monkeypatch.setattr(lease, "host_name", lambda: "modal/supervisor.1")
    with pytest.raises(lease.Supervised, match="belongs to a later launch"):
        lease.Lease.take(store, SystemClock())


def test_a_handover_passes_over_a_successor_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It started late, found the supervisor alive and ended: its number starts nobody any more."""
    asked = list[int]()
    ended = SimpleNamespace(slot=SUPERVISOR, attempt=2)
    start = lambda spec, replicas: asked.append(spec.attempt) or SimpleNamespace(native="fc-3" * (len(asked) > 1))  # noqa: E731
    there = SimpleNamespace(find=lambda run: [ended], start_supervisor=start)
    monkeypatch.setattr(hosted, "make_executor", lambda place: there)
    monkeypatch.setattr(hosted, "supervisor_spec", lambda _, run, n: (ReplicaSpec(run, SUPERVISOR, n), []))
    monkeypatch.setattr(hosted, "AGAIN_S", 0.0)
    assert hosted.start_next("modal", {}, ReplicaSpec(URL, SUPERVISOR, 1).to_dict())
    assert asked == [3, 3], "tried again under the same number"


def test_a_supervisor_that_died_too_often_is_not_started_again(register, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: Modal was asked for nine more containers, each of which only counted the deaths."""
    monkeypatch.setattr(modal_app, "load_name", lambda name: lambda *_: True)
    end = modal_app.supervise(ReplicaSpec(URL, SUPERVISOR, 1).to_dict(), replace(NOTE, crashes=0).to_dict())
    assert end["exit_code"] is None and "died 0 times" in end["reason"]
