"""Ends on Modal: a preemption that says so, `stop --purge`, and a service that is away for a moment.

Through the real SDK against support/modal_server.py.  The client itself tries a request four times, in about a second.
"""

# ruff: noqa: F811

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import modal
import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from diloco.runlog.sessions import restarted_by
from diloco.runlog.summary import summary
from executors.cli import main as cli
from executors.cli.looking import status as watch
from executors.platforms.base import Handle, ReplicaSpec, Unavailable
from executors.platforms.on_modal import client as modal_client
from executors.platforms.on_modal import executor as on_modal_executor
from executors.platforms.on_modal.app import Register, app_name
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.places import Place
from executors.supervision.shutdown import where_run_stays
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.support.entrypoints import marks
from tests.support.modal_fixtures import (  # noqa: F401
    ROOT,
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
from tests.support.world import World

TRIES = 4  # of the client, of one request


# -------------------------------------------------------------------- preempted


@pytest.mark.parametrize(
    ("host", "successor", "platform_"),
    [
        ("modal/r00.1", "modal/r00.1", "Modal"),
        ("hf-jobs/r00.2", "hf-jobs/r00.2", "Hugging Face"),
        ("elsewhere/r00.1", "elsewhere/r00.1", "elsewhere"),
        ("modal/r00.1", "modal/r00.2", ""),  # the supervisor launched another one
        ("modal/r00.1", "supervisor/r00.2", ""),  # its slot was taken from it
        ("laptop", "laptop", ""),  # a process of a machine
    ],
)
def test_two_sessions_of_one_launch_have_a_restart_between_them(host: str, successor: str, platform_: str) -> None:
    assert restarted_by(host, "r00", successor) == platform_


def test_a_preempted_session_is_not_said_to_have_left(tmp_path: Path) -> None:
    world = World(tmp_path).started()
    world.cloud.preempt("r00")
    assert world.cloud.restart("r00", 1)
    world.pass_time(5)
    report = read_report(world.run.store)
    (line,) = (line for line in watch.status_table(report) if line.startswith("  r00-1"))
    assert "cloud, started again" in line or "started again by cloud" in line, line
    (session,) = (x for x in watch.status_dict(report, 0.0)["sessions"] if (x["slot"], x["generation"]) == ("r00", 1))
    assert session["end"] in line and session["end"] in summary(report)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_status_says_that_modal_preempted_a_replica_and_started_it_again(
    platform, run, bucket, tmp_path, capsys
) -> None:
    found = founded(run, bucket, tmp_path, fleet={"replicas": 1, "min_replicas": 1, "steps": 400})
    made = ModalExecutor(secrets=[bucket.secret])
    publish = ReplicaSpec(run, "publish", entrypoint="executors.supervision.supervisor:publish_model", argv=(run,))
    made.collect(made.launch_replicas([publish]), timeout=120)
    (handle,) = made.launch_replicas([ReplicaSpec(run, "r00", argv=(run, "--slot", "r00"))])
    until(lambda: read_report(found.store).head > 0, "it does not train", 120)
    platform.preempt(handle)
    until(lambda: len(read_report(found.store).sessions) == 2, "it was not started again", 120)
    assert cli.main(["status", run]) == 0
    told = capsys.readouterr().out
    assert "r00-1     preempted by Modal, started again at " in told and "r00-1     left" not in told, told
    assert cli.main(["status", run, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sessions"][0]["end"] == "preempted by Modal, started again"


# -------------------------------------------------------------------- stop --purge


def on_modal(run: str, bucket: Any, folder: Path) -> Any:
    """A founded run with a launch that waits for a machine, as the register has it."""
    found = founded(run, bucket, folder, fleet={"replicas": 1, "min_replicas": 1})
    made = ModalExecutor(secrets=[bucket.secret])
    made.launch_replicas([spec(run, folder, "polite")])
    started(folder)
    return found


@pytest.mark.slow
def test_stop_purge_removes_app_and_dict_and_says_that_the_run_stays(platform, run, bucket, tmp_path, capsys) -> None:
    found = on_modal(run, bucket, tmp_path)
    name = app_name(run)
    assert cli.main(["stop", run, "--grace", "0.5"]) == 0, capsys.readouterr()
    assert "removed" not in capsys.readouterr().out and any(n == name for n, _ in platform.server.dicts.values())
    assert cli.main(["stop", run, "--grace", "0.5", "--purge"]) == 0, capsys.readouterr()
    told = capsys.readouterr().out
    assert f"removed the app {name} from Modal" in told and f"removed the dict {name} from Modal" in told, told
    assert f"the run itself stays in {run}" in told
    assert platform.server.deployed(name) is None and not any(n == name for n, _ in platform.server.dicts.values())
    assert platform.live() == 0 and found.store.get(layout.RUN)
    assert cli.main(["stop", run, "--grace", "0.5", "--purge"]) == 0
    assert "no platform keeps anything of this run" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_is_purged_while_somebody_may_live(platform, run, bucket, tmp_path, capsys, monkeypatch) -> None:
    on_modal(run, bucket, tmp_path)
    monkeypatch.setattr("executors.supervision.shutdown.CANCELLED_S", 0.5)
    monkeypatch.setattr(on_modal_executor, "_cancel_call", lambda *_, **__: True)  # Modal does not act on it
    assert cli.main(["stop", run, "--grace", "0.2", "--purge"]) == 1
    told = capsys.readouterr()
    assert "nothing was purged" in told.err and "removed" not in told.out
    assert platform.server.deployed(app_name(run)) is not None


@pytest.mark.slow
def test_a_call_that_begins_after_the_purge_goes(platform, executor, run, tmp_path) -> None:
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    started(tmp_path)
    modal.Dict.objects.delete(app_name(run))
    platform.crash(handle)  # Modal starts it again
    until(lambda: platform.server.calls[handle.native].result is not None, "it runs without a register")
    assert len(marks(tmp_path, "start", "r00.1")) == 1
    assert not any(name == app_name(run) for name, _ in platform.server.dicts.values()), "it made the register anew"


def test_what_is_kept_of_a_run_inside_modal_is_named() -> None:
    told = where_run_stays("modal://lab/first")
    assert "`modal dict delete lab`" in told and "`modal volume delete lab`" in told and "every other run" in told
    assert "`modal dict delete lab --env dev`" in where_run_stays("modal://lab/first?environment=dev")
    assert where_run_stays("s3://b/r") == "the run itself stays in s3://b/r"


@pytest.mark.slow
def test_a_run_inside_modal_outlives_its_purge(platform, tmp_path, capsys, bucket) -> None:
    url = "modal://lab/first"
    found = founded(url, bucket, tmp_path, fleet={"replicas": 1, "min_replicas": 1})
    write_control(found.store, SystemClock(), places=[Place("modal").to_dict()])
    made = ModalExecutor()
    made.collect(made.launch_replicas([spec(url, tmp_path, "returns")]), timeout=WAIT_S)
    assert cli.main(["stop", url, "--grace", "0.5", "--purge"]) == 0, capsys.readouterr()
    told = capsys.readouterr().out
    assert (
        f"removed the dict {app_name(url)}" in told and "the run itself stays, in Modal's Dict and Volume 'lab'" in told
    )
    assert open_store(url).get(layout.RUN)


# -------------------------------------------------------------------- a service that is away for a moment


ASKED = ("DictGetOrCreate", "DictContents", "AppCreate", "AppPublish", "FunctionGet", "FunctionMap", "DictUpdate")


@pytest.mark.slow
@pytest.mark.parametrize("method", ASKED)
def test_a_second_without_modal_is_waited_out_wherever_a_launch_meets_it(
    platform, run, tmp_path, method, monkeypatch
) -> None:
    monkeypatch.setattr("executors.platforms.on_modal.client.FIRST_PAUSE_S", 0.05)
    asked = platform.server.requests[method]
    platform.refuse(method, TRIES + 1)  # more than the client's own tries
    made = ModalExecutor()
    (handle,) = made.launch_replicas([spec(run, tmp_path, "returns")])
    (result,) = made.collect([handle], timeout=WAIT_S)
    assert result.ok, result
    assert platform.server.requests[method] > asked + TRIES and len(marks(tmp_path, "start", "r00.1")) == 1


@pytest.mark.slow
def test_a_launch_without_an_answer_is_nobodys_fault(platform, run, tmp_path, monkeypatch) -> None:
    """Three ends by a replica's own fault in a row end a run; a service that was away is none of them."""
    made = ModalExecutor()
    made.launch_replicas([spec(run, tmp_path, "returns", "r09")])
    monkeypatch.setattr("executors.platforms.on_modal.client.PATIENCE_S", 0.0)
    platform.refuse("FunctionMap", TRIES)
    with pytest.raises(Unavailable, match="gave no answer to its launch"):
        made.launch_replicas([spec(run, tmp_path, "returns")])


@pytest.mark.slow
def test_a_container_waits_out_a_second_without_modal(platform, run, tmp_path) -> None:
    made = ModalExecutor()
    platform.hold(True)
    (handle,) = made.launch_replicas([spec(run, tmp_path, "returns")])
    platform.refuse("DictUpdate", TRIES + 1)
    platform.hold(False)
    (result,) = made.collect([handle], timeout=WAIT_S)
    assert result.ok, result
    assert Register.open(app_name(run)).crashes(spec(run, tmp_path, "returns"), 2) == 1, "one container began, once"


def diloco(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executors.cli.main", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_command_waits_out_a_second_without_modal_and_longer_trouble_is_no_mistake_of_the_user(
    platform, run, bucket, tmp_path, capsys, monkeypatch
) -> None:
    founded(run, bucket, tmp_path)
    for method in ("DictGetOrCreate", "DictContents"):
        platform.refuse(method, TRIES + 1)
        stopped = diloco("stop", run, "--grace", "0.2")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    monkeypatch.setattr("executors.platforms.on_modal.client.PATIENCE_S", 0.0)
    platform.refuse("DictGetOrCreate", TRIES)
    assert cli.main(["resume", run, "--detach", "--yes"]) == exitcodes.GAVE_UP == 75
    assert "Modal did not answer" in capsys.readouterr().err
    platform.server.faults.clear()


def test_long_trouble_is_said(platform, run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("executors.platforms.on_modal.client.PATIENCE_S", 0.3)
    platform.refuse("DictGetOrCreate", 40)
    with pytest.raises(Unavailable, match=r"Modal did not answer the request to prepare a launch .*Try again"):
        ModalExecutor().launch_replicas([spec(run, tmp_path, "waits")])
    platform.server.faults.clear()


def test_a_message_names_the_request_that_was_not_answered(run, monkeypatch) -> None:
    """Before: "nothing was started", also after a stop."""
    executor = ModalExecutor()
    asked = {
        "stop the run's app": lambda: executor.shutdown(run),
        "remove the run's app": lambda: executor.purge(run),
        "end the run's calls": lambda: executor.sweep(run),
        "renew the lease": lambda: executor.renew([Handle(run, "r00", 1, "modal")], 1.0),
    }

    def silent(act: Any, clock: Any) -> Any:
        raise modal.exception.ConnectionError("gone")

    with monkeypatch.context() as patched:
        for module in (on_modal_executor, modal_client):
            patched.setattr(module, "ask_patiently", silent)
        patched.setattr(executor, "find", lambda run: [])
        for request, act in asked.items():
            with pytest.raises(Unavailable, match=rf"did not answer the request to {request} \(gone\). Try again"):
                act()
