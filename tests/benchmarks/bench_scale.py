"""What a fleet asks of its bucket per outer step, in the simulator: the real engine, virtual time, no faults.

    python -m tests.benchmarks.bench_scale [REPLICAS=8,32,256] [STEPS=2] [TIMING=s3]      s3: beat/poll/dead 5/1/20 s

    polling   beats, offers, commits, claims, control: what agreement costs, whatever the model's size
    data      bodies and means; in shards from three replicas on, so about 2N small GETs per replica
    $         5e-6 per PUT and LIST, 4e-7 per GET: S3's prices for the requests alone

Counted from the second commit on. Inner steps take 1 to 1.3 s, an outer step about a minute (s3) or 4 s (file).
Not measured here: time. Greenlets share one core.
"""

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

from rendezvous.rules import Rules, Timing
from tests.sim import Schedule, World
from tests.sim_store import kind

TIMINGS = {"s3": Timing(poll=1.0, beat=5.0, dead_after=20.0), "file": Timing()}
HARDLY = {"s3": 0.04, "file": 0.001}  # seconds per request
INNER = {"s3": 48, "file": 3}  # inner steps per outer step
DATA = ("delta", "mean", "mean blob", "snapshot blob")


class Counting(World):
    """Counts requests by (verb, kind), and remembers the count at each commit."""

    def __init__(self, schedule: Schedule, steps: int) -> None:
        super().__init__(schedule)
        self.steps = steps
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


def play(replicas: int, steps: int, timing: str) -> tuple[Counter[tuple[str, str]], float]:
    """-> requests and seconds per outer step."""
    rules = Rules(sync_every=INNER[timing], shard_from=1, shard_elements=1, snapshot_every=100)
    plan = Schedule(0, replicas, replicas // 2, rules=rules, timing=TIMINGS[timing], latency=HARDLY[timing], calm=1e9)
    speeds = tuple(1 + 0.3 * (i * 37 % replicas) / replicas for i in range(replicas))
    world = Counting(replace(plan, speeds=speeds, double_launch=0.0, end=1e4), steps)
    world.run()
    first, last, times = world.at_commit[1], world.at_commit[1 + steps], world.observer.times
    asked = Counter({k: (n - first[k]) / steps for k, n in last.items()})  # type: ignore[arg-type]
    return asked, (times[1 + steps] - times[1]) / steps


def dollars(asked: Counter[tuple[str, str]]) -> float:
    return sum(n * (4e-7 if verb == "get" else 5e-6) for (verb, _), n in asked.items())


def main() -> None:
    sizes, steps, timing = [*sys.argv[1:], *("8,32,256", "2", "s3")[len(sys.argv) - 1 :]]
    print(f"{timing} timing, requests per outer step; per replica in brackets")
    for replicas in map(int, sizes.split(",")):
        asked, seconds = play(replicas, int(steps), timing)
        polling = Counter({k: n for k, n in asked.items() if k[1] not in DATA})
        hourly, total = 3600 / seconds, polling.total()
        print(
            f"N = {replicas}: {seconds:.0f} s a step, polling {total:,.0f} ({total / replicas:,.0f}) "
            f"= ${dollars(polling):.4f} a step, ${hourly * dollars(polling):.2f} an hour; "
            f"data {asked.total() - total:,.0f}, all ${hourly * dollars(asked):.2f} an hour"
        )
        for (verb, what), n in sorted(polling.items(), key=lambda one: -one[1])[:8]:
            print(f"    {verb:<6} {what:<12} {n:>12,.0f}  ({n / replicas:,.1f})")


if __name__ == "__main__":
    main()
