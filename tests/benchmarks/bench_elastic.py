"""What trouble costs in learning, with real processes: ToolWorld, four replicas, H = 5, 16 outer steps.

    python -m tests.benchmarks.bench_elastic [CELLS=all] [SEED=0]

    equal       four replicas in a folder
    slow        one of them is stopped and continued, so that it has half of its time (SIGSTOP, SIGCONT)
    spot        kill -9 of each replica with a chance of 1/5 per outer step; it is started again at once
    link        a bucket over S3 of 2 MB/s and 50 ms, H = 6: all wait for the whole vector
    streaming   the same link; two fragments, τ = 2, α = .5: the vector travels beside the training

Columns: mean reward over the run and of the last three steps, seconds per outer step (median), steps without the slot.
docs/studies/elastic.md has the same troubles over eight paired seeds, in one process with the bits of a real fleet.

Not promised: an interval; one seed of one toy.  Four replicas share the cores of this machine.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

from diloco.runlog.reader import Report, read_report
from rendezvous.layout import slot_name
from tests.support.fleet import Fleet
from tests.support.s3_server import S3Server

REPLICAS, EVERY, STEPS = 4, 5, 16
LINK = {"rate": 2e6, "latency_s": 0.05}
SIX = {"sync_every": 6}
STREAMING = {**SIX, "fragments": 2, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}
INNER: dict[str, Any] = {
    "loop": "grpo", "model": "toolworld", "batch_size": 32, "toolworld": {"names": 16}, "data": {"text": None}
}  # fmt: skip
Trouble = Callable[[Fleet, random.Random, threading.Event], None]


def main() -> None:
    cells = sys.argv[1].split(",") if len(sys.argv) > 1 and sys.argv[1] != "all" else list(CELLS)
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print("| cell | mean reward over the run | last three steps | s per outer step | slots missed | lost |")
    print("|---|---|---|---|---|---|")
    for name in cells:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {name} | {' | '.join(run(Path(folder), *CELLS[name], seed))} |", flush=True)


def run(folder: Path, over_link: bool, outer: dict[str, Any], trouble: Trouble | None, seed: int) -> list[str]:
    with bucket(over_link) as (url, environ):
        fleet = Fleet(
            folder, url, environ, inner=INNER, outer={"sync_every": EVERY, "snapshot_every": 4, **outer}, seed=seed,
            fleet={"replicas": REPLICAS, "min_replicas": 2, "steps": STEPS, "give_up_s": 600.0},
        )  # fmt: skip
        ended = threading.Event()
        fleet.start_all()
        if trouble is not None:
            trouble(fleet, random.Random(seed), ended)
        fleet.wait_for(lambda: fleet.commit(STEPS - 1) is not None, timeout=1800)
        ended.set()
        fleet.wait(120)
        return told(read_report(fleet.store))


def told(report: Report) -> list[str]:
    rewards = [step.mean_reward for step in report.steps if step.mean_reward is not None]
    pace = median(b.at - a.at for a, b in zip(report.steps, report.steps[1:], strict=False))
    missed = sum(REPLICAS - len(step.fresh) for step in report.steps)
    lost = STEPS - len(report.steps)
    return [f"{fmean(rewards):.3f}", f"{fmean(rewards[-3:]):.3f}", f"{pace:.2f}", str(missed), str(lost)]


# -------------------------------------------------------------------- troubles


def half_speed(fleet: Fleet, rng: random.Random, ended: threading.Event) -> None:
    """Stop and continue the last replica, in turn, until the run ends."""

    def toggle() -> None:
        while not ended.wait(0.2):
            fleet.signal("r03", signal.SIGSTOP)
            time.sleep(0.2)
            fleet.signal("r03", signal.SIGCONT)

    fleet.wait_for(lambda: fleet.training("r03", 0))
    threading.Thread(target=toggle, daemon=True).start()


def spot(fleet: Fleet, rng: random.Random, ended: threading.Event) -> None:
    """Kill each replica with a chance of 1/5 in each outer step, and start it again."""

    def kill() -> None:
        for t in range(1, STEPS - 1):
            while fleet.commit(t - 1) is None and not ended.is_set():
                time.sleep(0.05)
            for slot in map(slot_name, range(REPLICAS)):
                if rng.random() < 1 / 5 and not ended.is_set():
                    fleet.signal(slot, signal.SIGKILL)
                    fleet.start(slot)

    threading.Thread(target=kill, daemon=True).start()


CELLS: dict[str, tuple[bool, dict[str, Any], Trouble | None]] = {
    "equal": (False, {}, None),
    "slow": (False, {}, half_speed),
    "spot": (False, {}, spot),
    "link": (True, SIX, None),
    "streaming": (True, STREAMING, None),
}


@contextmanager
def bucket(over_link: bool) -> Iterator[tuple[str, dict[str, str]]]:
    """A URL, "" for a folder, and what its clients need in their environment."""
    if not over_link:
        yield "", {}
        return
    with S3Server() as server:
        wish = json.dumps(LINK).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{server.endpoint}/-/control", wish, method="POST")
        ) as answer:
            answer.read()
        environ = {
            "AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": "AKIDTEST", "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        with patch.dict(os.environ, environ):
            yield "s3://bucket/run", environ


if __name__ == "__main__":
    main()
