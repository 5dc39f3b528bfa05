"""The real engine in a made-up world: seeded, in virtual time, with an observer that sees everything.

        Schedule(seed) ─▶ World ── one greenlet per process and per heartbeat ──▶ Rendezvous, Membership (unchanged)
                            │                                                        │ every store and clock call
                            │ ◀──────────────── switch ──────────────────────────────┘
                            ├─ SimStore  kill · pause and zombie return · error · lost answer · duplicate · torn upload
                            │            outage · full · blobs that rot or are cut short · late LIST · wrong clocks
                            │            exceptions of a client that are none of ours
                            ├─ adversary malformed registers, lying beats, forged and vanished ones
                            │            (tests/sim/adversary.py); a run key in a quarter of the seeds
                            ├─ Fleet     double launches, joins, leaves, control records, loss of the whole fleet
                            ├─ actors    fill places of rollouts, die, stall and lie (tests/sim/acting.py, bundles.py)
                            └─ Observer  checks the promises of the protocol at each write, with its own arithmetic

    python -m tests.sim 1000 [--start N] [--jobs J] [--bug NAME] [--lost | --acted]   a table of the events, counted;
                                                                      for a red seed, the command that replays it

Only `World.rng` decides anything, so a seed is a schedule under every PYTHONHASHSEED.

Not promised: that a green seed proves anything; thousands of them, and planted bugs that turn them red, convince.
"""

import argparse
import heapq
import multiprocessing
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import xxhash
from greenlet import GreenletExit, getcurrent, greenlet

from rendezvous.agreement.rules import Rules, Timing
from rendezvous.codecs import NAMES as CODECS
from rendezvous.errors import KeyExists
from rendezvous.records import records
from rendezvous.store import Store
from rendezvous.stores.signed import SignedStore
from tests.sim import adversary
from tests.sim.adversary import may_vanish
from tests.sim.fleet import Fleet
from tests.sim.observer import Observer, Violation
from tests.sim.places import Loss, Places, draw_loss
from tests.sim.replica import Process
from tests.sim.store import BLOBS, SimClock, SimStore, may_rot
from tests.support.fakes import remembered_records

TAG = re.compile(rb',"seal":"[0-9a-f]{64}"}\Z')
RULES = Rules(fragments=1, sync_every=4, max_carry=2, snapshot_every=3)
TIMING = Timing(poll=0.5, beat=1.5, dead_after=5.0, start_patience=10.0, give_up=600.0, store_patience=60.0, grace=10.0)


# ---------------------------------------------------------------------- what happens


@dataclass(frozen=True)
class Acting:
    """Recorded rollouts, and actors (tests/sim/acting.py).   takes: an actor's seconds for a generation.

    staleness: S.   served: inner steps of a generation.   lag: commits by which an actor's weights are behind.
    share: of actors' bundles that the door checks; 0: no door.   far: outer steps from which the drift is too large.
    mischief, deaths, stalls: shares of an actor's samples.
    tail: σ of the log-normal lengths of completions, which a salt draws.
    """

    actors: int = 2
    staleness: int = 1
    takes: float = 1.5
    served: int = 1
    lag: int = 0
    share: float = 0.0
    far: int = 99
    mischief: float = 0.0
    deaths: float = 0.0
    stalls: float = 0.0
    all_dead_at: float = 999.0
    tail: float = 0.0
    salt: int = 0

    def length_of(self, slot: str, generation: int) -> float:
        """Return the length of a place's completions, which its prompts decide; the median is 1."""
        return random.Random(f"{self.salt}/{slot}/{generation}").lognormvariate(0.0, self.tail) if self.tail else 1.0


@dataclass(frozen=True)
class Schedule:
    """The meaning of a seed.  Probabilities are per store call, durations in virtual seconds."""

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
    torn: float = 0.0  # half a blob, then no answer; then a death before a blob leaves half of it, too
    outage: tuple[float, float, str] = (0.0, 0.0, "")  # from, seconds, "silent" | "full"
    rot: float = 0.0  # share of blobs that are damaged at rest
    rots: tuple[str, ...] = ("delta", "mean blob", "snapshot blob")
    rot_after: float = 5.0
    foreign: float = 0.0  # exceptions of a store that are not RendezvousErrors
    malformed: float = 0.0  # registers taken by bytes that are not a record, and beats overwritten, per second
    vanish: float = 0.0  # share of objects that vanish after a while
    key: str = ""  # of the run
    forge: float = 0.0  # registers overwritten by a writer without the key, per second
    flip: float = 0.0  # per outer step and place
    list_lag: float = 0.0
    churn: bool = False
    double_launch: float = 0.1
    fleet_loss: float | None = None
    slow: float = 0.0
    zeros: float = 0.0  # share of rounds in which nothing is learned
    tau: int = 0  # inner steps during which a round is in flight
    keep: int | None = None  # bytes of blobs, beside those that a reader may need
    sizes: tuple[int, ...] = (5, 3, 4)  # elements of each fragment
    poison: bool = True  # the trainer uses its buffers again, for other things
    far: bool = True  # requests that go together are made at the same time, as on S3; else in turn, as on a folder
    calm: float = 60.0  # no fault is injected after this
    end: float = 200.0
    acting: Acting | None = None
    loss: Loss | None = None  # the store is the run's no longer
    settled: int = 4  # commits after the calm that end the run early
    actions: tuple[tuple[float, str, int], ...] = ()  # scripted: (time, "kill" | "term" | "pause" | "launch", slot)

    def under_attack(self, r: random.Random) -> "Schedule":
        """A writer without the key overwrites registers, in some runs that have one."""
        return replace(self, forge=r.choice((0.0, 0.1))) if self.key else self


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
        pause=0.0012 * f, slow=0.004 * f, zeros=0.1, torn=r.choice((0.0, 0.05)),
        flip=r.choice((0.0, 0.0, 0.03)) if m > 1 else 0.0,
        list_lag=r.choice((0.0, 3.0, 40.0)), churn=r.random() < 0.6,
        fleet_loss=r.uniform(10, 60) if r.random() < 0.3 else None,
    )  # fmt: skip
    return vary(schedule, r)


def draw_lost(seed: int) -> Schedule:
    """The same, and the store is taken away: what is lost for good ends the world a while later."""
    plan = draw(seed)
    loss = draw_loss(seed, plan.replicas)
    quiet = replace(plan, loss=loss, vanish=0.0, forge=0.0, malformed=0.0, fleet_loss=None)
    return quiet if loss.lasts else replace(quiet, end=loss.at + 60.0, calm=loss.at + 60.0)


def vary(plan: Schedule, r: random.Random) -> Schedule:
    """The same with shards, a lossy codec, rounds in flight, collected blobs, outages and rot, each in some seeds."""
    rules, interval = plan.rules, plan.rules.sync_every // plan.rules.fragments
    if r.random() < 0.5:  # reduce in shards of two elements
        rules = replace(rules, shard_from=1, shard_elements=2)
    if r.random() < 0.2:
        rules = replace(rules, codec="bf16")
    outage = (r.uniform(5, 40), r.choice((3.0, 10.0, 30.0)), r.choice(("silent", "full")))
    keep = (0, 0, 2_000, 5_000)[plan.seed % 4] if r.random() < 0.4 else None
    if keep is not None:
        rules = replace(rules, snapshot_every=r.choice((1, 2, 3)))
    plan = replace(
        plan, rules=rules, keep=keep, tau=r.randrange(interval) if r.random() < 0.6 else 0,
        pause=plan.pause if keep is None else 3 * plan.pause,
        outage=outage if r.random() < 0.15 else plan.outage, rot=r.choice((0.0, 0.0, 0.06)),
        rot_after=r.choice((0.5, 8.0)), far=r.random() < 0.8,
        timing=replace(plan.timing, store_patience=r.choice((12.0, 60.0))),
    )  # fmt: skip
    return trouble(plan, r)


def trouble(plan: Schedule, r: random.Random) -> Schedule:
    """The same with any codec, a run key, foreign exceptions, malformed and vanished objects, each in some seeds."""
    rules = plan.rules
    if r.random() < 0.3:
        rules = replace(rules, codec=r.choice(CODECS))
    large = rules.codec in ("int8", "int4") and r.random() < 0.5  # several shards
    return replace(
        plan, rules=rules, sizes=(2500, 1100, 1500) if large else plan.sizes, key="k" * 16 if r.random() < 0.25 else "",
        foreign=r.choice((0.0, 0.0, 0.0, 0.002)), malformed=r.choice((0.0, 0.0, 0.1, 0.5)),
        vanish=r.choice((0.0, 0.0, 0.0, 0.02)),
    ).under_attack(r)  # fmt: skip


# ---------------------------------------------------------------------- the world


class World:
    """Virtual time, the bucket, and the processes between them."""

    def __init__(self, schedule: Schedule) -> None:
        self.plan, self.now = schedule, 0.0
        self.rng = random.Random(schedule.seed ^ 0x5EED)
        self.noise = np.random.default_rng(schedule.seed)
        self.objects: dict[str, bytes] = {}
        self.visible: dict[str, float] = {}
        self.originals: dict[str, bytes] = {}  # what damaged objects were
        self.torn: set[str] = set()  # blobs of which only a part was written
        self.vanished: dict[str, bytes] = {}  # what they were
        self.planted: set[str] = set()  # registers that the adversary took
        self.fired: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.trace = xxhash.xxh3_128()
        self.calls = 0
        self.over = False
        self._queue: list[tuple[float, int, Any, Process | None]] = []
        self._order, self._nonces = count(), count(1)
        self._hub = getcurrent()
        self.observer = Observer(self)
        self.places = Places(self, schedule.loss) if schedule.loss else None
        self.fleet = Fleet(self)
        if schedule.acting is not None:
            from tests.sim.bundles import Ledger

            self.bundles = Ledger(self)

    @property
    def acting(self) -> Acting:
        assert self.plan.acting is not None
        return self.plan.acting

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
        with seeded_nonces(self._nonces), remembered_records():
            try:
                self.fleet.begin()
                if self.plan.acting is not None:
                    from tests.sim.acting import Troupe

                    Troupe(self).begin()
                adversary.begin(self)
                if self.places is not None:
                    self.places.begin()
                while self._queue and not self.over and self._queue[0][0] <= self.plan.end:
                    self._turn(*heapq.heappop(self._queue))
                self.observer.finish()
                if self.plan.acting is not None:
                    self.bundles.finish(self.observer.commits)
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

    def park(self) -> None:
        """The calling greenlet stands still until another one gives it a time again (`at`)."""
        self._hub.switch()

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

    def store(self, process: Process) -> Store:
        store = SimStore(self, process)
        return SignedStore(store, self.plan.key.encode(), "run", self._forgery) if self.plan.key else store

    def _forgery(self, event: str, **fields: object) -> None:
        self.fired[f"told: {event}"] += 1

    def plain(self, body: bytes) -> bytes:
        """A record without its tag."""
        return TAG.sub(b"}", body) if self.plan.key else body

    def record(self, key: str) -> bytes:
        """The record that was written into a register."""
        return self.plain(self.truth(key) or b"")

    def clock(self, process: Process) -> SimClock:
        return SimClock(self, process)

    def effect(self, process: Process, verb: str, key: str, body: bytes | None) -> Any:
        """Apply a request to the bucket, at one instant."""
        self.calls += 1
        if self.places is not None and self.places.befalls(process):
            return self.places.serve(process, verb, key, body)
        if self.plan.acting is not None:
            self.bundles.counted(process, verb, key)
        old = self.objects.get(key)
        self.trace.update(f"{self.now:.6f}{process.id}{verb}{key}{old is None}".encode())
        if verb == "get":
            return old
        if verb == "list":
            there = sorted(k for k in self.objects if k.startswith(key))
            seen = [k for k in there if self.visible[k] <= self.now]
            self.fired["stale LIST"] += len(seen) < len(there)
            return seen
        if verb == "create" and old is not None:
            raise KeyExists(key)
        if body is None:
            self._forget(process, key)
        else:
            self._write(process, key, old, body)
        return None

    def _write(self, process: Process, key: str, old: bytes | None, body: bytes) -> None:
        self.objects[key] = body
        self.trace.update(body)
        self.visible.setdefault(key, self.now + self.rng.random() * self.plan.list_lag)
        lost = self.vanished.pop(key, None)
        if lost is not None and (key.endswith(BLOBS) or body == lost):  # a register: a late retry of its own writer's
            self.observer.put_back(key, lost, body)
            return
        self.observer.written(process, key, old, self.plain(body))
        if old is None:
            may_rot(self, key)
            may_vanish(self, key)

    def _forget(self, process: Process, key: str) -> None:
        self.observer.deleted(process, key)
        self.fired["collected"] += key in self.objects
        for those in (self.objects, self.visible, self.originals, self.vanished):
            those.pop(key, None)

    def truth(self, key: str) -> bytes | None:
        """The bytes that were written under a key, also where they have rotted or vanished since."""
        return self.originals.get(key, self.vanished.get(key, self.objects.get(key)))


@contextmanager
def seeded_nonces(numbers: Iterator[int]) -> Iterator[None]:
    """`records.new_nonce` counts, so that a seed gives the same bytes."""

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
    fired: Counter[str]


def run(schedule: Schedule) -> Result:
    """One schedule, from the first claim to the end of its world."""
    began, world, red = time.process_time(), World(schedule), ""
    try:
        world.run()
    except Violation as broken:
        red = ": ".join(broken.args)
    except Exception as error:
        red = f"{type(error).__name__}: {error} (at {traceback.format_tb(error.__traceback__)[-1].strip()})"
    commits, trace = world.observer.commits, world.trace.hexdigest()
    return Result(
        schedule, red, trace, len(commits), world.observer.applied, sum(len(c.late_offers) for c in commits),
        world.calls, time.process_time() - began, world.fired + world.fleet.endings(),
    )  # fmt: skip


def run_seed(seed: int, bug: str = "", lost: bool = False, acted: bool = False) -> Result:
    """An ordinary schedule, one whose store is taken away, or one with actors; with a planted bug if one is named."""
    from tests.sim.bugs import planted

    if acted:
        from tests.sim.acting import draw_acted
        from tests.sim.acting_bugs import ACTED_BUGS

        with planted(bug, ACTED_BUGS):
            return run(draw_acted(seed))
    with planted(bug):
        return run(draw_lost(seed) if lost else draw(seed))


def table(fired: Counter[str], columns: int = 3) -> str:
    """A table of the events, with counts."""
    cells = [f"{n:>10,}  {name:<28}" for name, n in sorted(fired.items())]
    rows = -(-len(cells) // columns)
    return "\n".join("".join(cells[i::rows]).rstrip() for i in range(rows))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim")
    parser.add_argument("seeds", type=int)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bug", default="", help="plant this bug (tests/sim/bugs.py)")
    parser.add_argument("--lost", action="store_true", help="the store is taken away (tests/sim/places.py)")
    parser.add_argument("--acted", action="store_true", help="replicas record rollouts, and actors fill their places")
    args = parser.parse_args(argv)
    one, seeds = (
        partial(run_seed, bug=args.bug, lost=args.lost, acted=args.acted),
        range(args.start, args.start + args.seeds),
    )
    more = " --lost" * args.lost + " --acted" * args.acted
    if args.jobs == 1:
        return report(map(one, seeds), args.bug, more)
    with multiprocessing.Pool(args.jobs) as pool:
        return report(pool.imap(one, seeds, chunksize=8), args.bug, more)


def report(results: Iterable[Result], bug: str, more: str = "") -> int:
    """more: of the command.   Red seeds as they come, then the sums; -> the exit code."""
    sums, fired, red, cpu = Counter[str](), Counter[str](), 0, 0.0
    for r in results:
        sums.update(schedules=1, commits=r.commits, applied=r.applied, carried=r.carried, calls=r.calls)
        fired, cpu = fired + r.fired, cpu + r.cpu
        if r.red:
            red += 1
            again = f"python -m tests.sim 1 --start {r.schedule.seed}" + more + (f" --bug {bug!r}" if bug else "")
            print(f"seed {r.schedule.seed}: {r.red}\n    {again}", flush=True)
    print(table(fired))
    print(
        f"{sums['schedules']} schedules, {sums['commits']} commits, {sums['applied']} offers applied "
        f"({sums['carried']} carried), {sums['calls']} store calls, "
        f"{1000 * cpu / max(1, sums['schedules']):.0f} CPU-ms each: {red} red"
    )
    return 1 if red else 0
