"""The supervisor on real processes that agree through a real folder, but train nothing and import no torch."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from diloco.process import exitcodes, processes
from diloco.process.journal import Journal
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import ModelRecord, Run, read_run
from diloco.runlog.reader import SUPERVISOR, Report, read_report
from diloco.runlog.summary import checks
from executors.platforms.base import State
from executors.platforms.on_host.executor import LocalProcessExecutor, newest_claims
from executors.supervision.holder import supervisor_of
from executors.supervision.lease import Lease, Supervised
from executors.supervision.shutdown import Patience, stop_run
from executors.supervision.slots.plan import Limits
from executors.supervision.slots.slot_state import LOST_LEASE
from executors.supervision.supervisor import Supervisor, main
from rendezvous import layout
from rendezvous.agreement.membership import claim, claims_above, read_control, write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Fenced, Leaving, StoreFull
from rendezvous.records.records import Beat
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.rendezvous.test_keeping import blob_bytes, fill
from tests.support.fleet import ENDLESS, WAIT_S
from tests.support.ticking import tick_until
from tests.support.workers import identity, worker

HERE, ROOT = __name__, Path(__file__).parents[2]
QUICK = Limits(backoff_s=0.01)
TIMING = Timing(beat=0.05, dead_after=0.5)

# -------------------------------------------------------------------- what the children do


class Numbers:
    """The least that replicas can agree on."""

    def __init__(self) -> None:
        self.theta = np.zeros(4, np.float32)

    def size(self, fragment: int) -> int:
        return 4

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        self.theta -= mean

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {"theta": self.theta}

    def load(self, arrays) -> None:
        self.theta[:] = arrays["theta"]


class Toy:
    """A replica's life without its training: claim, beat, heal, offer, leave."""

    def __init__(self, url: str, slot: str) -> None:
        store, clock = FileStore(url.removeprefix("file://")), SystemClock()
        self.rv = Rendezvous(store, clock, slot, Rules(), TIMING, emit=self.tell, **identity(os.getpid()))
        self.journal: Journal | None = None
        self.rv.claim()
        self.journal = Journal(store, clock, slot, self.rv.generation)
        self.ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self.rv.ask_to_leave())
        threading.Thread(target=tick_until, args=(self.rv.members, self.ended.is_set), daemon=True).start()

    def tell(self, event: str, **fields) -> None:
        if self.journal:
            self.journal.emit(event, **fields)

    def live(self) -> int:
        rv, state = self.rv, Numbers()
        try:
            rv.join(state)
            self.tell("joined", step=rv.step)
            while not rv.is_done:
                self.step(state)
        except Leaving:
            return self.end("asked to leave", exitcodes.LEFT)
        except Fenced:
            return exitcodes.FENCED
        return self.end("done", exitcodes.DONE)

    def step(self, state: Numbers) -> None:
        rv = self.rv
        for rv.members.status.inner in range(1, 5):
            time.sleep(0.05)
        if rv.is_behind:
            rv.catch_up()
            return
        t = rv.step
        rv.offer(np.full(4, t + 1, np.float32), 1, stats={"reward": t / 10})
        commit, mean = rv.settle(), np.empty(4, np.float32)
        rv.mean(commit, mean)
        state.apply(0, mean)
        rv.advance(commit)
        self.tell("step", step=t, theta=rv.base)
        if self.journal:
            self.journal.flush()

    def end(self, reason: str, code: int) -> int:
        self.rv.finish(reason)
        if self.journal:
            self.journal.flush()
        self.ended.set()
        return code


def replica(argv: list[str]) -> int:
    return Toy(argv[0], argv[2]).live()


def replica_that_hangs(argv: list[str]) -> int:
    toy = Toy(argv[0], argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    toy.rv.members.status.phase = "train"
    time.sleep(600)
    return 1


def user_error(argv: list[str]) -> int:
    print("reward.py: line 3: no such function", file=sys.stderr)
    return exitcodes.USER_ERROR


def killed(argv: list[str]) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def crash(argv: list[str]) -> int:
    raise ImportError("no module named spoons")


def supervise(url: str) -> None:
    """A detached supervisor of toys, for a process of its own."""
    executor = LocalProcessExecutor([HERE])
    Supervisor(read_run(url), executor, SystemClock(), entrypoint=f"{HERE}:replica").supervise()


# -------------------------------------------------------------------- the tests


@pytest.fixture
def executor():
    made = LocalProcessExecutor([HERE])
    yield made
    made.close()


def found(folder: Path, log: dict | None = None, **fleet) -> Run:
    raw = {
        "log": log or {},
        "outer": {"sync_every": 1},
        "inner": {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}},
        "fleet": {"replicas": 2, "steps": 6, **fleet},
    }
    (folder / "text.txt").write_text("a text that nobody reads")
    run = open_run(RunConfig.from_dict(raw, folder), str(folder / "run"), SystemClock())
    run.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    return run


def supervisor_for(run: Run, executor: LocalProcessExecutor, function: str = "replica", **more) -> Supervisor:
    return Supervisor(run, executor, SystemClock(), entrypoint=f"{HERE}:{function}", limits=QUICK, **more)


def kill_once(slot: str, from_step: int):
    """SIGKILL in the middle of an outer step, as the demo does."""

    def tick(supervisor: Supervisor, report: Report) -> None:
        handle, beat = supervisor.handle(slot), report.beats.get(slot)
        if handle and beat and beat.pid == handle.pid and beat.step >= from_step and not report.of_kind("killed"):
            os.kill(handle.pid, signal.SIGKILL)
            supervisor.emit("killed", slot=slot, pid=handle.pid, step=beat.step, inner=beat.inner)

    return tick


def wait_for(condition, what: str, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.02)


def test_a_killed_replica_is_replaced_and_no_step_is_lost(tmp_path, executor):
    run = found(tmp_path)
    outcome = supervisor_for(run, executor, each_tick=kill_once("r01", 1)).supervise()
    report = read_report(run.store)
    assert outcome.code == exitcodes.DONE and all(c.ok for c in checks(report)), checks(report)
    sessions = {x.name: x for x in report.sessions}
    assert [x.how for x in sessions.values()] == ["done", "killed", "done"]
    assert sessions["r01-2"].commits
    assert [e["slot"] for e in report.of_kind("launched")] == ["r00", "r01", "r01"]
    assert report.of_kind("lost")[0]["exit_code"] == -9
    assert supervisor_of(run.store) is None


@pytest.mark.slow
def test_a_run_that_is_done_launches_nobody(tmp_path, executor):
    run = found(tmp_path, steps=1)
    assert supervisor_for(run, executor).supervise().code == 0
    before = len(read_report(run.store).of_kind("launched"))
    assert supervisor_for(run, executor).supervise().code == 0
    assert len(read_report(run.store).of_kind("launched")) == before


def test_what_replicas_did_not_collect_goes_when_the_run_has_ended(tmp_path, executor):
    """The one that wrote the last snapshot was killed before it swept."""
    run = found(tmp_path, steps=40, keep="5 kB")
    run.store.put(layout.MODEL_MANIFEST, ModelRecord({}, [["w", [25], "float32"]], "n", 0.0).encode())
    fill(run.store, 41)
    run.store.delete([layout.commit_key(40)])
    assert blob_bytes(run.store) > 10_000
    outcome = supervisor_for(run, executor).supervise()
    assert outcome.code == exitcodes.DONE and blob_bytes(run.store) <= 5_000
    (swept,) = read_report(run.store).of_kind("collected")
    assert swept["who"].startswith(SUPERVISOR) and swept["deltas_from"] > 35


def test_a_user_error_ends_the_run_with_its_last_lines(tmp_path, executor):
    outcome = supervisor_for(found(tmp_path), executor, "user_error").supervise()
    assert outcome.code == exitcodes.USER_ERROR
    assert "reward.py: line 3" in outcome.text


def test_a_crash_loop_ends_after_three_starts(tmp_path, executor):
    run = found(tmp_path)
    outcome = supervisor_for(run, executor, "crash").supervise()
    assert outcome.code == 1 and "3 times in a row" in outcome.text and "no module named spoons" in outcome.text
    launched = [e["slot"] for e in read_report(run.store).of_kind("launched")]
    assert launched.count("r00") <= 3 and launched.count("r01") <= 3


def test_a_publisher_that_is_killed_before_it_prints_is_told_with_its_end(tmp_path, executor, monkeypatch):
    """The error ended with "Its last lines:" and no line, as after a kill for memory."""
    monkeypatch.setattr("executors.supervision.starts.PUBLISHER", f"{HERE}:killed")
    run = found(tmp_path)
    run.store.delete([layout.MODEL_MANIFEST])
    outcome = supervisor_for(run, executor, "replica_that_hangs").supervise()
    told = "the start model cannot be published (killed by SIGKILL). It printed nothing"
    assert (outcome.code, outcome.text) == (1, f"before the first step: {told}")


@pytest.mark.slow
def test_interrupted_replicas_leave_and_the_same_run_goes_on(tmp_path, executor):
    run = found(tmp_path, steps=8)

    def interrupt(supervisor: Supervisor, report: Report) -> None:
        if report.head >= 2:
            supervisor.leave()

    outcome = supervisor_for(run, executor, each_tick=interrupt).supervise()
    report = read_report(run.store)
    assert outcome.code == exitcodes.LEFT and "interrupted at outer step" in outcome.text
    assert {x.how for x in report.sessions} == {"left"} and 2 <= report.head < 8
    assert supervisor_for(run, executor).supervise().code == exitcodes.DONE
    assert all(c.ok for c in checks(read_report(run.store)))


@pytest.mark.slow
def test_a_second_ctrl_c_kills(tmp_path, executor):
    run = found(tmp_path)

    def kill(supervisor: Supervisor, report: Report) -> None:
        if len(report.beats) == 2:
            supervisor.kill()

    began = time.monotonic()
    outcome = supervisor_for(run, executor, "replica_that_hangs", each_tick=kill).supervise()
    assert "killed" in outcome.text and time.monotonic() - began < 120


@pytest.mark.slow
def test_fewer_replicas_wanted_drains_the_last_slot(tmp_path, executor):
    run = found(tmp_path, replicas=3, steps=ENDLESS)  # of 8 steps the last one may come before the word does

    def shrink(supervisor: Supervisor, report: Report) -> None:
        if report.head >= 2 and report.wanted.replicas == 3:
            write_control(run.store, SystemClock(), replicas=2)
        if "left" in [x.how for x in report.sessions] and report.wanted.steps == ENDLESS:
            write_control(run.store, SystemClock(), steps=report.head + 2)

    assert supervisor_for(run, executor, each_tick=shrink).supervise().code == 0
    report = read_report(run.store)
    assert [(x.name, x.how) for x in report.sessions] == [("r00-1", "done"), ("r01-1", "done"), ("r02-1", "left")]


@pytest.mark.slow
def test_replicas_outlive_their_supervisor_and_the_next_adopts_them(tmp_path, executor):
    run = found(tmp_path, steps=25)
    code = f"from {HERE} import supervise; supervise({run.url!r})"
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    wait_for(lambda: read_report(run.store).head >= 1, "the first outer step")
    with pytest.raises(Supervised, match=str(first.pid)):
        supervisor_for(run, executor)
    first.kill()
    first.wait()
    before = read_report(run.store)
    assert not before.done and len(executor.find(run.url)) == 2
    assert supervisor_for(run, executor).supervise().code == 0
    after = read_report(run.store)
    assert [x.name for x in after.sessions] == ["r00-1", "r01-1"]  # no slot was launched twice
    assert len(after.of_kind("launched")) == 2 and all(c.ok for c in checks(after))


def test_stop_proves_that_nobody_runs_any_more(tmp_path, executor):
    run, said = found(tmp_path, steps=500), []
    supervisor = supervisor_for(run, executor)
    while not {"r00", "r01"} <= {slot for slot, beat in read_report(run.store).beats.items() if beat.step}:
        supervisor.tick()  # until both have taken an outer step
    supervisor.lease.beat("left")
    found_ends = stop_run(run.store, SystemClock(), 30.0, said.append)
    assert [(e.name, e.live) for e in found_ends] == [("r00-1", False), ("r01-1", False)]
    logs = [path.read_text() for path in sorted(tmp_path.rglob("processes/*.log"))]
    assert all("left at outer step" in e.text for e in found_ends), (found_ends, said, logs)
    assert not any("killed" in text for text in said)
    assert read_control(run.store).stop
    again = open_run(run_config(run, tmp_path), run.url, SystemClock())  # the same command resumes
    assert not read_control(again.store).stop


@pytest.mark.parametrize(
    ("stops", "code", "words"), [(True, exitcodes.LEFT, "stopped by"), (False, LOST_LEASE, "another supervisor")]
)
def test_a_supervisor_without_its_lease_says_who_took_it(tmp_path, executor, stops, code, words):
    """After a `stop` that had to kill, the supervisor spoke of another one that keeps the replicas."""
    run = found(tmp_path)
    supervisor = supervisor_for(run, executor)
    if stops:
        write_control(run.store, SystemClock(), stop=True)
    Lease.seize(run.store, SystemClock())
    outcome = supervisor.tick()
    assert outcome is not None and outcome.code == code and words in outcome.text


def run_config(run: Run, folder: Path) -> RunConfig:
    return RunConfig.from_dict(run.record.config, folder)


@pytest.mark.slow
def test_stop_kills_what_does_not_leave(tmp_path, executor):
    run, said = found(tmp_path, replicas=1), []
    supervisor = supervisor_for(run, executor, "replica_that_hangs")
    while not read_report(run.store).beats:
        supervisor.tick()
    supervisor.lease.beat("left")
    (end,) = stop_run(run.store, SystemClock(), 0.3, said.append)
    assert not end.live and "gone without a leave record" in end.text
    assert any("still there after 0 s; killed" in text for text in said)
    handle = supervisor.handle("r00")
    assert handle and executor.collect([handle], timeout=60)[0].state is State.LOST


def test_a_supervisor_of_its_own_rebuilds_its_executor_from_the_bucket(tmp_path, capsys):
    run = found(tmp_path)
    write_control(run.store, SystemClock(), places=[{"executor": "local", "options": {"colour": "red"}}])
    assert main([run.url]) == 1 and "takes no option colour" in capsys.readouterr().out
    write_control(run.store, SystemClock(), places=[{"executor": "local", "gpu": ["7"], "options": {"gpus": []}}])
    assert main([run.url]) == exitcodes.USER_ERROR and "this machine has no GPU 7" in capsys.readouterr().out
    assert read_report(run.store).of_kind("launched") == []


@pytest.mark.slow
def test_a_supervisor_of_its_own_brings_a_run_to_its_end(tmp_path, capsys):
    run = found(tmp_path, steps=3)
    write_control(run.store, SystemClock(), places=[{"executor": "local", "options": {"preload": [HERE], "cores": 1}}])
    assert main([run.url, "--entrypoint", f"{HERE}:replica"]) == exitcodes.DONE
    report = read_report(run.store)
    assert report.done and {e["executor"] for e in report.of_kind("launched")} == {"local"}
    assert "all 3 outer steps are committed" in capsys.readouterr().out


def test_a_detached_supervisor_that_gives_up_ends_with_the_documented_code(monkeypatch, capsys):
    """Before: 1, where `diloco train` in the foreground had 75."""

    def full(*_: object) -> None:
        raise StoreFull("cannot write log/supervisor-1: no space left")

    monkeypatch.setattr("executors.supervision.alone.supervise_run", full)
    assert main(["runs/full"]) == exitcodes.GAVE_UP and "no space left" in capsys.readouterr().out


def test_a_second_supervisor_goes_and_says_why(tmp_path, executor, capsys):
    run = found(tmp_path)
    first = supervisor_for(run, executor)
    assert main([run.url]) == 3 and f"process {os.getpid()}" in capsys.readouterr().out
    first.lease.beat("left")


def test_a_supervisor_in_a_container_is_not_judged_by_the_pids_of_another(monkeypatch):
    store, clock = MemoryStore(), SlowClock()
    monkeypatch.setenv("DILOCO_PLACE", "modal/supervisor.1")
    first = Lease.take(store, clock)
    monkeypatch.setenv("DILOCO_PLACE", "modal/supervisor.2")  # the same machine name, and no such pid
    beating = SlowClock(lambda: first.beat("watching"))
    with pytest.raises(Supervised, match=r"modal/supervisor\.1"):
        Lease.take(store, beating)
    assert Lease.take(store, clock).generation == 2  # the first one is silent now


# -------------------------------------------------------------------- the lease


class SlowClock:
    """Virtual time; `each` happens at every sleep."""

    def __init__(self, each=lambda: None) -> None:
        self._now, self._each = 1000.0, each

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self._each()


def elsewhere(store: MemoryStore, n: int, phase: str = "watching") -> None:
    beat = Beat(SUPERVISOR, 1, n, phase, 0, 0, 0.0, time.time(), "elsewhere", 77)
    store.put(layout.beat_key(SUPERVISOR), beat.encode())


def held(n: int = 1, phase: str = "watching") -> MemoryStore:
    """A run that a process on another machine supervises."""
    store = MemoryStore()
    claim(store, SystemClock(), SUPERVISOR, host="elsewhere", pid=77)
    elsewhere(store, n, phase)
    return store


def test_a_beating_supervisor_elsewhere_keeps_its_run():
    store, beats = held(), iter(range(2, 99))
    with pytest.raises(Supervised, match="process 77 on elsewhere"):
        Lease.take(store, SlowClock(lambda: elsewhere(store, next(beats))))


def test_a_supervisor_on_a_slow_store_keeps_its_run():
    """With 4 s per request, a supervisor writes a heartbeat every 24 to 32 s; 10 s of silence counted as its end."""

    class SlowStore(MemoryStore):
        def get(self, key):
            clock.sleep(4.0)
            return super().get(key)

    def beat():
        if clock.now() >= due[-1]:
            due.append(due[-1] + 32.0)
            elsewhere(store, len(due))

    clock, store, due = SlowClock(beat), SlowStore(), [float("inf")]
    claim(store, SystemClock(), SUPERVISOR, host="elsewhere", pid=77)
    elsewhere(store, 1)
    due[0] = clock.now() + 32.0
    with pytest.raises(Supervised, match="process 77 on elsewhere"):
        Lease.take(store, clock)
    assert Patience(store, clock, 0.0).silent_s > 32.0, "`diloco stop` waits for a replica's next heartbeat, too"
    assert Patience(store, clock, None).seconds() > 73.0, "so long took a replica that lost nothing"


def test_stop_does_not_wait_for_the_heartbeat_of_a_dead_process_of_this_machine():
    """Before: 12 s in a run with a bucket, though its replicas were known to be dead."""

    class FarStore(MemoryStore):
        near = False

    store, clock = FarStore(), SlowClock()
    child = worker(store.url)
    claim(store, SystemClock(), "r00", **identity(child.pid))
    store.put(layout.beat_key("r00"), Beat("r00", 1, 9, "train", 3, 1, 1.0, time.time()).encode())
    patience = Patience(store, clock, 0.0)
    (of_r00,) = claims_above(store, "r00")
    assert patience.hears(of_r00)
    child.communicate(b"\n")
    assert not patience.hears(of_r00)


def test_the_claims_of_all_slots_are_read_at_the_same_time():
    """`diloco stop` reads them a dozen times: with 16 replicas and .1 s per request, that took a minute."""
    together = threading.Barrier(3)

    class FarStore(MemoryStore):
        cheap = False

        def get(self, key):
            if key in first:
                together.wait(WAIT_S)
            return super().get(key)

    first, store = set(), FarStore()
    write_control(store, SystemClock(), replicas=3, min_replicas=1, steps=3)
    for slot in ("r00", "r01", "r02"):
        claim(store, SystemClock(), slot)
    first |= {layout.claim_key(slot, 1) for slot in ("r00", "r01", "r02")}
    assert [found.slot for found in newest_claims(store)] == ["r00", "r01", "r02"]


def test_a_silent_supervisor_elsewhere_is_succeeded_and_learns_it():
    store = held()
    old = Lease(store, SlowClock(), generation=1)
    assert not old.lost
    assert Lease.take(store, SlowClock()).generation == 2
    assert old.lost


def test_a_supervisor_that_has_left_is_succeeded_at_once():
    clock = SlowClock()
    assert Lease.take(held(phase="left"), clock).generation == 2
    assert clock.now() == 1000.0


def test_a_silent_supervisor_of_this_machine_keeps_its_run_while_its_process_lives():
    store, clock = MemoryStore(), SlowClock()
    child = worker(store.url)  # loading something heavy
    claim(store, SystemClock(), SUPERVISOR, **identity(child.pid))
    with pytest.raises(Supervised, match=f"process {child.pid}"):
        Lease.take(store, clock)
    child.communicate(b"\n")
    assert Lease.take(store, clock).generation == 2


def test_a_dead_supervisor_of_this_machine_is_succeeded_at_once():
    store, clock = MemoryStore(), SlowClock()
    child = worker(store.url)
    about = identity(child.pid)
    child.communicate(b"\n")
    claim(store, SystemClock(), SUPERVISOR, **about)
    assert supervisor_of(store) is None
    assert Lease.take(store, clock).generation == 2
    assert clock.now() == 1000.0


def test_our_own_lease_is_seen_by_others():
    store = MemoryStore()
    lease = Lease.take(store, SlowClock())
    holder = supervisor_of(store)
    assert holder is not None and holder.pid == os.getpid()
    lease.beat("left")
    assert supervisor_of(store) is None


def test_a_process_name_is_what_a_replica_can_check():
    name = processes.process_name(os.getpid())
    assert processes.is_named_alive(name) and processes.is_named_alive(f"{os.getpid()}:")
    assert not processes.is_named_alive(f"{os.getpid()}:1")
