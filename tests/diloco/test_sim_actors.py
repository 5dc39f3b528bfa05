"""Seeded schedules with actors, and proof that they would notice a broken rule of places (tests/sim/acting.py).

A red schedule prints its seed; `python -m tests.sim 1 --acted --start SEED` plays it again.
"""

from collections import Counter
from dataclasses import replace

import pytest

from tests.sim.acting import MISCHIEF, calm_acted, draw_acted
from tests.sim.acting_bugs import ACTED_BUGS
from tests.sim.bugs import planted
from tests.sim.bundles import parsed
from tests.sim.simulate import Acting, Schedule, World, run, table

HAPPENS = {
    "trained: of an actor", "trained: its own", "actor dies in a sample", "actor sleeps in a sample", "all actors lost",
    "kill at create rollouts", "told: rollouts_refused", "told: rollouts_lost", "told: rollouts_doubted", "too old",
    "mischief comes to nothing", "door checks", *(f"mischief: {how}" for how in MISCHIEF),
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("start, count", [(0, 60), pytest.param(60, 600, marks=pytest.mark.slow)])
def test_the_promises_about_places_hold(start: int, count: int) -> None:
    results = [run(draw_acted(seed)) for seed in range(start, start + count)]
    red = [f"seed {r.schedule.seed}: {r.red}\n{r.schedule}" for r in results if r.red]
    assert not red, "\n".join(red)
    fired = sum((r.fired for r in results), Counter[str]())
    never = HAPPENS - {name for name, n in fired.items() if n}
    assert not never, f"never: {never}\n{table(fired)}"


@pytest.mark.parametrize("name", ACTED_BUGS)
def test_a_planted_bug_in_places_is_found(name: str) -> None:
    bug = ACTED_BUGS[name]
    with planted(name, ACTED_BUGS):
        seed = next((s for s in range(bug.seeds) if run(bug.schedule(s)).red), None)
    assert seed is not None, f"{name}: all of {bug.seeds} schedules stayed green"
    assert not run(bug.schedule(seed)).red, "the same schedule is red without the bug"


def _seconds_per_generation(plan: Schedule) -> float:
    world = World(plan)
    world.run()
    generations = world.fired["trained: its own"] + world.fired["trained: of an actor"]
    return world.now * plan.replicas / generations


@pytest.mark.parametrize("seed", range(4))
def test_dead_actors_cost_a_replica_nothing(seed: int) -> None:
    plan = calm_acted(seed)
    with_dead = _seconds_per_generation(replace(plan, acting=replace(plan.acting or Acting(), all_dead_at=5.0)))
    without = _seconds_per_generation(replace(plan, acting=Acting(actors=0, staleness=0)))
    assert with_dead <= 1.2 * without


def test_the_checker_reads_a_bundle_by_itself_and_takes_no_torn_one() -> None:
    world = World(calm_acted(0))
    world.run()
    bodies = [body for key, body in world.objects.items() if key.endswith(".bundle")]
    assert len(bodies) > 20 and all(parsed(body) is not None for body in bodies)
    assert [parsed(bodies[0][:n]) for n in (0, 9, len(bodies[0]) - 1)] == [None, None, parsed(bodies[0])]
    assert parsed(bytes([bodies[0][0] ^ 1]) + bodies[0][1:]) is None


def test_a_seed_with_actors_replays_exactly() -> None:
    assert run(draw_acted(3)).trace == run(draw_acted(3)).trace
