"""No rented machine without a lease, at any moment: supervisors die after each of their requests, in virtual time.

    lease   control's `until`: a moment in the future, at most half an hour away, at which replicas leave by themselves

Each check assumes that every other process died now: a replica that bills, or waits for a machine, ends by itself.
The same with containers and the real client is tests/executors/test_modal_leases.py.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from executors.cli.starting.foreground import supervise_here
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status
from executors.platforms.places import Place
from executors.supervision.costs import LEASE_S
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.store import Body, Buffer, Store
from tests.support.cloud import CloudExecutor
from tests.support.world import LIMITS, World

pytestmark = pytest.mark.usefixtures("decoded_once")

LEAVES_S = 60  # from the end of the lease until no replica runs
GPUS = [Place("modal", gpu=("H100",)).to_dict()]


@pytest.fixture(autouse=True)
def supervisors_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each claims as a process of its own, which is dead when the next one looks."""
    starts = count(1)
    monkeypatch.setattr("diloco.process.processes.start_ticks", lambda pid: next(starts))


class Killed(BaseException):
    """kill -9: nothing is cleaned up."""


class Countdown:
    """Dies once so many requests were done, and no process has heard the answer of the last one."""

    def __init__(self, requests: int) -> None:
        self.left = requests

    def __call__(self, request: Callable[[], Any]) -> Any:
        answer = request()
        self.left -= 1
        if self.left <= 0:
            raise Killed
        return answer


class DyingStore:
    """The store of a supervisor that is going to be killed."""

    def __init__(self, store: Store, counted: Countdown) -> None:
        self.url, self._store, self._counted = store.url, store, counted

    def put(self, key: str, body: Body) -> None:
        self._counted(lambda: self._store.put(key, body))

    def create(self, key: str, body: Buffer) -> None:
        self._counted(lambda: self._store.create(key, body))

    def get(self, key: str) -> bytes | None:
        return self._counted(lambda: self._store.get(key))

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._counted(lambda: self._store.get_into(key, out, start))

    def list(self, prefix: str) -> list[str]:
        return self._counted(lambda: self._store.list(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        self._counted(lambda: self._store.delete(keys))


class DyingExecutor(CloudExecutor):
    """The same for its platform; each launch is a request of its own."""

    def __init__(self, cloud: Any, counted: Countdown) -> None:
        super().__init__(cloud)
        self._counted = counted

    def launch_replicas(self, specs: Sequence[ReplicaSpec] | None = None, **short: Any) -> list[Handle]:
        return [self._counted(lambda s=s: CloudExecutor.launch_replicas(self, [s]))[0] for s in specs or ()]

    def poll(self, handles: Iterable[Handle]) -> list[Status]:
        return self._counted(lambda: CloudExecutor.poll(self, handles))

    def find(self, run: str) -> list[Handle]:
        return self._counted(lambda: CloudExecutor.find(self, run))


def kill_after(world: World, requests: int, each: Callable[[], Any] = lambda: None, ticks: int = 40) -> bool:
    """A supervisor that dies then; -> did it get so far within `ticks`?"""
    counted = Countdown(requests)
    try:
        run = replace(world.run, store=DyingStore(world.run.store, counted))
        supervisor = Supervisor(run, DyingExecutor(world.cloud, counted), world.clock, limits=LIMITS)
        for _ in range(ticks):
            supervisor._patient_tick()
            each()
            world.cloud.live(1, lambda: check_leases(world))
    except Killed:
        return True
    return False


def check_leases(world: World) -> None:
    """If every supervisor died now: running replicas leave within half an hour, waiting ones find the lease over."""
    until, now = read_control(world.run.store).until, world.clock.wall()
    live = [j for j in world.cloud.jobs.values() if not j.state.ended]
    for job in live:
        assert 0 < until <= now + LEASE_S + 1, f"{job.spec.slot} has no lease: until {until:.0f}, now {now:.0f}"
    for job in live:
        assert not job.alive or until > now, f"{job.spec.slot} runs {now - until:.0f} s after its lease"


def founded(folder: Path, published: bool = True) -> World:
    world = World(folder, places=GPUS)
    world.supervisor.lease.beat("left")
    if not published:
        world.run.store.delete([layout.MODEL_MANIFEST])
    return world


def publish(world: World) -> None:
    """The publisher does its work as soon as it is launched."""
    for job in [j for (slot, _), j in world.cloud.jobs.items() if slot == "publish" and not j.state.ended]:
        world.run.store.put(layout.MODEL_MANIFEST, b"{}")
        world.cloud._over(job, State.SUCCEEDED, 0)


def requests_until_all_run(folder: Path, published: bool) -> int:
    """The number of requests of a supervisor that is not killed."""
    world, counted = founded(folder, published), Countdown(10**6)
    run = replace(world.run, store=DyingStore(world.run.store, counted))
    supervisor = Supervisor(run, DyingExecutor(world.cloud, counted), world.clock, limits=LIMITS)
    while not world.cloud.running("r01"):
        supervisor._patient_tick()
        publish(world)
        if ("r01", 1) in world.cloud.jobs:
            world.cloud.begin("r00", "r01")
        world.cloud.live(1)
    return 10**6 - counted.left


@pytest.mark.parametrize("published", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_supervisor_may_die_after_any_request_of_a_launch(tmp_path: Path, published: bool) -> None:
    (tmp_path / "first").mkdir()
    requests = requests_until_all_run(tmp_path / "first", published)
    assert requests >= 20
    launched = 0
    for n in range(1, requests + 1):
        folder = tmp_path / str(n)
        folder.mkdir()
        world = founded(folder, published)
        assert kill_after(world, n, lambda world=world: publish(world))
        check_leases(world)
        launched += len(world.cloud.jobs) > 0
        _nobody_is_left(world)
    assert launched >= 3, "kills after a launch, too"


def _nobody_is_left(world: World) -> None:
    """Half of the machines come at once, the others much later; every supervisor is dead."""
    waiting = [j for j in world.cloud.jobs.values() if j.state is State.PENDING and j.spec.slot != "publish"]
    for job in waiting[::2]:
        world.cloud.start(job)
    world.cloud.live(LEASE_S - 100, lambda: check_leases(world), 20.0)
    for job in waiting[1::2]:
        world.cloud.start(job)
    world.cloud.live(100 + LEAVES_S, lambda: check_leases(world), 20.0)
    assert not [j.spec.slot for j in world.cloud.jobs.values() if j.alive], "it bills for ever"


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 4))])
def test_twenty_kills_one_after_the_other(tmp_path: Path, seed: int) -> None:
    """Kills of supervisors, replicas and hosts, with minutes in which no supervisor looks."""
    rng, world = random.Random(seed), founded(tmp_path, published=False)
    for _ in range(20):
        kill_after(world, rng.randint(1, rng.choice([100, 1000])), lambda: (publish(world), _meddle(world, rng)))
        check_leases(world)
        world.cloud.live(rng.choice([0, 5, 60, 600]), lambda: check_leases(world))
    assert {slot for slot, _ in world.cloud.jobs} >= {"r00", "r01"}
    _nobody_is_left(world)


def _meddle(world: World, rng: random.Random) -> None:
    """Machines come; replicas are preempted, started again, lost."""
    for (slot, attempt), job in list(world.cloud.jobs.items()):
        if slot == "publish" or job.state.ended:
            continue
        if job.state is State.PENDING and rng.random() < 0.5:
            world.cloud.start(job)
        elif job.alive and rng.random() < 0.1:
            job.alive = False  # preempted
        elif job.state is State.RUNNING and not job.alive and rng.random() < 0.3:
            world.cloud.restart(slot, attempt)
        elif job.alive and rng.random() < 0.05:
            world.cloud._over(job, State.LOST, None)


def test_a_run_that_moves_to_this_machine_keeps_the_lease_of_who_still_bills_elsewhere(tmp_path: Path) -> None:
    world = founded(tmp_path)
    kill_after(
        world, 10**6, lambda: world.cloud.begin(*(s for s, j in world.cloud.jobs if not world.cloud.job(s).alive)), 3
    )
    assert world.cloud.running("r00") and world.cloud.running("r01")
    write_control(world.run.store, world.clock, places=[Place("local").to_dict()])
    supervisor = Supervisor(world.run, CloudExecutor(world.cloud), world.clock, limits=LIMITS)
    for _ in range(5):
        supervisor._patient_tick()
        check_leases(world)
    _nobody_is_left(world)


def test_a_terminal_looks_after_who_still_runs_where_the_run_lived_before(tmp_path: Path, monkeypatch) -> None:
    """Without the former platform a launch there looks gone, and its slot would be launched twice."""
    world, built = founded(tmp_path), []
    write_control(world.run.store, world.clock, places=[Place("local").to_dict()])

    def build(*places: Any) -> Any:
        built.append(places)
        raise ExecutorError("enough")

    monkeypatch.setattr("executors.cli.starting.foreground.build_executor", build)
    with pytest.raises(ExecutorError, match="enough"):
        supervise_here(world.run)
    ((present, former),) = built
    assert [p["executor"] for p in present] == ["local"] and [p["executor"] for p in former] == ["modal"]
