"""The short form: names, arguments per rank, a block that ends what it started, no orphan of a killed script."""

# ruff: noqa: F811

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diloco.process import processes
from examples.toy_platform.toy import ToyExecutor
from executors import LocalProcessExecutor
from executors.cli import main as cli
from executors.cli.looking.short_runs import ShortRun
from executors.platforms import short_form
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status
from executors.platforms.container import run_replica
from executors.platforms.on_modal.app import app_name
from executors.platforms.on_modal.executor import ModalExecutor
from rendezvous.stores.memory import MemoryStore
from tests.support import entrypoints
from tests.support.cloud import Cloud, CloudExecutor
from tests.support.entrypoints import marks
from tests.support.fakes import ManualClock
from tests.support.hf_server import HFPlatform
from tests.support.modal_fixtures import ROOT, executor, platform, run, spec, started, until  # noqa: F401
from tests.support.modal_server import ModalPlatform

ENTRY = "tests.support.entrypoints"

# -------------------------------------------------------------------- names and arguments


@pytest.mark.parametrize(
    "entrypoint",
    [lambda: 1, ModalExecutor.poll, 7, type("Here", (), {"__module__": "__main__"})],
    ids=["a lambda", "a method", "a number", "a class of the script"],
)
def test_what_no_container_can_import_is_refused_with_the_way_out(entrypoint) -> None:
    with pytest.raises(ValueError, match=r"Move it into a module of yours and name it"):
        short_form.entrypoint_name(entrypoint)


def test_a_function_of_a_module_is_taken_by_its_name() -> None:
    assert short_form.entrypoint_name(entrypoints.returns) == f"{ENTRY}:returns"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([{"x": 1}], "2 ranks are launched, and the list has 1"),
        ([1, 2], r"2 values \(types: int\)"),
        ({"x": object()}, "go to other machines as JSON"),
    ],
)
def test_arguments_that_cannot_be_dealt_out_are_refused(arguments, word) -> None:
    with pytest.raises(ValueError, match=word):
        short_form.arguments_per_rank(arguments, 2)


def test_such_a_launch_is_refused_as_every_other() -> None:
    with LocalProcessExecutor() as here, pytest.raises(ExecutorError, match="2 ranks are launched"):
        here.launch_replicas(n_replicas=2, entrypoint=f"{ENTRY}:returns", entrypoint_args=[{}])


def test_each_rank_has_arguments_of_its_own_and_a_name_takes_them_up_again(tmp_path: Path) -> None:
    each = [{"folder": str(tmp_path), "who": f"r{i}", "value": i} for i in range(2)]
    asked = {"n_replicas": 2, "entrypoint": entrypoints.returns, "entrypoint_args": each, "run": tmp_path.as_uri()}
    with LocalProcessExecutor() as first, LocalProcessExecutor() as second:
        handles = first.launch_replicas(**asked)
        assert [r.value["value"] for r in first.collect(handles, 60)] == [0, 1]
        assert [r.value["value"] for r in second.collect(second.launch_replicas(**asked), 60)] == [0, 1]
    assert len(marks(tmp_path, "start", "r0")) == 1


def test_an_exit_code_of_the_users_is_no_word_of_ours(tmp_path: Path) -> None:
    """Before: "exit code 3 (fenced)"."""
    args = {"folder": str(tmp_path), "who": "r0", "code": 3}
    with LocalProcessExecutor() as here:
        handles = here.launch_replicas(n_replicas=1, entrypoint=entrypoints.exits, entrypoint_args=args)
        (result,) = here.collect(handles, 60)
    assert (result.exit_code, result.reason) == (3, "exit code 3")
    kwargs = {"folder": str(tmp_path), "who": "r0", "code": 3}
    assert (
        run_replica(ReplicaSpec("", "r00", entrypoint=f"{ENTRY}:exits", kwargs=kwargs).to_dict(), "x")["reason"]
        == "exit code 3"
    )


# -------------------------------------------------------------------- which processes end together


def test_a_block_ends_what_it_launched_whatever_happens_in_it(tmp_path: Path) -> None:
    args = {"folder": str(tmp_path), "who": "r0"}
    handles = list[Handle]()
    with pytest.raises(KeyError), LocalProcessExecutor() as here:
        handles += here.launch_replicas(n_replicas=1, entrypoint=entrypoints.waits, entrypoint_args=args)
        started(tmp_path, "r0")
        raise KeyError
    assert [s.state.ended for s in LocalProcessExecutor().poll(handles)] == [True]


@pytest.mark.parametrize(("heard", "code"), [(0.0, 4), (3600.0, 0)])
def test_a_container_leaves_when_its_launcher_has_said_nothing_for_a_lease(tmp_path: Path, heard, code) -> None:
    made = ReplicaSpec(
        "", "r00", entrypoint=f"{ENTRY}:waits", kwargs={"folder": str(tmp_path), "who": "r0"}, lease_s=0.4
    )
    asked = list[float]()

    def word() -> float:
        asked.append(time.time())
        if len(asked) > 2 and heard:
            (tmp_path / "go").touch()
        if len(asked) == 1:
            raise ConnectionError
        return time.time() + heard - 1.0

    end = run_replica(made.to_dict(), "x", until=word)
    assert end["exit_code"] == code and len(asked) > 1
    assert ("launcher has not renewed" in end["reason"]) == (code == 4)


SCRIPT = """
import sys, time
from executors import HFJobsExecutor, LocalProcessExecutor, ModalExecutor, SlurmExecutor
from executors.platforms import short_form
short_form.LEASE_S = 4.0
kind, run, folder = sys.argv[1:]
kinds = {
    "modal": ModalExecutor,
    "hf-jobs": lambda: HFJobsExecutor(packages=("tests",)),
    "local": LocalProcessExecutor,
    "slurm": lambda: SlurmExecutor(cluster="local", folder=folder + "/jobs"),
}
executor = kinds[kind]()
each = [{"folder": folder, "who": f"r{i}"} for i in range(2)]
executor.launch_replicas(n_replicas=2, entrypoint="tests.support.entrypoints:waits", entrypoint_args=each, run=run)
time.sleep(600)
"""


def lives_and_dies(kind: str, run: str, folder: Path, live) -> None:
    script = subprocess.Popen([sys.executable, "-c", SCRIPT, kind, run, str(folder)], cwd=ROOT)
    try:
        started(folder, "r0")
        started(folder, "r1")
        renewed = time.monotonic() + 6.0
        until(lambda: time.monotonic() > renewed or live() < 2, "never")
        assert live() == 2, "while the script lives they live, for longer than a lease"
    finally:
        script.kill()
        script.wait()
    until(lambda: live() == 0, "orphans of a killed script")


@pytest.mark.slow
def test_modal_containers_of_a_killed_script_end(platform: ModalPlatform, run: str, tmp_path: Path) -> None:
    """Before: up to 24 h at the GPU's price."""
    lives_and_dies("modal", run, tmp_path, platform.live)


@pytest.mark.slow
def test_hugging_face_jobs_of_a_killed_script_end(tmp_path: Path) -> None:
    with HFPlatform() as there:
        there.hub.plain = {"HF_ENDPOINT": there.hub.endpoint}
        lives_and_dies("hf-jobs", "orphans", tmp_path, there.live)
        assert {j.asked["labels"]["slot"] for j in there.hub.jobs.values()} == {"r00", "r01"}


def living(folder: Path) -> int:
    """How many of the two ranks are processes of this machine now."""
    pids = [pid for rank in ("r0", "r1") for pid in marks(folder, "start", rank)]
    return sum(processes.is_alive(pid, processes.start_ticks(pid) or 0) for pid in pids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["local", "slurm"])
def test_processes_and_jobs_of_a_killed_script_end(kind: str, tmp_path: Path) -> None:
    """Before: they went on for as long as they liked."""
    run = tmp_path.as_uri() if kind == "local" else f"slurm://{tmp_path}"
    lives_and_dies(kind, run, tmp_path, lambda: living(tmp_path))


def test_it_leaves_with_the_last_that_launched_it(tmp_path: Path) -> None:
    """A second launcher took the run up before the first one was gone; another process has no launcher that lives."""
    gone = subprocess.Popen(["true"])
    gone_name = processes.process_name(gone.pid)
    gone.wait()
    code = "import sys; from executors.platforms.entrypoint import leave_with; leave_with(sys.argv[1])"
    waiting = list[subprocess.Popen[bytes]]()
    for slot, launchers in (("r00", (gone_name, processes.process_name(os.getpid()))), ("r01", (gone_name,))):
        file = tmp_path / f"{slot}.1.launchers"
        file.write_text("".join(f"{name}\n" for name in launchers))
        waiting.append(subprocess.Popen([sys.executable, "-c", code, str(file)], cwd=ROOT, start_new_session=True))
    taken_up, alone = waiting
    assert alone.wait(120) == -signal.SIGTERM and taken_up.poll() is None
    taken_up.kill()
    taken_up.wait()


def test_a_platform_that_carries_no_lease_says_so(tmp_path: Path, capsys) -> None:
    with ToyExecutor(folder=tmp_path) as toy:
        toy.launch_replicas(n_replicas=1, entrypoint="json:dumps", entrypoint_args={"obj": 1}, run="one")
        assert "toy has no leases. `with` ends it, and so does: diloco stop toy://one" in capsys.readouterr().err


def test_the_commands_know_a_run_of_the_short_form(tmp_path: Path, capsys) -> None:
    """Before: "there is no run at …"."""
    args = {"folder": str(tmp_path), "who": "r0"}
    url = (tmp_path / "run").as_uri()
    here = LocalProcessExecutor()
    (handle,) = here.launch_replicas(n_replicas=1, entrypoint=entrypoints.waits, entrypoint_args=args, run=url)
    started(tmp_path, "r0")
    for verb in ("status", "costs"):
        assert cli.main([verb, url]) == 0
        assert "1 of 1 live, $0.00 so far; started by launch_replicas" in capsys.readouterr().out
    assert cli.main(["watch", url]) == 2 and "Only these verbs know it: status, costs, stop" in capsys.readouterr().err
    assert cli.main(["stop", url]) == 0 and "0 of 1 live" in capsys.readouterr().out
    assert here.poll([handle])[0].state.ended
    here.close()
    assert cli.main(["stop", "local://nothing"]) == 2
    assert "local knows no process of local://nothing" in capsys.readouterr().err


@pytest.mark.slow
def test_the_commands_know_a_run_of_the_short_form_on_modal(platform: ModalPlatform, tmp_path: Path, capsys) -> None:
    there = platform.executor()
    name = f"sweep-{tmp_path.name}"
    args = {"folder": str(tmp_path), "who": "r0"}
    there.launch_replicas(n_replicas=1, entrypoint=f"{ENTRY}:waits", entrypoint_args=args, run=name)
    started(tmp_path, "r0")
    assert cli.main(["status", f"modal://{name}", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["replicas"]
    assert row["state"] == "RUNNING" and row["usd"] > 0
    assert cli.main(["stop", f"modal://{name}", "--purge"]) == 0
    assert "0 of 1 live" in capsys.readouterr().out


@pytest.mark.slow
def test_a_block_leaves_neither_container_nor_app_nor_dict_on_modal(platform: ModalPlatform, tmp_path: Path) -> None:
    with platform.executor() as there:
        args = {"folder": str(tmp_path), "who": "r0"}
        (handle,) = there.launch_replicas(n_replicas=1, entrypoint=f"{ENTRY}:waits", entrypoint_args=args)
        started(tmp_path, "r0")
        assert platform.server.deployed(app_name(handle.run))
    until(lambda: platform.live() == 0, "a container outlived its block")
    app = platform.server.deployed(app_name(handle.run))
    assert app is None or not app.functions
    assert ModalExecutor().find(handle.run) == []


@pytest.mark.slow
def test_all_that_lives_on_a_platform_is_ended_by_one_command(platform: ModalPlatform, run, tmp_path, capsys) -> None:
    there = platform.executor()
    (handle,) = there.launch_replicas([spec(run, tmp_path, "waits")])
    started(tmp_path)
    assert cli.main(["stop", "--executor", "modal", "--all"]) == 130, "nobody was asked"
    assert "nothing was ended" in capsys.readouterr().err and not there.poll([handle])[0].state.ended
    assert cli.main(["stop", "--executor", "modal", "--all", "--yes"]) == 0, capsys.readouterr()
    assert f"ended the app {app_name(run)}" in capsys.readouterr().out
    until(lambda: there.poll([handle])[0].state.ended, "it lives")
    assert cli.main(["stop", "--executor", "modal", "--all"]) == 0
    assert "no process of this project runs on modal" in capsys.readouterr().out
    assert cli.main(["stop", "--executor", "modal"]) == 2 and cli.main(["stop"]) == 2


def test_all_of_our_jobs_and_no_others_are_cancelled(tmp_path: Path, capsys) -> None:
    with HFPlatform() as there:
        hub = there.hub
        hub.held = True
        there.executor().launch_replicas([ReplicaSpec("s3://b/one", "r00"), ReplicaSpec("hf-jobs://two", "r00")])
        foreign = hub.create("tester", {"command": ["sleep", "1"], "labels": {"run": "theirs"}, "flavor": "cpu-basic"})
        assert cli.main(["stop", "--executor", "hf-jobs", "--all", "--yes"]) == 0, capsys.readouterr()
        stages = {j.id: j.stage for j in hub.jobs.values()}
        assert stages.pop(foreign.id) == "SCHEDULING" and set(stages.values()) == {"CANCELED"}


def test_a_place_that_keeps_no_list_says_so(capsys) -> None:
    assert cli.main(["stop", "--executor", "local", "--all"]) == 2
    assert "`diloco stop RUN` ends one run" in capsys.readouterr().err


def test_a_process_that_waits_for_a_machine_costs_nothing() -> None:
    clock = ManualClock()
    run = ShortRun("cloud://x", CloudExecutor(Cloud(MemoryStore(), clock)), clock)
    handle = Handle("cloud://x", "r00", 1, "cloud", native="1", launched_at=clock.wall(), usd_per_hour=4.0)
    clock.sleep(3600.0)
    bills = [(run.hours(s), run.usd(s)) for s in (Status(handle, State.PENDING), Status(handle, State.RUNNING))]
    assert bills == [(0.0, 0.0), (1.0, 4.0)]
