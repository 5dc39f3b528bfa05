"""Requests of a fleet to its bucket per outer step, in the simulator: the real engine, virtual time, no faults.

    python -m tests.benchmarks.bench_scale [REPLICAS=8,32,256] [STEPS=2] [TIMING=s3] [SPREAD=0.3] [JITTER=0]
    python -m tests.benchmarks.bench_scale kills [REPLICAS=8] [TIMING=s3]      one dies: how long until the next commit

    polling   beats, offers, commits, claims, control: the cost of agreement, at any model size
    data      bodies and means; in shards from three replicas on, so about 2N small GETs per replica
    $         5e-6 per PUT and LIST, 4e-7 per GET: S3's prices for the requests alone
    closed    seconds from the last offer that a commit lists to the commit: median and longest

s3: beat, poll, dead_after = 5, 1, 20 s; 40 ms per request.   Counted from the second commit on.  Inner steps take 1 to
1 + SPREAD seconds, an outer step about a minute (s3) or 4 s (file).   JITTER: how much longer or shorter a replica's
inner steps are in one stretch than in the next, so that no step lasts as long as the one before.
Not measured here: the time of a machine. Greenlets share one core, and seconds are the simulator's.
"""

import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import mean, median
from typing import Any
from unittest.mock import patch

from rendezvous import layout
from rendezvous.agreement.rules import Rules, Timing
from tests.sim.simulate import Schedule, World
from tests.sim.store import kind

TIMINGS = {"s3": Timing(poll=1.0, beat=5.0, dead_after=20.0), "file": Timing()}
HARDLY = {"s3": 0.04, "file": 0.001}  # seconds per request
INNER = {"s3": 48, "file": 3}  # inner steps per outer step
DATA = ("delta", "mean", "mean blob", "snapshot blob")


class Counting(World):
    """Counts requests by (verb, kind), and remembers the count at each commit."""

    def __init__(self, schedule: Schedule, steps: int, jitter: float = 0.0) -> None:
        super().__init__(schedule)
        self.steps, self.jitter, self.luck = steps, jitter, random.Random(1)
        if jitter:
            self.at(10.0, self._vary)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.at_commit: list[Counter[tuple[str, str]]] = []

    def effect(self, process: Any, verb: str, key: str, body: bytes | None) -> Any:
        what = kind(key) if key.count("/") < 3 or verb != "list" else key.split("/")[2]
        self.asked["put" if verb == "create" else verb, what] += 1
        answer = super().effect(process, verb, key, body)
        if verb == "create" and what == "commit":
            self.at_commit.append(self.asked.copy())
            self.over = len(self.at_commit) > self.steps + 1
        return answer

    def _vary(self) -> None:
        for p in self.fleet.living():
            usual = self.plan.speeds[layout.slot_index(p.slot)]
            p.speed = usual * (1 + self.luck.uniform(-self.jitter, self.jitter))
        self.at(self.now + 20.0, self._vary)

    @property
    def closed(self) -> list[float]:
        """Seconds from the last listed fresh offer to its commit, of the steps that are counted."""
        seen = self.observer
        found = list[float]()
        for commit in seen.commits[2:]:
            fresh = {o.nonce for o in commit.fresh_offers}
            last = max(d.at for (s, _, _), d in seen.offers.items() if s == commit.t and d.offer.nonce in fresh)
            found.append(seen.times[commit.t] - last)
        return found


def calm_fleet(replicas: int, timing: str, spread: float = 0.3) -> Schedule:
    """Nothing fails; the slowest inner step takes `spread` longer than the fastest."""
    rules = Rules(sync_every=INNER[timing], shard_from=1, shard_elements=1, snapshot_every=100)
    plan = Schedule(0, replicas, replicas // 2, rules=rules, timing=TIMINGS[timing], latency=HARDLY[timing], calm=1e9)
    speeds = tuple(1 + spread * (i * 37 % replicas) / replicas for i in range(replicas))
    return replace(plan, speeds=speeds, double_launch=0.0, end=1e4)


def play(
    replicas: int, steps: int, timing: str, spread: float, jitter: float
) -> tuple[Counter[tuple[str, str]], float, list[float]]:
    """-> requests and seconds per outer step, and how long closing took."""
    world = Counting(calm_fleet(replicas, timing, spread), steps, jitter)
    world.run()
    first, last, times = world.at_commit[1], world.at_commit[1 + steps], world.observer.times
    asked = Counter({k: (n - first[k]) / steps for k, n in last.items()})  # type: ignore[arg-type]
    return asked, (times[1 + steps] - times[1]) / steps, world.closed


def dollars(asked: Counter[tuple[str, str]]) -> float:
    return sum(n * (4e-7 if verb == "get" else 5e-6) for (verb, _), n in asked.items())


def requests(
    sizes: str = "8,32,256", steps: str = "2", timing: str = "s3", spread: str = "0.3", jitter: str = "0"
) -> None:
    print(f"{timing} timing, requests per outer step; per replica in brackets")
    for replicas in map(int, sizes.split(",")):
        asked, seconds, closed = play(replicas, int(steps), timing, float(spread), float(jitter))
        polling = Counter({k: n for k, n in asked.items() if k[1] not in DATA})
        hourly, total, data = 3600 / seconds, polling.total(), asked.total() - polling.total()
        print(
            f"N = {replicas}: {seconds:.1f} s a step, polling {total:,.0f} ({total / replicas:,.0f}) "
            f"= ${dollars(polling):.4f} a step, ${hourly * dollars(polling):.2f} an hour; "
            f"data {data:,.0f} ({data / replicas:,.0f}), all ${hourly * dollars(asked):.2f} an hour; "
            f"closed in {median(closed):.2f} s, at most {max(closed):.2f}"
        )
        for (verb, what), n in sorted(polling.items(), key=lambda one: -one[1])[:9]:
            print(f"    {verb:<6} {what:<12} {n:>12,.0f}  ({n / replicas:,.1f})")


# ---------------------------------------------------------------------- one dies


def kills(replicas: str = "8", timing: str = "s3") -> None:
    """Death of one replica, at five moments of a step and in four slots: until the next commit.

    It is not replaced: a newcomer that begins a round in the open step is waited for, which says nothing of the death.
    """
    n, waits = int(replicas), list[float]()
    plain = Counting(calm_fleet(n, timing), 4)
    plain.run()
    step = plain.observer.times[3] - plain.observer.times[2]
    for share, slot, wait in deaths(n, timing, plain.observer.times[2], step):
        waits.append(wait / step)
        print(f"    {100 * share:3.0f} % into the step, r{slot:02d}: {wait:6.1f} s, {wait / step:.2f} normal steps")
    print(
        f"{timing}, N = {n}: a step lasts {step:.1f} s; mean {mean(waits):.3f}, longest {max(waits):.3f} normal steps"
    )


def deaths(
    n: int, timing: str, begins: float, step: float, shares: Iterable[float] = (0.1, 0.3, 0.5, 0.7, 0.9)
) -> Iterator[tuple[float, int, float]]:
    """(share of the step, slot, seconds from the death to the next commit)"""
    for share in shares:
        for slot in sorted({0, n // 3, n // 2, n - 1}):
            at = begins + share * step
            world = Counting(replace(calm_fleet(n, timing), actions=((at, "kill", slot),)), 4)
            with patch.object(world.fleet, "_replace", lambda *_: None):
                world.run()
            yield share, slot, min(t for t in world.observer.times if t > at) - at


if __name__ == "__main__":
    kills(*sys.argv[2:]) if sys.argv[1:2] == ["kills"] else requests(*sys.argv[1:])
