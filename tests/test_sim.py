"""Hundreds of seeded schedules of the real engine, and proof that they would notice a broken rule.

A red schedule prints its seed and what it means; `python -m tests.sim 1 --start SEED` plays it again.
"""

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest

from rendezvous import rules
from rendezvous.rules import Rules
from tests.sim import Schedule, World, draw, run
from tests.sim_bugs import BUGS, planted

SCHEDULES = 900  # about 30 ms of one core each
BATCH = 60


@pytest.mark.parametrize("start", range(0, SCHEDULES, BATCH))
def test_the_promises_hold(start: int) -> None:
    results = [run(draw(seed)) for seed in range(start, start + BATCH)]
    red = [f"seed {r.schedule.seed}: {r.red}\n{r.schedule}" for r in results if r.red]
    assert not red, "\n".join(red)
    assert sum(r.commits for r in results) > 3 * BATCH, "the schedules hardly do anything"
    assert sum(r.carried for r in results) > 0


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with planted(name):
        seed = next((s for s in range(bug.seeds) if run(bug.schedule(s)).red), None)
    assert seed is not None, f"{name}: all of {bug.seeds} schedules stayed green"
    assert not run(bug.schedule(seed)).red, "the same schedule is red without the bug"


def test_a_seed_replays_exactly() -> None:
    """Whatever the hash seed of the process is."""
    code = "from tests.sim import draw, run; print(*(run(draw(s)).trace for s in range(6)))"
    traces = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }  # fmt: skip
    here = " ".join(run(draw(s)).trace for s in range(6)) + "\n"
    assert traces == {here}


# ---------------------------------------------------------------------- how long to wait, and for whom


def share(schedule: Schedule) -> dict[str, float]:
    """How many of the commits list a slot's offer fresh, after the first three."""
    world = World(schedule)
    world.run()
    commits = world.observer.commits[3:]
    counts = Counter(o.slot for c in commits for o in c.fresh)
    return {slot: n / len(commits) for slot, n in counts.items()}


LONG = Schedule(0, replicas=3, min_replicas=1, rules=Rules(sync_every=4), end=200.0, settled=1000)


def test_a_slightly_slower_replica_is_waited_for() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 1.4))
    assert share(plan)["r02"] == 1.0
    with patch.object(rules, "waiting_for", lambda *args: {}):
        assert share(plan).get("r02", 0.0) < 0.7


def test_a_much_slower_replica_does_fewer_inner_steps_and_so_counts() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 4.0))
    paced = share(plan).get("r02", 0.0)
    with patch.object(rules, "next_cap", lambda cap, *args, **kwargs: cap):
        unpaced = share(plan).get("r02", 0.0)
    assert paced > 0.4 > unpaced


def test_a_slot_whose_beat_does_not_get_through_still_counts() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 1.2), mute=(2,))
    assert share(plan)["r02"] > 0.9


def test_a_hung_trainer_costs_two_patient_steps_and_no_more() -> None:
    world = World(replace(LONG, hung=(2,)))
    world.run()
    healthy = World(LONG)
    healthy.run()
    assert len(world.observer.commits) > 0.85 * len(healthy.observer.commits)


def test_nobody_waits_long_for_the_dead() -> None:
    """kill -9: the others go on after dead_after or their patience, whichever is less."""
    world = World(replace(LONG, actions=((30.0, "kill", 2),), speeds=(1.0,)))
    with patch.object(world.fleet, "_replace", lambda *args: None):
        world.run()
    times = world.observer.times
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < min(gaps) + 6.0
