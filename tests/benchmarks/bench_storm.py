"""Eight real processes, kill -9 at random times, replaced by the real supervisor: what does a storm cost?

    python -m tests.benchmarks.bench_storm [MINUTES=10] [SEED=0]        about 3 minutes more; 1.5 is a quick look

    │ start │ calm │ storm: 120 kills per hour, random times, random victims │ all back │ calm │

participation   replica-steps that began with a trained-up replica of that slot, and were listed     goal 95 %
yield           inner steps in listed offers / inner steps computed by all replicas, also killed     goal 95 %
throughput      inner steps in listed offers per second and living replica, storm / calm             goal 95 %
downtime        from a kill to the successor's first inner step: not in the three above

The supervised loop on the tiny model.  Its forward and backward pass are real and then wait until 0.15 s are over, as
on a device of one's own: eight replicas that share two cores would otherwise slow each other down, and every death
would speed up the rest.  Inner steps that took longer are counted (`overrun`): with many, the machine was too busy.

Not promised: other figures for outer steps of minutes; there a restart costs a smaller share, a lost step the same.
"""

import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from diloco.process.processes import process_name
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.runlog.reader import Report, read_report
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.records.records import Commit
from tests.support.fleet import PRELOAD, TEXT

REPLICAS, SYNC_EVERY, INNER_S, KILLS_PER_HOUR = 8, 16, 0.15, 120
ENTRY = "tests.benchmarks.bench_storm:replica"
TICK = struct.Struct("<dd")  # when an inner step was over, and how long its computation took
Span = tuple[float, float]


def replica(argv: list[str]) -> int:
    """A replica whose inner steps take INNER_S each and leave a trace that survives kill -9."""
    from diloco.replica import main
    from inner.train.supervised import SupervisedLoop

    trace = os.open(f"{argv[0]}/ticks.{argv[2]}.{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    compute = SupervisedLoop._backward_pass

    def paced(self: SupervisedLoop, micro: int) -> float:
        began = time.monotonic()
        loss = compute(self, micro)
        spent = time.monotonic() - began
        time.sleep(max(0.0, INNER_S - spent))
        os.write(trace, TICK.pack(time.time(), spent))
        return loss

    SupervisedLoop._backward_pass = paced  # type: ignore[method-assign]
    return main(argv)


# -------------------------------------------------------------------- the storm


@dataclass
class Storm:
    """A hook of the supervisor.   kills: (when, slot, pid), as done."""

    seconds: float
    calm: float
    random: random.Random
    kills: list[tuple[float, str, int]] = field(default_factory=list[tuple[float, str, int]])
    began: float = 0.0
    ends: list[float] = field(default_factory=list[float])  # of: calm, storm, all back, calm

    def __post_init__(self) -> None:
        count = -(-int(KILLS_PER_HOUR * self.seconds) // 3600)
        self._due = sorted(self.random.uniform(0, self.seconds) for _ in range(count))

    def __call__(self, supervisor: Supervisor, report: Report) -> None:
        now, complete = time.time(), bool(report.steps) and len(report.steps[-1].fresh) == REPLICAS
        phase = len(self.ends) + bool(self.began)
        if phase == 0 and complete and report.head >= 4:
            self.began = now
        elif phase == 1 and now >= self.began + self.calm:
            self.ends.append(now)
        elif phase == 2:
            self._strike(supervisor, now - self.ends[0])
            if not self._due and now >= self.ends[0] + self.seconds:
                self.ends.append(now)
        elif phase == 3 and complete:
            self.ends.append(now)
        elif phase == 4 and now >= self.ends[2] + self.calm:
            self.ends.append(now)
            supervisor.leave("the storm is over")

    def _strike(self, supervisor: Supervisor, elapsed: float) -> None:
        if self._due and elapsed >= self._due[0]:
            running = [h for s in range(REPLICAS) if (h := supervisor.handle(layout.slot_name(s)))]
            victim = self.random.choice(running)
            os.kill(victim.pid, signal.SIGKILL)
            self.kills.append((time.time(), victim.slot, victim.pid))
            self._due.pop(0)


@contextmanager
def run_in_memory() -> Iterator[Run]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        (Path(root) / "text.txt").write_text(TEXT)
        config = RunConfig.from_dict(
            {
                "outer": {"sync_every": SYNC_EVERY},
                "inner": {"loop": "supervised", "model": "tiny", "batch_size": 4}
                | {"data": {"text": "text.txt", "context_length": 16}},
                "fleet": {"replicas": REPLICAS, "steps": 100_000, "keep": "window"},
            },
            Path(root),
        )
        yield open_run(config, f"{root}/run", SystemClock())


def main(minutes: float = 10.0, seed: int = 0) -> None:
    storm = Storm(60 * minutes, max(20.0, 6 * minutes), random.Random(seed))
    with run_in_memory() as run:
        executor = LocalProcessExecutor([*PRELOAD, "tests.benchmarks.bench_storm"])
        me = process_name(os.getpid())
        try:
            Supervisor(run, executor, SystemClock(), parent=me, entrypoint=ENTRY, each_tick=storm).supervise()
        finally:
            executor.cancel(executor.find(run.url), grace_s=0.0)
            executor.close()
        print(table(storm, Seen.of(run, storm)))


# -------------------------------------------------------------------- what it came to


@dataclass
class Seen:
    """commits: in order.   ticks: (when, computed for) of every inner step.   lives: from joined to their end."""

    commits: list[Commit]
    ticks: list[tuple[float, float]]
    lives: list[tuple[str, Span]]
    listed: set[tuple[int, str]]

    @classmethod
    def of(cls, run: Run, storm: Storm) -> "Seen":
        commits = list[Commit]()
        while (body := run.store.get(layout.commit_key(len(commits)))) is not None:
            commits.append(Commit.decode(body))
        ticks = [TICK.unpack(p[i : i + 16]) for f in Path(run.url).glob("ticks.*") for p in [f.read_bytes()]
                 for i in range(0, len(p), 16)]  # fmt: skip
        ends = {pid: at for at, _, pid in storm.kills}
        lives = [(x.slot, (x.joined, ends.get(x.pid, x.ended or time.time()))) for x in read_report(run.store).sessions
                 if x.joined]  # fmt: skip
        return cls(commits, ticks, lives, {(o.step, o.slot) for c in commits for o in c.offers})

    def between(self, a: float, b: float) -> list[Commit]:
        """The commits of a phase; the first one only says when the second step began."""
        return [c for c in self.commits if a <= c.at <= b]

    def ready(self, opened: float) -> set[str]:
        return {slot for slot, (joined, ended) in self.lives if joined <= opened < ended}

    def figures(self, a: float, b: float) -> dict[str, float]:
        found = self.between(a, b)
        span = (found[0].at, found[-1].at)
        ready = [(c.t, slot) for before, c in pairwise(found) for slot in self.ready(before.at)]
        inside = [spent for at, spent in self.ticks if span[0] < at <= span[1]]
        counted = sum(o.h for c in found[1:] for o in c.offers)
        alive = sum(max(0.0, min(end, span[1]) - max(at, span[0])) for _, (at, end) in self.lives)
        gaps = [c.at - before.at for before, c in pairwise(found)]
        return {
            "outer steps": len(found) - 1,
            "participation %": 100 * sum(x in self.listed for x in ready) / len(ready),
            "yield %": 100 * counted / len(inside),
            "listed inner steps per replica-second": counted / alive,
            "seconds per outer step, median": median(gaps),
            "… longest": max(gaps),
            "overrun %": 100 * sum(spent > INNER_S for spent in inside) / len(inside),
        }

    def downtimes(self, storm: Storm) -> list[float]:
        back = [[joined - at for slot, (joined, _) in self.lives if slot == victim and joined > at]
                for at, victim, _ in storm.kills]  # fmt: skip
        return [min(b) for b in back if b]


def table(storm: Storm, seen: Seen) -> str:
    first, last = (storm.began, storm.ends[0]), (storm.ends[2], storm.ends[3])
    calm = [seen.figures(*span) for span in (first, last)]
    stormy = seen.figures(storm.ends[0], storm.ends[1])
    per = "listed inner steps per replica-second"
    ratio = stormy[per] / ((calm[0][per] + calm[1][per]) / 2)
    down = seen.downtimes(storm)
    seconds = storm.ends[1] - storm.ends[0]
    rows = [f"{'':40}{'calm':>9}{'storm':>9}{'calm':>9}"]
    rows += [f"{name:40}{calm[0][name]:9.2f}{stormy[name]:9.2f}{calm[1][name]:9.2f}" for name in stormy]
    rows += [
        f"throughput per living replica, storm / calm: {100 * ratio:.1f} % (goal 95)",
        f"{len(storm.kills)} kills in {seconds:.0f} s, {3600 * len(storm.kills) / seconds:.0f} per hour",
        f"downtime: median {median(down):.1f} s, longest {max(down):.1f} s, "
        f"{100 * sum(down) / seconds / REPLICAS:.1f} % of all replica-seconds",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    given: list[Any] = [float(sys.argv[1])] if len(sys.argv) > 1 else []
    main(*given, *map(int, sys.argv[2:]))
