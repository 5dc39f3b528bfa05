"""One contract for every place that runs replicas, with real processes behind it.

local    processes of this machine
slurm    submitit's local mode
toy      the worked example of a platform, examples/toy_platform
modal    the real client and the real container runtime, against tests/support/modal_server.py
hf-jobs  the real client, against tests/support/hf_server.py
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco.process import processes
from executors.platforms.base import ExecutorError, FleetExecutor, Handle, ReplicaSpec, Result, State, Status
from executors.platforms.container import ENDED
from tests.support.entrypoints import marks
from tests.support.platforms import Platform

ROOT = Path(__file__).parents[2]
ENTRY = "tests.support.entrypoints"
PLATFORMS = {
    "local": "tests.support.platforms:LocalPlatform",
    "slurm": "tests.support.platforms:SlurmPlatform",
    "toy": "tests.support.platforms:ToyPlatform",
    "modal": "tests.support.modal_server:ModalPlatform",
    "hf-jobs": "tests.support.hf_server:HFPlatform",
}
SLOW = ("modal", "slurm")  # seconds for a start; executors/test_modal.py and test_slurm.py have quick parts of this
WAIT_S = 90.0
GONE = (State.SUCCEEDED, State.FAILED, State.CANCELLED, State.LOST)
THERE = (State.STARTING, State.RUNNING)


def _platform(name: str, folder: Path) -> Platform:
    module, _, kind = PLATFORMS[name].partition(":")
    found = getattr(importlib.import_module(module), kind)
    return found(folder) if module == "tests.support.platforms" else found()


@pytest.fixture(scope="module", params=[pytest.param(p, marks=pytest.mark.slow) if p in SLOW else p for p in PLATFORMS])
def platform(request, tmp_path_factory) -> Iterator[Platform]:
    """Started once."""
    with _platform(request.param, tmp_path_factory.mktemp(request.param)) as started:
        yield started


class Fleet:
    """The replicas of one test on one platform; all of them end with it."""

    def __init__(self, platform: Platform, folder: Path) -> None:
        self.platform, self.folder = platform, folder
        self.executor = platform.executor()
        self.run = platform.url(f"run-{folder.name[-24:]}-{os.getpid()}")
        self.handles: list[Handle] = []
        self.others: list[FleetExecutor] = []

    def spec(self, function: str, slot: str = "r00", attempt: int = 1, **more) -> ReplicaSpec:
        kwargs = {"folder": str(self.folder), "who": f"{slot}.{attempt}", **more.pop("kwargs", {})}
        return ReplicaSpec(self.run, slot, attempt, f"{ENTRY}:{function}", kwargs=kwargs, **more)

    def launch(self, *specs: ReplicaSpec) -> list[Handle]:
        handles = self.executor.launch_replicas(specs)
        self.handles += handles
        return handles

    def start(self, *functions: str) -> list[Handle]:
        """One replica each, r00, r01, …; back when all of them have started."""
        handles = self.launch(*(self.spec(f, f"r{i:02d}") for i, f in enumerate(functions)))
        for handle in handles:
            self.wait_for_mark("start", handle)
        return handles

    def another(self) -> FleetExecutor:
        self.others.append(self.platform.executor())
        return self.others[-1]

    def marks(self, word: str, handle: Handle) -> list[int]:
        return marks(self.folder, word, f"{handle.slot}.{handle.attempt}")

    def wait_for_mark(self, word: str, handle: Handle, count: int = 1) -> list[int]:
        wait_for(lambda: len(self.marks(word, handle)) >= count, f"{handle.slot} never said {word!r}")
        return self.marks(word, handle)

    def statuses(self, *handles: Handle) -> dict[str, Status]:
        return {s.handle.slot: s for s in self.executor.poll(handles)}

    def wait_for_states(self, wanted: dict[Handle, tuple[State, ...]]) -> dict[str, Status]:
        """Until one poll tells all of them."""

        def as_wanted() -> bool:
            seen = self.statuses(*wanted)
            return all(seen[h.slot].state in states for h, states in wanted.items())

        wait_for(as_wanted, lambda: f"wanted {wanted}, last seen {self.statuses(*wanted)}")
        return self.statuses(*wanted)

    def let_go(self) -> None:
        (self.folder / "go").touch()

    def collect(self, *handles: Handle) -> list[Result]:
        return self.executor.collect(handles, timeout=WAIT_S)

    def end(self) -> None:
        self.let_go()
        self.executor.cancel([h for h in self.handles if h.pid or h.native], grace_s=0.0)
        self.executor.collect(self.handles, timeout=WAIT_S)
        for executor in (self.executor, *self.others):
            executor.close()


@pytest.fixture
def fleet(platform, tmp_path) -> Iterator[Fleet]:
    made = Fleet(platform, tmp_path)
    yield made
    made.end()


def wait_for(happens: Callable[[], bool], otherwise: str | Callable[[], str]) -> None:
    until = time.monotonic() + WAIT_S
    while not happens():
        assert time.monotonic() < until, otherwise if isinstance(otherwise, str) else otherwise()
        time.sleep(0.02)


def running(pid: int) -> bool:
    started = processes.start_ticks(pid)
    return started is not None and processes.is_alive(pid, started)


def same(a: Handle, b: Handle) -> bool:
    return (a.run, a.slot, a.attempt, a.executor, a.pid, a.native) == (
        b.run, b.slot, b.attempt, b.executor, b.pid, b.native,
    )  # fmt: skip


def on_no_such_gpu(spec: ReplicaSpec) -> ReplicaSpec:
    return ReplicaSpec.from_dict({**spec.to_dict(), "gpu": ("no-such-gpu",)})


def numbered(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("line ")]


# -------------------------------------------------------------------- the short form


def test_the_guides_form_runs_a_modules_main_and_collects_in_rank_order(fleet):
    args = {"folder": str(fleet.folder), "base": 10, "last_first": 4}  # rank 3 ends first, rank 0 last
    handles = fleet.executor.launch_replicas(n_replicas=4, entrypoint=ENTRY, entrypoint_args=args)
    results = fleet.executor.collect(handles, timeout=600)
    assert [r.value for r in results] == [{"rank": i, "value": 10 + i} for i in range(4)]
    assert all(r.ok for r in results) and [r.handle.slot for r in results] == [h.slot for h in handles]


def test_the_rank_can_have_another_name_and_collect_reports_each_failed_child(fleet):
    named = fleet.executor.launch_replicas(n_replicas=1, entrypoint=f"{ENTRY}:renamed", rank_env="MY_RANK")
    mixed = fleet.executor.launch_replicas(n_replicas=3, entrypoint=f"{ENTRY}:fails_on_odd_ranks")
    (name,) = fleet.executor.collect(named, timeout=WAIT_S)
    results = fleet.executor.collect(mixed, timeout=WAIT_S)
    assert name.value == "0"
    assert [(r.state, r.value) for r in results] == [(State.SUCCEEDED, 0), (State.FAILED, None), (State.SUCCEEDED, 2)]
    assert results[1].exit_code == 1 and "RuntimeError: rank 1 cannot" in results[1].tail


# -------------------------------------------------------------------- launch


def test_launching_again_gives_the_same_replica_from_any_executor(fleet):
    (first,) = fleet.start("waits")
    (again,) = fleet.launch(fleet.spec("waits"))
    (elsewhere,) = fleet.another().launch_replicas([fleet.spec("waits")])
    assert same(first, again) and same(first, elsewhere)
    (second,) = fleet.launch(fleet.spec("returns", attempt=2))  # another attempt is another replica
    assert fleet.collect(second)[0].ok and not same(first, second)
    fleet.let_go()
    assert fleet.collect(first)[0].value == "went"
    assert same(first, fleet.launch(fleet.spec("waits"))[0])  # an attempt is used once, also when it has ended
    assert len(fleet.marks("start", first)) == 1


def test_one_bad_spec_hurts_no_good_one(fleet):
    good, bad = fleet.spec("returns", "r00", kwargs={"value": 7}), fleet.spec("returns", "r01")
    handles = fleet.launch(good, fleet.platform.spoil(bad), fleet.spec("returns", "r02"))
    results = fleet.collect(*handles)
    assert [r.state for r in results] == [State.SUCCEEDED, State.FAILED, State.SUCCEEDED], results
    assert results[0].value["value"] == 7 and results[1].reason
    assert len(fleet.marks("start", handles[1])) == 0


def test_an_entry_point_that_is_not_there_is_a_failed_child_with_its_reason(fleet):
    (result,) = fleet.collect(*fleet.launch(fleet.spec("nowhere")))
    assert result.state is State.FAILED and any("nowhere" in line for line in result.tail)


def test_a_lost_reply_to_a_launch_makes_one_replica(fleet):
    if not fleet.platform.lose_reply():
        pytest.skip(f"{fleet.platform.name}: a launch has no reply to lose")
    (handle,) = fleet.start("waits")
    (again,) = fleet.another().launch_replicas([fleet.spec("waits")])
    assert same(handle, again) and fleet.statuses(handle)["r00"].state in THERE
    fleet.let_go()
    assert fleet.collect(handle)[0].value == "went"
    assert len(fleet.marks("start", handle)) == 1


def test_environment_and_exit_code_come_through(fleet):
    told = fleet.launch(
        fleet.spec("returns", "r00", env={"CONTRACT": "kept"}), fleet.spec("exits", "r01", kwargs={"code": 75})
    )
    kept, gave_up = fleet.collect(*told)
    assert kept.value["env"] == "kept" and kept.exit_code == 0
    assert (gave_up.state, gave_up.exit_code) == (State.FAILED, 75)


def test_plan_says_what_it_would_do_and_does_nothing(fleet):
    before = fleet.platform.live()  # those of the test before may still be on their way out
    planned = fleet.executor.plan([fleet.spec("waits"), fleet.spec("waits", "r01")])
    assert planned.lines and all(isinstance(line, str) for line in planned.lines)
    assert fleet.executor.find(fleet.run) == [] and fleet.platform.live() <= before


# -------------------------------------------------------------------- poll


def test_one_poll_tells_pending_running_finished_failed_and_killed(fleet):
    functions = ("returns", "crashes", "waits", "waits")
    done, failed, killed, runs = handles = fleet.start(*functions)
    fleet.platform.kill(killed)
    wanted = {done: (State.SUCCEEDED,), failed: (State.FAILED,), killed: (State.LOST,), runs: THERE}
    held = fleet.platform.hold(True)
    try:
        pending = fleet.launch(fleet.spec("waits", "r04")) if held else []
        seen = fleet.wait_for_states(wanted | dict.fromkeys(pending, (State.PENDING, State.STARTING)))
    finally:
        fleet.platform.hold(False)
    assert seen["r00"].exit_code == 0 and seen["r01"].exit_code == 1
    assert not any(s.stale for s in seen.values()) and seen["r02"].reason
    results = fleet.executor.collect(handles[:3], timeout=WAIT_S)
    assert results[1].tail[-1] == "ValueError: this is how it ends"
    for handle in pending:
        fleet.wait_for_mark("start", handle)  # it was held, not lost


def test_handles_and_statuses_survive_json(fleet):
    handles = fleet.start("waits", "crashes")
    told = [Handle.from_dict(json.loads(json.dumps(h.to_dict()))) for h in handles]
    assert told == handles
    fleet.wait_for_states({handles[0]: THERE, handles[1]: (State.FAILED,)})
    seen = fleet.another().poll(told)  # by a process that has only the JSON
    assert [s.state in THERE for s in seen] == [True, False] and seen[1].state is State.FAILED
    raw = json.loads(json.dumps([s.to_dict() for s in seen]))
    assert raw[1]["state"] == "FAILED" and raw[0]["handle"]["slot"] == "r00"


def test_a_preempted_replica_starts_again_behind_the_same_handle(fleet):
    (handle,) = fleet.start("polite")
    if not fleet.platform.preempt(handle):
        pytest.skip(f"{fleet.platform.name}: nobody starts the same input again")
    first, second = fleet.wait_for_mark("start", handle, count=2)
    assert first != second
    assert len(fleet.marks("left", handle)) == 1, "\n".join(fleet.executor.logs(handle))
    assert not running(first) and fleet.statuses(handle)["r00"].state in THERE
    fleet.let_go()
    assert fleet.collect(handle)[0].value == "went"


# -------------------------------------------------------------------- cancel, collect


def test_cancel_asks_first_and_kills_after_the_grace(fleet):
    handles = fleet.start("polite", "stubborn")
    fleet.executor.cancel(handles, grace_s=1.0)
    polite, stubborn = fleet.collect(*handles)
    assert (polite.state, stubborn.state) == (State.CANCELLED, State.CANCELLED)
    assert len(fleet.marks("left", handles[0])) == 1  # it had its chance
    assert polite.exit_code in (4, None)  # None: the platform does not tell that of a cancelled one
    pids = [pid for h in handles for pid in fleet.marks("start", h)]
    wait_for(lambda: not any(running(pid) for pid in pids), "a cancelled replica still runs")


def test_cancel_again_or_of_one_that_has_ended_changes_nothing(fleet):
    (done,) = fleet.start("returns")
    assert fleet.collect(done)[0].ok
    fleet.executor.cancel([done], grace_s=0.0)
    fleet.executor.cancel([done])
    assert fleet.statuses(done)["r00"].state is State.SUCCEEDED


def test_collect_says_who_still_runs(fleet):
    handles = fleet.start("waits", "returns")
    fleet.wait_for_states({handles[0]: THERE, handles[1]: (State.SUCCEEDED,)})
    runs, done = fleet.executor.collect(handles, timeout=0.1)
    assert runs.state in THERE and "still running after 0.1 s" in runs.reason and done.ok


# -------------------------------------------------------------------- logs


def test_logs_and_their_tail(fleet):
    (handle,) = fleet.launch(fleet.spec("speaks", kwargs={"lines": 30, "pause_at": -1}))
    fleet.collect(handle)
    lines = fleet.executor.logs(handle)
    assert numbered(lines) == [f"line {i}" for i in range(30)]
    assert not any(line.startswith(ENDED) for line in lines)
    assert numbered(fleet.executor.logs(handle, tail=5)) == [f"line {i}" for i in range(25, 30)]
    assert fleet.executor.logs(handle, tail=0) == []
    assert fleet.another().logs(handle) == lines  # also after its end, from elsewhere


def test_follow_tells_each_line_once_and_ends_with_the_replica(fleet):
    (handle,) = fleet.launch(fleet.spec("speaks", kwargs={"lines": 30, "pause_at": 10}))
    fleet.wait_for_mark("start", handle)
    cut = fleet.platform.drop_logs()
    followed = (line for line in fleet.executor.follow(handle) if line.startswith("line "))
    first = [next(followed) for _ in range(10)]  # while it runs
    fleet.let_go()
    rest = list(followed)
    assert [*first, *rest] == [f"line {i}" for i in range(30)], f"the stream was cut: {cut}"


def test_follow_from_the_tail(fleet):
    (handle,) = fleet.launch(fleet.spec("speaks", kwargs={"lines": 20, "pause_at": 10}))
    wait_for(lambda: len(numbered(fleet.executor.logs(handle))) == 10, "it never spoke")
    followed = fleet.executor.follow(handle, tail=2)
    first = next(followed)
    fleet.let_go()
    assert numbered([first, *followed]) == [f"line {i}" for i in range(8, 20)]


# -------------------------------------------------------------------- another process


ELSEWHERE = """
import json
{recipe}
handles = executor.find({run!r})
states = [str(s.state) for s in executor.poll(handles)]
lines = [executor.logs(h) for h in handles]
executor.close()
print(json.dumps([[h.to_dict() for h in handles], states, lines]))
"""


def elsewhere(platform: Platform, run: str) -> list[list]:
    """find, poll and logs in a process that knows nothing."""
    env = {**os.environ, **platform.environ, "PYTHONPATH": str(ROOT)}
    code = ELSEWHERE.format(recipe=platform.recipe, run=run)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_find_sees_all_from_another_process_and_close_stops_nothing(fleet):
    old, runs, done = fleet.start("returns", "waits", "returns")
    (newer,) = fleet.launch(fleet.spec("waits", "r00", attempt=2))
    fleet.wait_for_mark("start", newer)
    fleet.collect(old, done)
    fleet.executor.close()
    fleet.executor = fleet.another()
    found, states, lines = elsewhere(fleet.platform, fleet.run)
    told = [Handle.from_dict(h) for h in found]
    assert [h.slot for h in told] == ["r00", "r01", "r02"]
    assert all(same(a, b) for a, b in zip(told, (newer, runs, done), strict=True))  # the newest of each slot
    assert [s in THERE for s in states] == [True, True, False] and states[2] == State.SUCCEEDED
    assert "here I am" in lines[1]
    assert all(running(pid) for h in (newer, runs) for pid in fleet.marks("start", h))
    assert elsewhere(fleet.platform, fleet.run + "-another")[0] == []


def test_another_process_than_the_launcher_can_cancel_and_collect(fleet):
    handles = fleet.start("polite", "waits")
    other = fleet.another()
    found = other.find(fleet.run)
    other.cancel(found[:1], grace_s=20.0)
    fleet.wait_for_mark("left", handles[0])
    fleet.let_go()
    cancelled, went = other.collect(found, timeout=WAIT_S)
    assert cancelled.state is State.CANCELLED and went.value == "went"


# -------------------------------------------------------------------- nothing can be started


def test_an_error_before_anything_is_started_names_the_next_thing_to_do(fleet):
    if fleet.platform.name == "local":
        pytest.skip("local: whatever cannot start is a failed handle")
    with pytest.raises(ExecutorError) as told:
        fleet.launch(on_no_such_gpu(fleet.spec("waits")))
    assert "no-such-gpu" in str(told.value)
    assert fleet.executor.find(fleet.run) == []
