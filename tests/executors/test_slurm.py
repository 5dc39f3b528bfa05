"""Slurm's own ways: sbatch's file, time limits, files that outlive every process.  The rest is in the contract test."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.process import exitcodes, processes
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, short_name
from executors.platforms.container import ended_as
from executors.platforms.on_slurm.executor import SlurmExecutor, run_folder
from executors.platforms.on_slurm.job import CANCELLED, CARD, END
from rendezvous.clock import SystemClock
from tests.support.entrypoints import marks
from tests.support.workers import identity, worker

ROOT = Path(__file__).parents[2]
SHOWS = """#!/bin/sh
cat {folder}/$(basename $0) 2>/dev/null || { echo "no answer" >&2; exit 1; }
"""
SBATCH = """#!/bin/sh
cp "$1" {folder}/sbatch.sh
echo "Submitted batch job 77"
"""
SAYS = """#!/bin/sh
echo "$0 $*" >> {folder}/said
"""


@pytest.fixture
def jobs(tmp_path) -> SlurmExecutor:
    return SlurmExecutor(cluster="local", folder=tmp_path / "jobs")


@pytest.fixture
def login_node(tmp_path, monkeypatch) -> Path:
    """A machine with Slurm's commands.  They only write down what they were told, and answer what the test wants."""
    folder = tmp_path / "slurm"
    (folder / "bin").mkdir(parents=True)
    sinfo = (
        "#!/bin/sh\ncase $* in *%G*) echo 'gpu:h100:8(S:0-1)'; echo 'gpu:a100:4,gpu:l4:2'; echo '(null)'; exit;; esac\n"
    )
    sinfo += (
        "case $* in *--partition=long*) echo 'long|2-12:00:00';; *) echo 'debug|30:00'; echo 'gpu*|4:00:00';; esac\n"
    )
    commands = {"sacct": SHOWS, "sbatch": SBATCH, "srun": SAYS, "scancel": SAYS, "squeue": SHOWS, "sinfo": sinfo}
    for name, text in commands.items():
        path = folder / "bin" / name
        path.write_text(text.replace("{folder}", str(folder)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def spec(folder: Path, function: str = "waits", **more) -> ReplicaSpec:
    kwargs = {"folder": str(folder), "who": "r00.1"}
    return ReplicaSpec(f"file://{folder}/run", "r00", 1, f"tests.support.entrypoints:{function}", kwargs=kwargs, **more)


def name_of(folder: Path) -> str:
    return f"diloco-{short_name(spec(folder).run)}-r00.1"


def wait_for_start(folder: Path, executor: SlurmExecutor, handle: Handle) -> int:
    until = time.monotonic() + 120
    while not (found := marks(folder, "start", "r00.1")):
        assert time.monotonic() < until, executor.logs(handle)
        time.sleep(0.02)
    return found[0]


# -------------------------------------------------------------------- in submitit's local mode


def test_no_code_lies_in_the_run(tmp_path, monkeypatch):
    """submitit's pickle is code that runs when the job begins: another user may write into a run's folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    run = Path(spec(tmp_path).run.removeprefix("file://"))
    run.mkdir()
    executor = SlurmExecutor(cluster="local")
    (handle,) = executor.launch_replicas([spec(tmp_path, "returns")])
    assert executor.collect([handle], timeout=120)[0].ok
    folder = Path(handle.files)
    assert list(run.iterdir()) == [] and folder.is_relative_to(tmp_path / "home" / ".diloco" / "slurm")
    assert all(path.stat().st_mode & 0o077 == 0 for path in (folder, folder.parent, folder.parent.parent))
    assert list(folder.glob("*.pkl")) and json.loads((folder / CARD).read_text())["native"] == handle.native
    assert json.loads((folder / END).read_text())["exit_code"] == 0
    assert executor.find(f"file://{tmp_path}/run") == [handle]


def test_a_bucket_run_keeps_its_files_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_folder(SlurmExecutor()._root, "s3://bucket/run") == tmp_path / ".diloco" / "slurm" / "s3_bucket_run"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_slurms_warning_before_the_time_limit_makes_it_leave_to_be_started_again(jobs, tmp_path, number):
    (handle,) = jobs.launch_replicas([spec(tmp_path, "polite")])
    replica = wait_for_start(tmp_path, jobs, handle)
    child = int(Path(f"/proc/{replica}/stat").read_text().rpartition(")")[2].split()[1])  # the job above the replica
    os.kill(child, number)
    (result,) = jobs.collect([handle], timeout=120)
    assert (result.state, result.exit_code) == (State.FAILED, exitcodes.RESUME)
    assert len(marks(tmp_path, "left", "r00.1")) == 1


def test_the_jobs_own_clock_comes_before_slurms(jobs, tmp_path):
    (handle,) = jobs.launch_replicas([spec(tmp_path, "polite", timeout_s=45.0)])
    wait_for_start(tmp_path, jobs, handle)
    assert (jobs._limit_minutes(spec(tmp_path, timeout_s=45.0)), jobs._limit_minutes(spec(tmp_path))) == (1, 24 * 60)
    jobs.cancel([handle], grace_s=30.0)
    assert jobs.collect([handle], timeout=120)[0].state is State.CANCELLED


DIES = """
import os, sys
from executors.platforms.on_slurm import executor as slurm
from tests.executors.test_slurm import spec
from pathlib import Path
slurm.SlurmExecutor._submit_job = lambda *_: os._exit(9)  # after it has taken the turn, before sbatch
slurm.SlurmExecutor(cluster="local", folder=Path(sys.argv[1]) / "jobs").launch_replicas([spec(Path(sys.argv[1]))])
"""


def test_a_launcher_that_died_over_it_does_not_keep_the_slot(jobs, tmp_path, monkeypatch):
    died = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."})
    assert died.returncode == 9 and jobs.find(f"file://{tmp_path}/run") == []
    monkeypatch.setattr("executors.platforms.on_slurm.executor.PATIENCE_S", 0.3)
    (handle,) = jobs.launch_replicas([spec(tmp_path)])
    wait_for_start(tmp_path, jobs, handle)
    (tmp_path / "go").touch()
    assert jobs.collect([handle], timeout=120)[0].ok
    assert len(marks(tmp_path, "start", "r00.1")) == 1


def test_a_missing_secret_is_named(jobs, tmp_path):
    with pytest.raises(ExecutorError, match=r"the secret NO_SUCH_SECRET is not set here; `export NO_SUCH_SECRET=…`"):
        jobs.launch_replicas([spec(tmp_path, secrets=("NO_SUCH_SECRET",))])


def test_ends():
    handle = Handle("r", "r00", 1, "slurm", native="1")
    ends = {0: State.SUCCEEDED, 1: State.FAILED, -9: State.LOST, -15: State.LOST, 7: State.FAILED}
    for code, state in ends.items():
        assert ended_as(handle, {"exit_code": code, "reason": ""}, asked=False).state is state
    assert ended_as(handle, {"exit_code": 4, "reason": ""}, asked=True).state is State.CANCELLED


# -------------------------------------------------------------------- on a login node


def test_without_sbatch_the_error_says_where_to_go(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ExecutorError, match=r"no `sbatch` here.*login node"):
        SlurmExecutor().launch_replicas([spec(tmp_path)])


def test_an_unknown_gpu_lists_those_of_the_nodes(login_node, tmp_path):
    with pytest.raises(ExecutorError, match="has the GPU 'b200'; there are: a100, h100, l4"):
        SlurmExecutor().launch_replicas([spec(tmp_path, gpu=("b200",))])
    with pytest.raises(ExecutorError, match="one kind of GPU per job"):
        SlurmExecutor().launch_replicas([spec(tmp_path, gpu=("h100", "a100"))])


def test_what_sbatch_is_told(login_node, tmp_path):
    executor = SlurmExecutor(partition="gpu", cpus_per_task=8, usd_per_hour=2.5)
    (handle,) = executor.launch_replicas([spec(tmp_path, gpu=("h100:2",), timeout_s=3 * 3600)])
    text = (login_node / "sbatch.sh").read_text()
    assert handle.native == "77" and handle.pid == 0 and handle.place == "slurm/r00.1" and handle.usd_per_hour == 2.5
    wanted = ("partition=gpu", "cpus-per-task=8", "gres=gpu:h100:2", "time=180", "job-name=" + name_of(tmp_path))
    assert all(f"#SBATCH --{x}" in text for x in wanted)
    assert "#SBATCH --no-requeue\n" in text  # or Slurm would start a preempted job again behind our back


def test_an_option_that_sbatch_does_not_know_is_a_failed_launch(login_node, tmp_path):
    (handle,) = SlurmExecutor(partitoin="gpu").launch_replicas([spec(tmp_path)])
    assert handle.native == ""


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("PENDING Priority", State.PENDING, ""),
        ("PENDING PartitionTimeLimit", State.PENDING, "PartitionTimeLimit"),
        ("REQUEUE_HOLD launch failed requeued held", State.PENDING, "launch failed requeued held"),
        ("RUNNING", State.RUNNING, ""),
        ("NODE_FAIL", State.LOST, "its node failed"),
        ("PREEMPTED", State.LOST, "preempted"),
        ("TIMEOUT", State.LOST, "Slurm's time limit"),
        ("OUT_OF_MEMORY", State.FAILED, "out of memory"),
        ("CANCELLED by 1000", State.LOST, "cancelled by another user or program"),
    ],
)
def test_slurms_words(login_node, tmp_path, word, state, reason):
    executor = SlurmExecutor()
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (unknown,) = executor.poll([handle])  # Slurm does not answer
    assert unknown.state is State.PENDING and unknown.stale
    (login_node / "squeue").write_text(f"77|{word}\n")
    (told,) = executor.poll([handle])
    assert (told.state, told.reason, told.stale) == (state, reason, False)


def test_no_job_is_longer_than_its_partition_allows(login_node, tmp_path):
    """Slurm keeps such a job in its queue for ever (PartitionTimeLimit): seen with slurmctld 22.05."""
    jobs = SlurmExecutor()
    assert jobs._limit_minutes(spec(tmp_path)) == 240
    assert jobs._limit_minutes(spec(tmp_path, timeout_s=45.0)) == 1
    assert "no job longer than 4 h" in jobs.fault_of(spec(tmp_path, timeout_s=5 * 3600.0))
    assert SlurmExecutor(partition="long")._limit_minutes(spec(tmp_path)) == 24 * 60
    assert SlurmExecutor(partition="long").fault_of(spec(tmp_path, timeout_s=60 * 3600.0)) == ""


def test_a_job_that_has_ended_meanwhile_prints_nothing(login_node, tmp_path, capfd):
    executor = SlurmExecutor()
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (login_node / "squeue").write_text(f"77|RUNNING None|{name_of(tmp_path)}\n")
    (login_node / "bin" / "scancel").write_text(
        "#!/bin/sh\necho 'scancel: error: Kill job error on job id 77: Invalid job id specified' >&2\n"
        "echo 'scancel: error: munge is away' >&2\nexit 1\n"
    )
    executor.cancel([handle], grace_s=0.0)
    assert set(capfd.readouterr().err.splitlines()) == {"scancel: error: munge is away"}


def test_a_job_of_another_name_is_not_this_run_s(login_node, tmp_path):
    """A log may name any job of the operator's; and options are none of scancel's."""
    executor = SlurmExecutor()
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (login_node / "squeue").write_text("77|RUNNING|diloco-another-r00.1\n")
    (told,) = executor.poll([handle])
    assert (told.state, told.reason) == (
        State.LOST,
        "Slurm's job 77 is called diloco-another-r00.1: it is not this run's",
    )
    options = [replace(handle, native=word) for word in ("--me", "-u", "77 --me", "77,78", "")]
    executor.cancel(options, grace_s=0.0)
    assert {s.state for s in executor.poll(options)} == {State.FAILED}
    assert not (login_node / "said").exists()


def test_a_card_s_process_is_signalled_only_if_it_runs_this_launch(jobs, tmp_path):
    bystander = worker()
    (handle,) = jobs.launch_replicas([spec(tmp_path)])
    forged = replace(handle, **{k: v for k, v in identity(bystander.pid).items() if k != "host"})
    for seconds in (5.0, 0.0):
        jobs.cancel([forged], grace_s=seconds)
        jobs.poll([forged])
    assert bystander.poll() is None
    bystander.communicate(b"\n")
    jobs.cancel([handle], grace_s=0.0)
    assert jobs.collect([handle], timeout=120)[0].state is State.CANCELLED


def test_the_accounting_knows_those_that_the_queue_has_forgotten(login_node, tmp_path):
    executor = SlurmExecutor(clock=(clock := Later()))
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (login_node / "squeue").write_text("")
    (told,) = executor.poll([handle])
    assert told.state is State.RUNNING and not told.stale  # for a while: it may still come
    clock.offset = 20.0
    (login_node / "sacct").write_text("77|PREEMPTED\n")
    assert executor.poll([handle])[0].reason == "preempted"


def test_a_job_that_nobody_knows_is_lost(login_node, tmp_path):
    executor = SlurmExecutor(clock=(clock := Later()))
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (login_node / "squeue").write_text("")
    executor.poll([handle])
    clock.offset = 20.0
    (told,) = executor.poll([handle])
    assert (told.state, told.reason) == (State.LOST, "Slurm knows no such job any more")


def test_cancel_speaks_to_slurm_once_and_again_after_the_grace(login_node, tmp_path):
    clock = Later()
    executor = SlurmExecutor(clock=clock)
    (handle,) = executor.launch_replicas([spec(tmp_path)])
    (login_node / "squeue").write_text("77|RUNNING\n")
    executor.cancel([handle], grace_s=10.0)
    executor.poll([handle])
    said = [line.partition("/bin/")[2] for line in (login_node / "said").read_text().splitlines()]
    one = f"--name={name_of(tmp_path)} -- 77"
    asked = [f"scancel --state=PENDING {one}", f"scancel --state=RUNNING --signal=TERM {one}"]
    assert [x for x in said if x.startswith("scancel")] == asked
    clock.offset = 11.0
    executor.poll([handle])
    said = [line.partition("/bin/")[2] for line in (login_node / "said").read_text().splitlines()]
    assert [x for x in said if x.startswith("scancel")] == [*asked, f"scancel {one}"]
    assert (Path(handle.files) / CANCELLED).exists()
    (login_node / "squeue").write_text("77|CANCELLED\n")
    assert executor.poll([handle])[0].state is State.CANCELLED


class Later(SystemClock):
    offset = 0.0

    def now(self) -> float:
        return super().now() + self.offset


def test_the_pid_of_a_local_job_names_it_for_ever(jobs, tmp_path):
    (handle,) = jobs.launch_replicas([spec(tmp_path)])
    assert handle.pid == int(handle.native) and processes.is_alive(handle.pid, handle.started)
    (tmp_path / "go").touch()
    assert jobs.collect([handle], timeout=120)[0].ok


def test_slurm_is_told_to_send_no_signal_before_its_limit(login_node, tmp_path):
    """submitit's USR2@90 ended all sessions 90 s early; one of a minute lasted 12 s on a real Slurm 22.05, 57 s now."""
    SlurmExecutor(folder=tmp_path / "jobs").launch_replicas([spec(tmp_path, timeout_s=60.0)])
    files = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    written = [text for text in files if "#SBATCH --time" in text]
    assert written and all("#SBATCH --signal=USR2@0\n" in x and "#SBATCH --time=1\n" in x for x in written)


def test_one_gpu_of_any_kind_may_be_asked_for(login_node, tmp_path):
    executor = SlurmExecutor(folder=tmp_path / "jobs")
    faults = {gpu: executor.fault_of(spec(tmp_path, gpu=(gpu,))) for gpu in ("1", "h100", "h100:2", "h200", "2")}
    assert [gpu for gpu, fault in faults.items() if fault] == ["h200", "2"]
