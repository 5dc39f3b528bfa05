"""Out of memory is a replica's own fault, however a platform says it (executors/platforms/machine/oom.py)."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from executors.platforms.base import Handle, ReplicaSpec, State, Status
from executors.platforms.container import ended_as, read_end
from executors.platforms.machine import oom, oom_words
from executors.platforms.on_hf_jobs.client import HubJob
from executors.platforms.on_hf_jobs.executor import ended
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.on_modal import calls as modal_calls
from executors.platforms.on_sky import SkyExecutor, SkyJob
from executors.platforms.on_slurm.executor import SlurmExecutor
from tests.support.world import World

GROUPS = Path("/sys/fs/cgroup/memory")
KILLED = {"exit_code": -9, "reason": "killed by SIGKILL", "value": None, "tail": []}
STARVED = {**KILLED, "reason": oom_words.TEXT}


def rented(executor: str) -> Handle:
    return Handle("s3://bucket/run", "r00", 1, executor, native="7", files="/nowhere")


@pytest.mark.parametrize(
    "text",
    [
        "OOMKilled", "Job failed with exit code: 137. Reason: OOMKilled", "OOM killed", "oom-kill", "OUT_OF_MEMORY",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=3.0", "CUDA out of memory", "KERNEL_OOM_KILL",
        "GENERIC_STATUS_MEMORY_LIMIT_EVICTION", "Out of memory: Killed process 7 (python)",
    ],
)  # fmt: skip
def test_the_words_of_all_platforms(text: str) -> None:
    assert oom.says_out_of_memory(text) and not oom.from_outside(-9, text)


@pytest.mark.parametrize(
    "text", ["", "killed by SIGKILL", "Job was terminated", "the bloom filter", "room 9", "preempted"]
)
def test_other_words(text: str) -> None:
    assert not oom.says_out_of_memory(text) and oom.from_outside(-9, text) and oom.from_outside(-15, text)
    assert not oom.from_outside(1, text)


# -------------------------------------------------------------------- the kernel's count


def test_the_count_of_both_kinds_of_cgroups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/a/b\n0::/c\n")
    assert oom.count_kills(tmp_path, own) is None and oom.count_kills(tmp_path, tmp_path / "none") is None
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert oom.count_kills(tmp_path, own) == 3, "a container is shown its cgroup as the root"
    (tmp_path / "memory/a/b").mkdir(parents=True)
    (tmp_path / "memory/a/b/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert oom.count_kills(tmp_path, own) == 1
    own.write_text("0::/c\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/memory.events").write_text("low 0\nhigh 0\nmax 9\noom 8\noom_kill 7\noom_group_kill 0\n")
    assert oom.count_kills(tmp_path, own) == 7


def test_each_kill_explains_one_death() -> None:
    count = [2]
    found = oom.Kills(lambda: count[0])
    assert not found.explain(-9)
    count[0] = 3
    assert not found.explain(1) and found.explain(-9).startswith(oom_words.TEXT) and not found.explain(-9)
    count[0] = 4
    assert found.explain(None).startswith(oom_words.UNSEEN) and not found.explain(None)


def test_the_numbers_that_are_known_are_said(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/a\n")
    assert oom_words.memory_words(oom.count_files(tmp_path, own)) == ""
    (tmp_path / "memory/a").mkdir(parents=True)
    (tmp_path / "memory/a/memory.limit_in_bytes").write_text("4294967296\n")
    (tmp_path / "memory/a/memory.max_usage_in_bytes").write_text("4187593113\n")
    assert oom_words.memory_words(oom.count_files(tmp_path, own)) == "3.9 GiB used at most, of 4 GiB"
    (tmp_path / "memory/a/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert oom_words.memory_words(oom.count_files(tmp_path, own)) == "3.9 GiB used at most"
    own.write_text("0::/c\n")
    (tmp_path / "c").mkdir()
    (tmp_path / "c/memory.max").write_text("max\n")
    (tmp_path / "c/memory.peak").write_text("1073741824\n")
    assert oom_words.memory_words(oom.count_files(tmp_path, own)) == "1 GiB used at most"


@pytest.mark.skipif(not os.access(GROUPS, os.W_OK) or os.geteuid() != 0, reason="no cgroup of our own")
def test_a_replica_that_the_kernel_kills_at_its_memory_limit(tmp_path: Path) -> None:
    """A real limit, a real kill: the container's program lives on and says what it was."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    place = next(line.split(":", 2)[2] for line in lines if line.split(":")[1] == "memory")
    group = GROUPS / place.lstrip("/") / f"diloco-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        spec = ReplicaSpec("x://none", "r00", 1, "tests.executors.test_oom:swallow", kwargs={"mib": 600})
        code = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        code += "import sys; from executors.platforms.container import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, json.dumps(spec.to_dict()), "hf-jobs"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        group.rmdir()
    end = read_end(done.stdout.splitlines())
    assert end is not None and end["exit_code"] == -9 and end["reason"].startswith(oom_words.TEXT), (
        done.stdout + done.stderr
    )
    status = ended(rented("hf-jobs"), HubJob("7", "r00", 1, "ERROR", "exit 137"), done.stdout.splitlines())
    assert (status.state, status.exit_code) == (State.FAILED, -9)


def swallow(mib: int) -> int:
    """Entry point: more memory than there is."""
    held = [b"x" * (1 << 20) for _ in range(mib)]
    return len(held)


# -------------------------------------------------------------------- every platform


def test_hugging_face() -> None:
    started, h = ["diloco-started: r00.1"], rented("hf-jobs")
    for message, lines, state in [
        ("OOMKilled", started, State.FAILED),
        ("Job failed with exit code: 137. Reason: OOMKilled", started, State.FAILED),
        ("OOMKilled", [*started, f"diloco-ended: {json.dumps(KILLED)}"], State.FAILED),
        ("Job was terminated", [*started, f"diloco-ended: {json.dumps(KILLED)}"], State.LOST),
        ("exit 137", [*started, f"diloco-ended: {json.dumps(STARVED)}"], State.FAILED),
    ]:
        assert ended(h, HubJob("7", "r00", 1, "ERROR", message), lines).state is state, (message, lines)


def test_modal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_as(rented("modal"), KILLED).state is State.LOST
    assert ended_as(rented("modal"), STARVED).state is State.FAILED
    import modal.exception as e

    class Modal:
        exception = e

        def __init__(self, error: Exception) -> None:
            self.error, self.FunctionCall = error, self

        def from_id(self, _: str) -> "Modal":
            return self

        def get(self, timeout: float) -> None:
            raise self.error

    class Register:
        def asked(self, slot: str, attempt: int) -> bool:
            return False

    for error, state in [
        (e.RemoteError("GENERIC_STATUS_KERNEL_OOM_KILL"), State.FAILED),
        (e.InternalFailure("container was OOM killed"), State.FAILED),
        (e.RemoteError("something else"), State.LOST),
        (e.InternalFailure("host lost"), State.LOST),
    ]:
        monkeypatch.setattr(modal_calls, "sdk", lambda error=error: Modal(error))
        status, _ = modal_calls.look_up_call(rented("modal"), Register(), True)  # type: ignore[arg-type]
        assert status.state is state, error


def test_slurm(tmp_path: Path) -> None:
    h = rented("slurm")
    assert ended_as(h, STARVED, asked=False).state is State.FAILED
    assert ended_as(h, KILLED, asked=False).state is State.LOST
    assert SlurmExecutor(folder=tmp_path)._status_from_word(h, "OUT_OF_MEMORY", "").state is State.FAILED


def test_skypilot(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, h = SkyExecutor(), rented("sky")
    monkeypatch.setattr("executors.platforms.on_sky._read_log", lambda *_: [])
    assert executor._status_from(h, SkyJob(7, "x", "FAILED", "pod was OOMKilled")).state is State.FAILED
    assert executor._status_from(h, SkyJob(7, "x", "FAILED", "node gone")).state is State.LOST
    monkeypatch.setattr("executors.platforms.on_sky._read_log", lambda *_: [f"diloco-ended: {json.dumps(KILLED)}"])
    assert executor._status_from(h, SkyJob(7, "x", "FAILED", "container OOMKilled")).state is State.FAILED


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are killed, one of them by the kernel."""
    count = [0]
    monkeypatch.setattr(oom.Kills.__init__, "__defaults__", (lambda: count[0],))
    executor = LocalProcessExecutor(method="spawn", folder=tmp_path)
    spec = {"entrypoint": "tests.executors.test_oom:die", "kwargs": {}}
    for kernel, state in [(0, State.LOST), (1, State.FAILED)]:
        count[0] = kernel
        (handle,) = executor.launch_replicas([ReplicaSpec(f"file://{tmp_path}", f"r0{kernel}", **spec)])
        (result,) = executor.collect([handle], timeout=120)
        assert (result.state, result.exit_code) == (state, -9) and oom.says_out_of_memory(result.reason) == bool(kernel)
        assert [s.state for s in executor.poll([handle] * 2)] == [state] * 2, "asked again, the same"
    executor.close()


def test_a_kill_that_takes_the_fork_server_along_has_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no process sees the replica's exit code; the kernel's count tells what it was."""
    count = [0]
    monkeypatch.setattr(oom.Kills.__init__, "__defaults__", (lambda: count[0],))
    monkeypatch.setattr("executors.platforms.on_host.executor.REAP_S", 0.0)
    executor = LocalProcessExecutor(method="fork", folder=tmp_path, preload=())
    spec = ReplicaSpec(f"file://{tmp_path}", "r00", entrypoint="tests.executors.test_oom:sleep", kwargs={})
    (handle,) = executor.launch_replicas([spec])
    assert executor._children._server is not None
    count[0] = 2
    for pid in (executor._children._server._process.pid, handle.pid):
        os.kill(pid, signal.SIGKILL)
    (result,) = executor.collect([handle], timeout=120)
    assert result.state is State.FAILED and result.reason.startswith(oom_words.UNSEEN), result
    assert "2 processes killed for it here so far" in result.reason
    server = executor._children._server
    died = [server._how_it_died() for _ in range(3)]  # every error that speaks of it has the same words
    assert died[0].startswith(f"has died: {oom_words.TEXT}") and len(set(died)) == 1, died
    executor.close()


def sleep() -> None:
    """Entry point: until it is killed."""
    signal.pause()


def die() -> None:
    os.kill(os.getpid(), 9)


# -------------------------------------------------------------------- three starts, not ten


def test_a_replica_that_runs_out_of_memory_is_started_three_times(tmp_path: Path) -> None:
    world = World(tmp_path, replicas=1)
    handle = rented("hf-jobs")
    starts = 0
    while world.outcome is None and starts < 12:
        world.pass_time(80)
        newest = world.cloud.job("r00")
        if not newest.state.ended:
            starts += 1
            end: Status = ended(handle, HubJob("7", "r00", 1, "ERROR", "OOMKilled"), ["diloco-started: r00.1"])
            world.cloud.end("r00", end.exit_code, end.state)
    assert starts == 3 and world.outcome is not None and "failed 3 times in a row" in world.outcome.text
