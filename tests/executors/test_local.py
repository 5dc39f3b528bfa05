"""LocalProcessExecutor on real processes: this module is also what they run."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from diloco.process import exitcodes, processes
from executors.cli.typed import option
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status
from executors.platforms.on_host.executor import Children, LocalProcessExecutor, process_folder
from executors.platforms.on_host.forkserver import ForkServer
from executors.platforms.places import Place, make_executor
from rendezvous.agreement.membership import claim, write_control
from rendezvous.clock import SystemClock
from rendezvous.machine import machine_name
from rendezvous.stores.files import FileStore
from tests.support.workers import identity, worker

HERE = __name__
ROOT = Path(__file__).parents[2]
WAIT_S = 120.0  # only a hang takes so long

# -------------------------------------------------------------------- what the children do


def sleeps(argv: list[str]) -> int:
    print("here I am", flush=True)
    time.sleep(600)
    return 0


def stubborn(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return sleeps(argv)


def polite(argv: list[str]) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))
    return sleeps(argv)


def meets(argv: list[str]) -> int:
    """Ends once so many are here at the same time."""
    folder, many = Path(argv[0]), int(argv[1])
    (folder / f"here-{os.getpid()}").touch()
    while len(list(folder.glob("here-*"))) < many:
        time.sleep(0.01)
    return 0


def crashes(argv: list[str]) -> int:
    print("line 1\nline 2", flush=True)
    raise ValueError("this is how it ends")


def exits(argv: list[str]) -> int:
    return int(argv[0])


def says_goodbye(argv: list[str]) -> None:
    sys.exit("a last word")


def speaks_haltingly(argv: list[str]) -> int:
    sys.stdout.write("half")
    sys.stdout.flush()
    while not Path(argv[0]).exists():
        time.sleep(0.01)
    print(" a line", flush=True)
    return 0


def ranked(base: int, pause_s: float = 0.0) -> dict[str, int]:
    rank = int(os.environ["REPLICA_RANK"])
    time.sleep(pause_s * (2 - rank))
    return {"rank": rank, "value": base + rank}


def renamed(**_: object) -> str:
    return os.environ["MY_RANK"]


def fails_on_one() -> int:
    if os.environ["REPLICA_RANK"] == "1":
        raise RuntimeError("rank 1 cannot")
    return int(os.environ["REPLICA_RANK"])


def looks_around(argv: list[str]) -> int:
    facts = {"session": os.getsid(0) == os.getpid(), "threads": os.environ["OMP_NUM_THREADS"], "env": os.environ["X"]}
    print(json.dumps(facts), flush=True)
    return 0


def leaves_a_child_behind(argv: list[str]) -> int:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(child.pid, flush=True)
    return 0


def tells_its_pins(argv: list[str]) -> int:
    cores = sorted(os.sched_getaffinity(0))
    print(json.dumps({"cores": cores, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}), flush=True)
    return 0


# -------------------------------------------------------------------- the tests


@pytest.fixture(params=["fork", "spawn"])
def executor(request):
    made = LocalProcessExecutor([HERE], method=request.param)
    yield made
    made.close()


@pytest.fixture
def forks():
    made = LocalProcessExecutor([HERE])
    yield made
    made.close()


def spec(folder: Path, function: str, *argv: str, slot: str = "r00", attempt: int = 1, **more) -> ReplicaSpec:
    return ReplicaSpec(f"file://{folder}", slot, attempt, f"{HERE}:{function}", argv, **more)


def wait_for_line(executor: LocalProcessExecutor, handle: Handle) -> None:
    until = time.monotonic() + WAIT_S
    while not executor.logs(handle):
        assert time.monotonic() < until, "the child never spoke"
        time.sleep(0.01)


def kill(handle: Handle) -> None:
    processes.send_signal(handle.pid, handle.started, signal.SIGKILL, run=None)


def test_kill_9_is_real_and_told(executor, tmp_path):
    (handle,) = executor.launch_replicas([spec(tmp_path, "sleeps")])
    wait_for_line(executor, handle)
    assert executor.poll([handle])[0].state is State.RUNNING
    os.kill(handle.pid, signal.SIGKILL)
    (result,) = executor.collect([handle], timeout=WAIT_S)
    assert (result.state, result.exit_code, result.reason) == (State.LOST, -9, "killed by SIGKILL")
    assert result.tail == ("here I am",)


def test_a_crash_reaches_the_caller_with_its_last_lines(executor, tmp_path):
    (result,) = executor.collect(executor.launch_replicas([spec(tmp_path, "crashes")]), timeout=WAIT_S)
    assert (result.state, result.exit_code) == (State.FAILED, 1)
    assert "line 2" in result.tail and result.tail[-1] == "ValueError: this is how it ends"


@pytest.mark.parametrize(("code", "state"), [(0, State.SUCCEEDED), (2, State.FAILED), (75, State.FAILED)])
def test_exit_codes(forks, tmp_path, code, state):
    (result,) = forks.collect(forks.launch_replicas([spec(tmp_path, "exits", str(code))]), timeout=WAIT_S)
    assert (result.state, result.exit_code) == (state, code)


def test_sys_exit_with_a_text_is_its_last_line(forks, tmp_path):
    (result,) = forks.collect(forks.launch_replicas([spec(tmp_path, "says_goodbye")]), timeout=WAIT_S)
    assert (result.exit_code, result.tail[-1]) == (1, "a last word")


def test_an_entry_point_that_is_not_there_is_a_failed_child(forks, tmp_path):
    (result,) = forks.collect(forks.launch_replicas([spec(tmp_path, "nowhere")]), timeout=WAIT_S)
    assert result.state is State.FAILED and "nowhere" in result.tail[-1]


def test_the_short_form_sets_the_rank_and_collects_in_order(executor):
    args = {"base": 10, "pause_s": 0.05}  # rank 2 ends first
    handles = executor.launch_replicas(n_replicas=3, entrypoint=f"{HERE}:ranked", entrypoint_args=args)
    results = executor.collect(handles, timeout=WAIT_S)
    assert [r.value for r in results] == [{"rank": i, "value": 10 + i} for i in range(3)]


def test_the_rank_can_have_another_name(forks):
    handles = forks.launch_replicas(n_replicas=2, entrypoint=f"{HERE}:renamed", rank_env="MY_RANK")
    assert [r.value for r in forks.collect(handles, timeout=WAIT_S)] == ["0", "1"]


def test_collect_reports_each_failed_child(forks):
    handles = forks.launch_replicas(n_replicas=3, entrypoint=f"{HERE}:fails_on_one")
    results = forks.collect(handles, timeout=WAIT_S)
    assert [r.ok for r in results] == [True, False, True]
    assert results[1].tail[-1] == "RuntimeError: rank 1 cannot" and results[2].value == 2


def test_collect_says_who_still_runs(forks, tmp_path):
    handles = forks.launch_replicas([spec(tmp_path, "sleeps")])
    (result,) = forks.collect(handles, timeout=0.1)
    assert result.state is State.RUNNING and "still running after 0.1 s" in result.reason
    kill(handles[0])


def test_launching_again_gives_the_same_handle(forks, tmp_path):
    first = forks.launch_replicas([spec(tmp_path, "sleeps")])
    other = LocalProcessExecutor([], method="spawn")
    assert forks.launch_replicas([spec(tmp_path, "sleeps")]) == first
    assert other.launch_replicas([spec(tmp_path, "sleeps")]) == first  # another process, or we after a restart
    kill(first[0])
    forks.collect(first, timeout=WAIT_S)
    assert forks.launch_replicas([spec(tmp_path, "sleeps")]) == first  # an attempt is used once
    (second,) = forks.launch_replicas([spec(tmp_path, "sleeps", attempt=2)])
    assert second.pid != first[0].pid
    kill(second)


def test_a_start_that_fails_is_a_result_and_the_others_start(forks, tmp_path):
    (tmp_path / "processes").write_text("a file where the folder should be")
    handles = forks.launch_replicas([spec(tmp_path, "exits", "0"), spec(tmp_path / "fine", "exits", "0")])
    broken, fine = forks.collect(handles, timeout=WAIT_S)
    assert broken.state is State.FAILED and "processes" in broken.reason
    assert fine.ok


@pytest.mark.slow
def test_cancel_asks_first_and_kills_after_the_grace(executor, tmp_path):
    specs = [spec(tmp_path, "polite", slot="r00"), spec(tmp_path, "stubborn", slot="r01")]
    handles = executor.launch_replicas(specs)
    for handle in handles:
        wait_for_line(executor, handle)
    executor.cancel(handles, grace_s=2.0)
    polite, stubborn = executor.collect(handles, timeout=WAIT_S)
    assert (polite.state, polite.exit_code) == (State.CANCELLED, 4)
    assert (stubborn.state, stubborn.exit_code) == (State.CANCELLED, -9)


def test_logs_and_their_tail(forks, tmp_path):
    (handle,) = forks.launch_replicas([spec(tmp_path, "crashes")])
    forks.collect([handle], timeout=WAIT_S)
    assert forks.logs(handle)[:2] == ["line 1", "line 2"]
    assert forks.logs(handle, tail=1) == ["ValueError: this is how it ends"]
    assert forks.logs(handle, tail=0) == []
    assert Path(handle.files + ".log") == process_folder(f"file://{tmp_path}") / "r00.1.log"


def test_children_have_their_own_session_one_thread_and_their_env(executor, tmp_path):
    handles = executor.launch_replicas([spec(tmp_path, "looks_around", env={"X": "42"})])
    executor.collect(handles, timeout=WAIT_S)
    assert json.loads(executor.logs(handles[0])[-1]) == {"session": True, "threads": "1", "env": "42"}


def test_a_dead_fork_server_is_replaced_and_its_children_are_not_lost(forks, tmp_path):
    (first,) = forks.launch_replicas([spec(tmp_path, "sleeps")])
    server = forks._children._server._process
    server.kill()
    server.wait()
    assert forks.poll([first])[0].state is State.RUNNING
    (second,) = forks.launch_replicas([spec(tmp_path, "exits", "0", slot="r01")])
    assert forks.collect([second], timeout=WAIT_S)[0].ok
    kill(first)
    assert forks.collect([first], timeout=WAIT_S)[0].state is State.LOST


def test_a_missing_module_in_the_preload_list_hurts_nobody(tmp_path):
    made = LocalProcessExecutor(["no_such_module_anywhere", HERE], method="fork")
    assert made.collect(made.launch_replicas([spec(tmp_path, "exits", "0")]), timeout=WAIT_S)[0].ok
    made.close()


@pytest.mark.parametrize(("typed", "names"), [("json,csv", ("json", "csv")), ("json", ("json",)), ("", ())])
def test_an_option_names_the_modules_to_preload(typed, names):
    made = make_executor(Place("local", options=dict([option(f"preload={typed}")])))
    assert isinstance(made, LocalProcessExecutor) and made._children._preload == names


def test_handles_and_statuses_are_plain_json(forks, tmp_path):
    (handle,) = forks.launch_replicas([spec(tmp_path, "exits", "0")])
    forks.collect([handle], timeout=WAIT_S)
    status = forks.poll([handle])[0]
    assert Handle.from_dict(json.loads(json.dumps(handle.to_dict()))) == handle
    assert json.loads(json.dumps(status.to_dict()))["state"] == "SUCCEEDED"
    assert isinstance(status, Status)
    sent = spec(tmp_path, "exits", "0", env={"A": "b"})
    assert ReplicaSpec.from_dict(json.loads(json.dumps(sent.to_dict()))) == sent


def test_plan_starts_nothing(forks, tmp_path):
    told = forks.plan([spec(tmp_path, "sleeps"), spec(tmp_path, "sleeps", slot="r01")])
    assert len(told.lines) == 3 and told.usd_per_hour == 0.0
    assert not (tmp_path / "processes").exists()


PARENT = """
import sys
from executors.platforms.on_host.executor import LocalProcessExecutor
from tests.executors.test_local import spec, wait_for_line
from pathlib import Path
executor = LocalProcessExecutor([], method=sys.argv[2])
specs = [spec(Path(sys.argv[1]), "sleeps", slot=s) for s in ("r00", "r01")]
for handle in executor.launch_replicas(specs):
    wait_for_line(executor, handle)
executor.close()
print("parent ends", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_parent_ends_at_once_while_its_children_live(tmp_path, method):
    command = [sys.executable, "-W", "error", "-c", PARENT, str(tmp_path), method]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)  # also: holds no pipe open
    assert (done.returncode, done.stdout, done.stderr) == (0, "parent ends\n", "")
    executor = LocalProcessExecutor([], method="spawn")
    handles = executor.find(f"file://{tmp_path}")
    assert [h.slot for h in handles] == ["r00", "r01"]
    assert [s.state for s in executor.poll(handles)] == [State.RUNNING] * 2
    kill(handles[0])
    executor.cancel(handles[1:], grace_s=5)
    lost, cancelled = executor.collect(handles, timeout=WAIT_S)
    assert (lost.state, cancelled.state) == (State.LOST, State.CANCELLED)
    if method == "fork":  # the fork server outlived the parent, and wrote down what it reaped
        assert (lost.exit_code, cancelled.exit_code) == (-9, -15)


# -------------------------------------------------------------------- once, also if a process dies


def living(folder: Path) -> list[int]:
    """Processes whose output goes to a log of this run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            target = os.readlink(entry / "fd" / "1") if entry.name.isdigit() else ""
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if target else "Z"
        except OSError:
            continue
        if target.startswith(f"{folder}/processes/") and state != "Z":
            found.append(int(entry.name))
    return found


DIES_AT = """
import os, signal, sys
from pathlib import Path
from executors.platforms.on_host import executor as local
from tests.executors.test_local import spec
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "after":
    local._registered_handle = die
executor = local.LocalProcessExecutor(["tests.executors.test_local"], method=sys.argv[2])
if sys.argv[3] == "before":  # the server has the request, but is still importing
    server = local.ForkServer(executor._children._preload, {**executor._children._env, **local.FORK_ENV})
    print(server._process.pid, flush=True)
    server._send(executor._make_request(spec(Path(sys.argv[1]), "sleeps")))
    die()
executor.launch_replicas([spec(Path(sys.argv[1]), "sleeps")])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_launcher_killed_before_it_knows_its_child_leaves_one_that_is_found(tmp_path, method):
    done = subprocess.run([sys.executable, "-c", DIES_AT, str(tmp_path), method, "after"], cwd=ROOT, timeout=WAIT_S)
    assert done.returncode == -signal.SIGKILL
    executor = LocalProcessExecutor([], method="spawn")
    (handle,) = executor.launch_replicas([spec(tmp_path, "sleeps")])  # the same launch, by the next one
    wait_for_line(executor, handle)
    until = time.monotonic() + WAIT_S
    while len(living(tmp_path)) > 1 and time.monotonic() < until:  # the one that was too many is on its way out
        time.sleep(0.05)
    assert living(tmp_path) == [handle.pid] and executor.find(f"file://{tmp_path}") == [handle]
    assert executor.logs(handle).count("here I am") == 1
    executor.cancel([handle], 0.0)
    executor.collect([handle], WAIT_S)


def test_a_fork_that_nobody_waits_for_any_more_does_not_happen(tmp_path):
    (tmp_path / "processes").mkdir()
    command = [sys.executable, "-c", DIES_AT, str(tmp_path), "fork", "before"]
    done = subprocess.run(command, cwd=ROOT, timeout=WAIT_S, capture_output=True, text=True)
    server, until = int(done.stdout), time.monotonic() + WAIT_S
    started = processes.start_ticks(server)
    while started is not None and processes.is_alive(server, started):
        assert time.monotonic() < until, "the fork server has not ended"
        time.sleep(0.05)
    assert list((tmp_path / "processes").iterdir()) == [] and living(tmp_path) == []


RIVAL = """
import sys
from pathlib import Path
from executors.platforms.on_host.executor import LocalProcessExecutor
from tests.executors.test_local import spec
executor = LocalProcessExecutor([], method=sys.argv[2])
specs = [spec(Path(sys.argv[1]), "sleeps", slot=f"r{i:02d}") for i in range(4)]
input()
print([h.pid for h in executor.launch_replicas(specs)])
"""


@pytest.mark.slow
def test_two_launchers_at_once_start_each_replica_once(tmp_path):
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(tmp_path), method], cwd=ROOT, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for method in ("fork", "spawn")
    ]  # fmt: skip
    for rival in rivals:
        assert rival.stdin is not None
        rival.stdin.write("\n")
        rival.stdin.flush()
    one, other = (rival.communicate()[0] for rival in rivals)
    assert one == other
    executor = LocalProcessExecutor([], method="spawn")
    handles = executor.find(f"file://{tmp_path}")
    until = time.monotonic() + WAIT_S
    while len(living(tmp_path)) > 4 and time.monotonic() < until:
        time.sleep(0.05)
    assert sorted(living(tmp_path)) == sorted(h.pid for h in handles) and len(handles) == 4
    executor.cancel(handles, 0.0)
    executor.collect(handles, WAIT_S)


def test_the_one_too_many_does_not_write_over_the_other_s_end(forks, tmp_path):
    (handle,) = forks.launch_replicas([spec(tmp_path, "exits", "5")])
    forks.collect([handle], timeout=WAIT_S)
    rival = LocalProcessExecutor([HERE])
    request = rival._make_request(spec(tmp_path, "exits", "6"))
    (pid,) = rival._children.fork([request])
    assert isinstance(pid, tuple) and rival._children._server is not None
    while pid not in rival._children._server.exits:
        rival._children._server.listen()
        time.sleep(0.01)
    assert rival._children._server.exits[pid] == 3  # fenced
    fresh = LocalProcessExecutor([], method="spawn")
    assert fresh.poll([handle])[0].exit_code == 5
    rival.close()


def test_thirty_two_are_launched_at_once(tmp_path, monkeypatch):
    """One fork server, asked once, starts all of them; each ends only when it has seen the 31 others."""
    asked, fork = [], Children.fork
    monkeypatch.setattr(Children, "fork", lambda self, new: (asked.append(len(new)), fork(self, new))[1])
    executor = LocalProcessExecutor([HERE])
    specs = [spec(tmp_path, "meets", str(tmp_path), "32", slot=f"r{i:02d}") for i in range(32)]
    results = executor.collect(executor.launch_replicas(specs), timeout=WAIT_S)
    assert all(r.ok for r in results) and asked == [32]
    executor.close()


@pytest.mark.slow
def test_thirty_two_launches_take_no_more_than_twice_one(tmp_path):
    """Slow because it is a measurement, which a busy machine decides.  Nothing speeds a try up: the best of three."""

    def seconds(folder: Path, count: int) -> float:
        executor, began = LocalProcessExecutor([HERE]), time.monotonic()
        specs = [spec(folder, "exits", "0", slot=f"r{i:02d}") for i in range(count)]
        results = executor.collect(executor.launch_replicas(specs), timeout=WAIT_S)
        took = time.monotonic() - began
        assert all(r.ok for r in results)
        executor.close()
        return took

    single = max(seconds(tmp_path / f"single{i}", 1) for i in range(2))
    tries = (seconds(tmp_path / f"all{i}", 32) for i in range(3))
    assert any(took <= 2 * single for took in tries)


# -------------------------------------------------------------------- groups, pins, time


def test_what_a_replica_leaves_behind_ends_with_it(executor, tmp_path):
    (handle,) = executor.launch_replicas([spec(tmp_path, "leaves_a_child_behind")])
    assert executor.collect([handle], timeout=WAIT_S)[0].ok
    pid = int(executor.logs(handle)[0])
    until = time.monotonic() + WAIT_S
    while (started := processes.start_ticks(pid)) is not None and processes.is_alive(pid, started):
        assert time.monotonic() < until, "its child still runs"
        time.sleep(0.02)


def test_cores_and_gpus_are_dealt_out_to_the_slots(tmp_path):
    executor = LocalProcessExecutor([HERE], cores=1, gpus=["4", "5"])
    specs = [spec(tmp_path, "tells_its_pins", slot=f"r{i:02d}", gpu=("any",)) for i in range(3)]
    told = [
        json.loads(executor.logs(h)[-1])
        for h in (r.handle for r in executor.collect(executor.launch_replicas(specs), WAIT_S))
    ]
    there = sorted(os.sched_getaffinity(0))
    assert [t["gpu"] for t in told] == ["4", "5", "4"]
    assert [t["cores"] for t in told] == [[there[i % len(there)]] for i in range(3)]
    assert f"on GPU 5 on cores {there[1 % len(there)]}" in executor.plan(specs).lines[1]
    executor.close()


def test_without_a_wish_nobody_is_pinned(forks, tmp_path):
    (handle,) = forks.launch_replicas([spec(tmp_path, "tells_its_pins")])
    forks.collect([handle], WAIT_S)
    told = json.loads(forks.logs(handle)[-1])
    assert told == {"cores": sorted(os.sched_getaffinity(0)), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}


@pytest.mark.parametrize(("gpus", "word"), [([], "there are: none"), (["0", "1"], "there are: 0, 1, or 'any'")])
def test_a_gpu_that_is_not_there_is_refused_before_anything_starts(tmp_path, gpus, word):
    executor = LocalProcessExecutor([], method="spawn", gpus=gpus)
    specs = [spec(tmp_path, "sleeps"), spec(tmp_path, "sleeps", slot="r01", gpu=("7",))]
    with pytest.raises(ExecutorError, match=word):
        executor.launch_replicas(specs)
    assert not (tmp_path / "processes" / "r00.1.json").exists() and living(tmp_path) == []


def test_cores_that_are_not_there_are_refused():
    with pytest.raises(ExecutorError, match="this machine has"):
        LocalProcessExecutor([], method="spawn", cores=10_000)


@pytest.mark.parametrize(
    ("function", "code"), [("sleeps", exitcodes.RESUME), ("polite", exitcodes.RESUME), ("stubborn", exitcodes.RESUME)]
)
def test_a_time_limit_ends_it_with_resume(forks, tmp_path, function, code):
    (handle,) = forks.launch_replicas([spec(tmp_path, function, timeout_s=1.0)])
    assert forks.collect([handle], timeout=WAIT_S)[0].exit_code == code


def test_a_process_of_another_machine_is_not_called_dead(forks, tmp_path):
    elsewhere = Handle(f"file://{tmp_path}", "r00", 1, "local", "another-host", 4711, 1)
    rented = Handle(f"file://{tmp_path}", "r01", 1, "modal", native="fc-1")
    assert [(s.state, s.stale) for s in forks.poll([elsewhere, rented])] == [(State.RUNNING, True)] * 2


def test_find_knows_processes_by_their_claim_alone(tmp_path):
    store, clock = FileStore(tmp_path), SystemClock()
    write_control(store, clock, replicas=2, min_replicas=1, steps=1)
    child = worker(store.url)
    claim(store, clock, "r00", **identity(child.pid))
    claim(store, clock, "r01", **{**identity(child.pid), "host": f"{socket.gethostname()}~elsewhere"})
    (handle,) = LocalProcessExecutor([], method="spawn").find(store.url)
    assert (handle.slot, handle.pid, handle.attempt) == ("r00", child.pid, 1)
    child.communicate(b"\n")
    assert LocalProcessExecutor([], method="spawn").find(store.url) == []


def test_a_zombie_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    started = processes.start_ticks(child.pid)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert started is not None and not processes.is_alive(child.pid, started)
    child.wait()
    assert processes.start_ticks(child.pid) is None


def test_a_line_is_followed_when_it_is_whole(tmp_path: Path) -> None:
    class Clock(SystemClock):
        def sleep(self, seconds: float) -> None:  # the next look comes when half of it is there; the one after, all
            super().sleep(seconds)
            if (log := tmp_path / "processes" / "r00.1.log").exists() and log.read_text():
                (tmp_path / "go").touch()

    executor = LocalProcessExecutor(method="spawn", clock=Clock())
    (handle,) = executor.launch_replicas([spec(tmp_path, "speaks_haltingly", str(tmp_path / "go"))])
    assert list(executor.follow(handle)) == ["half a line"]
    executor.close()


def test_an_exit_code_belongs_to_one_process_and_not_to_its_pid(tmp_path: Path) -> None:
    """Before: a fresh replica with the pid of one that had ended had "ended", with its code."""
    server, (mine, theirs) = ForkServer.__new__(ForkServer), socket.socketpair()
    server.exits, server._buffer, server._socket = {}, b"", mine
    server._process = SimpleNamespace(poll=lambda: None)  # type: ignore[assignment]  # it is alive
    theirs.sendall(b'{"exited": 7, "started": 1, "code": 3}\n')
    executor = LocalProcessExecutor([])
    executor._children._server, executor._children._forked = server, {(7, 1), (7, 2)}
    old, new = (Handle(f"file://{tmp_path}", "r00", n, "local", host=machine_name(), pid=7, started=n) for n in (1, 2))
    told = executor.poll([old, new])
    theirs.close()
    mine.close()
    assert [(s.state, s.exit_code) for s in told] == [(State.FAILED, 3), (State.RUNNING, None)]


def test_the_files_of_a_nameless_run_are_below_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "a folder, größer").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert process_folder(LocalProcessExecutor([]).nameless_run()).is_relative_to(folder)
