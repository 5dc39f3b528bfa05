"""The process that launches and watches is killed with -9 at random moments, again and again, in one run.

    laptop ── kill -9 ──▶ the next laptop ── kill -9 ──▶ … ──▶ `diloco status`, `diloco stop`
      └─ replicas: real processes; toys that agree through a real folder, but train nothing

At every moment one process per slot; after the last laptop, none without a record; after `stop`, none.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from diloco.process import exitcodes, processes
from diloco.process.session import Session
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run, read_run
from diloco.runlog.reader import read_report
from diloco.runlog.summary import checks
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.supervision.slots.plan import Limits
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.errors import Fenced, Leaving
from tests.executors.test_supervisor import Numbers

HERE, ROOT = __name__, Path(__file__).parents[2]
TIMING = Timing(beat=0.05, dead_after=1.0)
REPLICAS = 3

# -------------------------------------------------------------------- what runs


def replica(argv: list[str]) -> int:
    """A replica with a real session: claim, heartbeat, the end of its launcher noticed; without its training."""
    url, slot, parent = argv[0], argv[2], argv[4] if len(argv) > 4 else ""
    try:
        there = lambda: not parent or processes.is_named_alive(parent)  # noqa: E731
        session = Session(read_run(url).store, slot, TIMING, parent_alive=there)
    except Fenced:
        return exitcodes.FENCED
    signal.signal(signal.SIGTERM, lambda *_: session.ask_to_leave())
    try:
        return live(session, Numbers())
    except Leaving:
        return end(session, "asked to leave", exitcodes.LEFT)
    except Fenced:
        return exitcodes.FENCED


def live(session: Session, state: Numbers) -> int:
    rv = session.rv
    rv.join(state)
    while not rv.is_done:
        for rv.members.status.inner in range(1, 4):
            time.sleep(0.05)
        if rv.is_behind:
            rv.catch_up()
            continue
        rv.offer(np.full(4, rv.step + 1, np.float32), 1)
        commit, mean = rv.settle(), np.empty(4, np.float32)
        rv.mean(commit, mean)
        state.apply(0, mean)
        rv.advance(commit)
        session.emit("step", step=commit.t, theta=rv.base)
        session.flush()
    return end(session, "done", exitcodes.DONE)


def end(session: Session, reason: str, code: int) -> int:
    session.rv.finish(reason)
    session.end()
    return code


def laptop(url: str, detached: bool) -> None:
    """The process that is killed: a supervisor."""
    executor = LocalProcessExecutor([HERE])
    parent = "" if detached else processes.process_name(os.getpid())
    print("go", flush=True)
    Supervisor(
        read_run(url), executor, SystemClock(), parent, f"{HERE}:replica", Limits(losses=100, backoff_s=0.01)
    ).supervise()


# -------------------------------------------------------------------- who lives


def living(run: Run) -> dict[str, list[tuple[int, int]]]:
    """slot -> (attempt, pid) of processes that write into its logs and own the name card of their launch."""
    folder, found = f"{run.url.removeprefix('file://')}/processes/", defaultdict[str, list[tuple[int, int]]](list)
    for entry in Path("/proc").iterdir():
        try:
            target = os.readlink(entry / "fd" / "1") if entry.name.isdigit() else ""
            if not target.startswith(folder) or "/supervisor" in target:
                continue
            alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            card = json.loads(Path(target.removesuffix(".log") + ".json").read_text())
        except (OSError, ValueError):
            continue
        slot, _, attempt = Path(target).name.removesuffix(".log").rpartition(".")
        if alive and card["pid"] == int(entry.name):
            found[slot].append((int(attempt), int(entry.name)))
    return found


@contextmanager
def watched(run: Run) -> Iterator[list[str]]:
    """Looks all the time; -> what should not be: two processes for one slot."""
    wrong, over = list[str](), threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            wrong.extend(f"{slot}: {two}" for slot, two in living(run).items() if len(two) > 1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield wrong
    finally:
        over.set()
        watcher.join()


def wait_for(condition, what: str, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"never: {what}"
        time.sleep(0.05)


def found(folder: Path) -> Run:
    raw = {
        "outer": {"sync_every": 1},
        "inner": {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}},
        "fleet": {"replicas": REPLICAS, "steps": 100_000},
    }
    (folder / "text.txt").write_text("a text that nobody reads")
    run = open_run(RunConfig.from_dict(raw, folder), f"file://{folder / 'run'}", SystemClock())
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    return run


class Laptops:
    """One after the other, each killed.   launch_s: what a launch takes here, as measured."""

    def __init__(self, run: Run, detached: bool, seed: int) -> None:
        self.run, self.detached, self.rng, self.launch_s = run, detached, random.Random(seed), 0.0

    def kill_one(self) -> None:
        """The first one while it runs; the others while they launch, or while they run."""
        code = f"from {HERE} import laptop; laptop({self.run.url!r}, {self.detached})"
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        began = time.monotonic()
        if self.launch_s and self.rng.random() < 0.5:
            time.sleep(self.rng.uniform(0.0, self.launch_s))
        else:
            wait_for(lambda: len(living(self.run)) == REPLICAS, "all of them run")
            self.launch_s = self.launch_s or time.monotonic() - began
            time.sleep(self.rng.uniform(0.0, 1.5))
        process.kill()
        process.wait()
        process.stdout.close()


def diloco(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executors.cli.main", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def known(run: Run) -> bool:
    """Whether a process without any local state sees every living replica."""
    executor = LocalProcessExecutor([], method="spawn")
    seen = {(h.slot, h.pid) for h in executor.find(run.url)}
    there = {(slot, pid) for slot, lives in living(run).items() for _, pid in lives}
    return there <= seen


def shown(run: Run) -> set[str]:
    """Slots whose newest session runs and has its process."""
    newest = {x.slot: x for x in read_report(run.store).sessions if x.how == "running"}
    there = living(run)
    return {slot for slot, session in newest.items() if session.pid in [pid for _, pid in there[slot]]}


def end_of_story(run: Run, wrong: list[str]) -> None:
    """After the last kill."""
    assert wrong == []
    wait_for(lambda: known(run), "everybody is known")
    wait_for(lambda: shown(run) == {s for s, there in living(run).items() if there}, "who lives has claimed its slot")
    before, status, after = shown(run), diloco("status", run.url, "--json"), shown(run)
    assert status.returncode == 0, status.stderr
    told = {x["slot"] for x in json.loads(status.stdout)["sessions"] if x["how"] == "running"}
    assert before & after <= told <= before | after, status.stdout
    stopped = diloco("stop", run.url, "--grace", "10")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    assert not any(living(run).values())
    report = read_report(run.store)
    assert all(c.ok for c in checks(report)), checks(report)
    attempts = [(e["slot"], e["attempt"]) for e in report.of_kind("launched")]
    assert len(attempts) == len(set(attempts)), "one launch was told twice"


@pytest.mark.parametrize(
    ("count", "detached"),
    [pytest.param(n, d, marks=pytest.mark.slow) for n, d in ((3, True), (3, False), (10, False), (10, True))],
)
def test_kill_9_of_whoever_launches(tmp_path, count, detached):
    run = found(tmp_path)
    with watched(run) as wrong:
        laptops = Laptops(run, detached, seed=count + detached)
        for _ in range(count):
            laptops.kill_one()
            wait_for(lambda: known(run), "everybody is known")
        if detached:  # they live on without a supervisor
            head = read_report(run.store).head
            wait_for(lambda: read_report(run.store).head > head, "the run goes on")
    end_of_story(run, wrong)


@pytest.mark.slow
def test_replicas_of_a_laptop_that_is_gone_for_good_end_by_themselves(tmp_path):
    run = found(tmp_path)
    with watched(run) as wrong:
        Laptops(run, detached=False, seed=1).kill_one()
        wait_for(lambda: not any(living(run).values()), "they leave, as their launcher is gone")
    end_of_story(run, wrong)
