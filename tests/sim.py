"""The real engine in a made-up world: seeded, in virtual time, with an observer that sees everything.

        Schedule(seed) ─▶ World ── one greenlet per process and per heartbeat ──▶ Rendezvous, Membership (unchanged)
                            │                                                        │ every store and clock call
                            │ ◀──────────────── switch ──────────────────────────────┘
                            ├─ SimStore  kill · pause and zombie return · error · lost answer · duplicate · torn upload
                            ├─ Fleet     double launches, joins, leaves, control records, loss of the whole fleet
                            └─ Observer  checks the promises of the protocol at each write, with its own arithmetic

    python -m tests.sim 1000 [--start N] [--jobs J] [--bug NAME]      one line per red seed, which replays it

Only `World.rng` decides anything, so a seed is a schedule, whatever PYTHONHASHSEED says.

Not promised: that a green seed proves anything; thousands of them, and planted bugs that turn them red, convince.
"""

import argparse
import heapq
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import xxhash
from greenlet import GreenletExit, getcurrent, greenlet

from rendezvous import layout, records
from rendezvous.errors import KeyExists, StoreUnclear
from rendezvous.rules import Rules, Timing
from rendezvous.store import Buffer
from tests.sim_fleet import Fleet
from tests.sim_observer import Observer, Violation
from tests.sim_replica import Process

RULES = Rules(fragments=1, sync_every=4, max_carry=2, snapshot_every=3)
TIMING = Timing(poll=0.5, beat=1.5, dead_after=5.0, start_patience=10.0, give_up=600.0, store_patience=60.0, grace=10.0)


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Schedule:
    """What a seed means.  Probabilities are per store call, durations in virtual seconds."""

    seed: int
    replicas: int = 3
    min_replicas: int = 2
    steps: int = 0  # 0: until the world ends
    rules: Rules = RULES
    timing: Timing = TIMING
    speeds: tuple[float, ...] = (1.0,)  # seconds per inner step, by slot
    hung: tuple[int, ...] = ()  # slots whose trainer stands still for ever after a while
    mute: tuple[int, ...] = ()  # slots whose heartbeat never reaches the store
    latency: float = 0.04
    slow_blobs: float = 4.0
    error: float = 0.0
    lost: float = 0.0
    duplicate: float = 0.0
    kill: float = 0.0
    pause: float = 0.0
    torn: bool = False
    flip: float = 0.0  # per outer step and place
    list_lag: float = 0.0
    churn: bool = False
    double_launch: float = 0.1
    fleet_loss: float | None = None
    slow: float = 0.0
    zeros: float = 0.0  # share of rounds in which nothing is learned
    calm: float = 60.0  # no fault is injected after this
    end: float = 200.0
    settled: int = 4  # commits after the calm that end the run early
    actions: tuple[tuple[float, str, int], ...] = ()  # scripted: (time, "kill" | "term" | "pause" | "launch", slot)


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    r = random.Random(seed)
    n = r.choice((1, 2, 3, 3, 4, 5))
    m = r.randint(1, max(1, min(3, n - 1)))
    f = r.choice((0.0, 0.5, 1.0, 3.0))
    fragments = r.choice((1, 1, 2, 3))
    rules = Rules(
        fragments=fragments, sync_every=fragments * r.choice((1, 2, 4)), max_carry=r.choice((0, 1, 2, 2, 3)),
        snapshot_every=r.choice((2, 3, 5)),
    )  # fmt: skip
    timing = replace(TIMING, dead_after=r.choice((4.0, 8.0)), give_up=r.choice((25.0, 600.0, 600.0)))
    schedule = Schedule(
        seed, n, m, steps=r.choice((0, 0, 0, 12)), rules=rules, timing=timing,
        speeds=tuple(r.choice((0.6, 1.0, 1.0, 1.0, 1.5, 4.0)) for _ in range(n)),
        hung=(n - 1,) if n > m and r.random() < 0.15 else (), mute=(r.randrange(n),) if r.random() < 0.15 else (),
        slow_blobs=r.choice((4.0, 4.0, 40.0)), error=0.02 * f, lost=0.03 * f, duplicate=0.02 * f, kill=0.0012 * f,
        pause=0.0012 * f, slow=0.004 * f, zeros=0.1, torn=r.random() < 0.5,
        flip=r.choice((0.0, 0.0, 0.03)) if m > 1 else 0.0,
        list_lag=r.choice((0.0, 3.0, 40.0)), churn=r.random() < 0.6,
        fleet_loss=r.uniform(10, 60) if r.random() < 0.3 else None,
    )  # fmt: skip
    if r.random() < 0.5:  # reduce in shards of two elements
        schedule = replace(schedule, rules=replace(rules, shard_from=1, shard_elements=2))
    return schedule


# ---------------------------------------------------------------------- the world


class World:
    """Virtual time, the bucket, and whoever lives between them."""

    def __init__(self, schedule: Schedule) -> None:
        self.plan, self.now = schedule, 0.0
        self.rng = random.Random(schedule.seed ^ 0x5EED)
        self.noise = np.random.default_rng(schedule.seed)
        self.objects: dict[str, bytes] = {}
        self.visible: dict[str, float] = {}
        self.processes: list[Process] = []
        self.trace = xxhash.xxh3_128()
        self.calls = 0
        self.over = False
        self._queue: list[tuple[float, int, Any, Process | None]] = []
        self._order, self._nonces = count(), count(1)
        self._hub = getcurrent()
        self.observer = Observer(self)
        self.fleet = Fleet(self)

    # ------------------------------------------------------------ time

    def at(self, when: float, what: Any, process: Process | None = None) -> None:
        heapq.heappush(self._queue, (when, next(self._order), what, process))

    def wait(self, process: Process, seconds: float) -> None:
        """The calling greenlet goes on after `seconds`, or never if its process dies before."""
        if process.dead:
            raise GreenletExit  # its stack is being unwound: nothing it does counts any more
        self.at(self.now + seconds, getcurrent(), process)
        self._hub.switch()

    def die(self, process: Process) -> None:
        """SIGKILL for the calling greenlet's process."""
        process.dead = True
        self._hub.switch()

    def run(self) -> None:
        with seeded_nonces(self._nonces):
            try:
                self.fleet.begin()
                while self._queue and not self.over and self._queue[0][0] <= self.plan.end:
                    self._turn(*heapq.heappop(self._queue))
                self.observer.finish()
            finally:
                self._bury()

    def _turn(self, when: float, order: int, what: Any, process: Process | None) -> None:
        if process is None:
            self.now = when
            what()
        elif not process.dead:
            if process.asleep_until > when:
                self.at(process.asleep_until, what, process)
            else:
                self.now = when
                what.switch()

    def _bury(self) -> None:
        for process in self.processes:
            process.dead = True
            for task in process.tasks:
                if not task.dead:
                    task.throw(GreenletExit)

    def spawn(self, process: Process, body: Callable[[], None]) -> None:
        task = greenlet(body, parent=self._hub)
        process.tasks.append(task)
        self.at(self.now, task, process)

    # ------------------------------------------------------------ the bucket

    def store(self, process: Process) -> "SimStore":
        return SimStore(self, process)

    def clock(self, process: Process) -> "SimClock":
        return SimClock(self, process)

    def effect(self, process: Process, verb: str, key: str, body: bytes | None) -> Any:
        """What a request does to the bucket, at one instant."""
        self.calls += 1
        old = self.objects.get(key)
        self.trace.update(f"{self.now:.6f}{process.id}{verb}{key}{old is None}".encode())
        if verb == "get":
            return old
        if verb == "list":
            return sorted(k for k in self.objects if k.startswith(key) and self.visible[k] <= self.now)
        if verb == "create" and old is not None:
            raise KeyExists(key)
        assert body is not None
        self.objects[key] = body
        self.trace.update(body)
        self.visible.setdefault(key, self.now + self.rng.random() * self.plan.list_lag)
        self.observer.written(process, key, old, body)
        return None


class SimClock:
    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process

    def now(self) -> float:
        return self._world.now + 1000.0 * self._process.id

    def wall(self) -> float:
        return self._world.now + self._process.skew

    def sleep(self, seconds: float) -> None:
        self._world.wait(self._process, seconds)


class SimStore:
    """The bucket as one process sees it: each call takes time, and something may happen before or after it."""

    url = "sim://"

    def __init__(self, world: World, process: Process) -> None:
        self._world, self._process = world, process
        self._mute = process.slot in [layout.slot_name(i) for i in world.plan.mute]

    def put(self, key: str, body: Buffer) -> None:
        if self._mute and key.startswith("alive/"):
            raise StoreUnclear("the heartbeat does not get through")
        self._call("put", key, bytes(body))

    def create(self, key: str, body: Buffer) -> None:
        self._call("create", key, bytes(body))

    def get(self, key: str) -> bytes | None:
        return self._call("get", key)

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        body = self._call("get", key)
        if body is None or len(body) < start + len(out):
            return False
        out[:] = body[start : start + len(out)]
        return True

    def list(self, prefix: str) -> list[str]:
        return self._call("list", prefix)

    def delete(self, keys: Iterable[str]) -> None:
        raise Violation("registers stay", f"delete of {list(keys)}")

    def _call(self, verb: str, key: str, body: bytes | None = None) -> Any:
        w, p = self._world, self._process
        latency = 0.002 + w.rng.expovariate(1 / w.plan.latency)
        if key.endswith(".bin") and verb == "put":
            latency *= w.plan.slow_blobs
        w.wait(p, latency)
        fault = self._fault(verb) if w.now < w.plan.calm else ""
        if not fault:
            return w.effect(p, verb, key, body)
        return self._faulty(fault, verb, key, body)

    def _fault(self, verb: str) -> str:
        plan, x = self._world.plan, self._world.rng.random()
        chances = (
            ("error", plan.error), ("kill before", plan.kill / 2), ("kill after", plan.kill / 2),
            ("pause before", plan.pause / 2), ("pause after", plan.pause / 2), ("slow", plan.slow),
            ("lost", plan.lost), ("duplicate", plan.duplicate),
        )  # fmt: skip
        for name, chance in chances[: 6 if verb in ("get", "list") else 8]:
            x -= chance
            if x < 0:
                return name
        return ""

    def _faulty(self, fault: str, verb: str, key: str, body: bytes | None) -> Any:
        w, p = self._world, self._process
        if fault == "error":
            raise StoreUnclear("no answer")
        if fault == "kill before":
            if w.plan.torn and verb == "put" and key.endswith(".bin") and body and key not in w.objects:
                w.effect(p, verb, key, body[: w.rng.randrange(len(body))])
            w.die(p)
        if fault == "pause before":
            self._pause()
        if fault == "slow":
            w.wait(p, w.rng.uniform(1.0, 20.0))
        answer = w.effect(p, verb, key, body)
        if fault == "kill after":
            w.die(p)
        if fault == "pause after":
            self._pause()
        if fault == "lost":
            raise StoreUnclear("the answer was lost")
        if fault == "duplicate":
            w.at(w.now + w.rng.expovariate(0.1), lambda: again(w, p, verb, key, body))
        return answer

    def _pause(self) -> None:
        """SIGSTOP: every greenlet of the process stands still."""
        w, p = self._world, self._process
        p.asleep_until = w.now + w.rng.choice((3.0, 12.0, 40.0))
        w.wait(p, 0.0)


def again(world: World, process: Process, verb: str, key: str, body: bytes | None) -> None:
    """A retry by some layer below us arrives late."""
    try:
        world.effect(process, verb, key, body)
    except KeyExists:
        return


@contextmanager
def seeded_nonces(numbers: Iterator[int]) -> Iterator[None]:
    """`records.nonce` counts, so that a seed gives the same bytes."""

    class Counting:
        @staticmethod
        def token_hex(size: int) -> str:
            return f"{next(numbers):0{2 * size}x}"

    real, records.secrets = records.secrets, Counting  # type: ignore[assignment]
    try:
        yield
    finally:
        records.secrets = real


# ---------------------------------------------------------------------- commands


@dataclass
class Result:
    schedule: Schedule
    red: str
    trace: str
    commits: int
    applied: int
    carried: int
    calls: int
    cpu: float


def run(schedule: Schedule) -> Result:
    """One schedule, from the first claim to the end of its world."""
    began, world, red = time.process_time(), World(schedule), ""
    try:
        world.run()
    except Violation as broken:
        red = ": ".join(broken.args)
    except Exception as error:
        red = f"{type(error).__name__}: {error} (at {traceback.format_tb(error.__traceback__)[-1].strip()})"
    seen = world.observer
    carried = sum(len(c.carried) for c in seen.commits)
    cpu = time.process_time() - began
    return Result(schedule, red, world.trace.hexdigest(), len(seen.commits), seen.applied, carried, world.calls, cpu)


def run_seed(seed: int, bug: str = "") -> Result:
    """An ordinary schedule, with a planted bug if one is named."""
    from tests.sim_bugs import planted

    with planted(bug):
        return run(draw(seed))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seeds", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bug", default="", help="plant this bug (tests/sim_bugs.py)")
    args = parser.parse_args(argv)
    one, seeds = partial(run_seed, bug=args.bug), range(args.start, args.start + args.seeds)
    if args.jobs > 1:
        with multiprocessing.Pool(args.jobs) as pool:
            results = list(pool.imap(one, seeds, chunksize=8))
    else:
        results = [one(seed) for seed in seeds]
    red = [r for r in results if r.red]
    for r in red:
        print(f"seed {r.schedule.seed}: {r.red}\n    {r.schedule}")
    total = sum(r.cpu for r in results)
    print(
        f"{len(results)} schedules, {sum(r.commits for r in results)} commits, {sum(r.applied for r in results)} "
        f"offers applied ({sum(r.carried for r in results)} carried), {sum(r.calls for r in results)} store calls, "
        f"{1000 * total / len(results):.0f} CPU-ms each: {len(red)} red"
    )
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
