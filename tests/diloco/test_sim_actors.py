"""Seeded schedules with actors, and proof that they would notice a broken rule of places (tests/sim/acting.py).

A red schedule prints its seed; `python -m tests.sim 1 --acted --start SEED` plays it again.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import exp, log, sqrt
from statistics import NormalDist, fmean
from typing import Any

import pytest

from rendezvous import layout
from tests.sim.acting import MISCHIEF, SAMPLE_S, Generations, calm_acted, draw_acted
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
@pytest.mark.parametrize("start, count", [(0, 16), pytest.param(16, 644, marks=pytest.mark.slow)])
def test_the_promises_about_places_hold(start: int, count: int) -> None:
    results = [run(draw_acted(seed)) for seed in range(start, start + count)]
    red = [f"seed {r.schedule.seed}: {r.red}\n{r.schedule}" for r in results if r.red]
    assert not red, "\n".join(red)
    fired = sum((r.fired for r in results), Counter[str]())
    never = HAPPENS - {name for name, n in fired.items() if n}
    assert not never, f"never: {never}\n{table(fired)}"


MANY_SCHEDULES = {  # until one finds it
    "a session's older bundle", "a replacement counts rounds", "an unlucky life shares", "an actor sees no bundles",
}  # fmt: skip


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    "name", [pytest.param(bug, marks=pytest.mark.slow if bug in MANY_SCHEDULES else ()) for bug in ACTED_BUGS]
)
def test_a_planted_bug_in_places_is_found(name: str) -> None:
    bug = ACTED_BUGS[name]
    with planted(name, ACTED_BUGS):
        seed = bug.red_seed(bug.first)
    assert seed is not None, f"{name}: all schedules from {bug.first} to {bug.seeds} stayed green"
    assert not run(bug.schedule(seed)).red, "the same schedule is red without the bug"


@pytest.mark.slow  # the test above begins where it is found today
@pytest.mark.parametrize("name", [name for name, bug in ACTED_BUGS.items() if bug.first])
def test_no_earlier_seed_finds_a_planted_bug_in_places(name: str) -> None:
    with planted(name, ACTED_BUGS):
        assert ACTED_BUGS[name].red_seed(0) == ACTED_BUGS[name].first, "correct `first`"


def _seconds_per_generation(plan: Schedule) -> float:
    world = World(plan)
    world.run()
    generations = world.fired["trained: its own"] + world.fired["trained: of an actor"]
    return world.now * plan.replicas / generations


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(4))
def test_dead_actors_cost_a_replica_nothing(seed: int) -> None:
    plan = calm_acted(seed)
    with_dead = _seconds_per_generation(replace(plan, acting=replace(plan.acting or Acting(), all_dead_at=5.0)))
    without = _seconds_per_generation(replace(plan, acting=Acting(actors=0, staleness=0)))
    assert with_dead <= 1.2 * without


# ---------------------------------------------------------------------- lengths


def long_tailed(seed: int) -> Schedule:
    """An actor is as fast as a replica, and one completion in a hundred takes 33 times the median."""
    acting = Acting(actors=8, staleness=3, takes=SAMPLE_S, tail=1.5, salt=seed)
    return Schedule(seed, replicas=2, min_replicas=2, speeds=(1.0,), acting=acting, calm=400.0, end=440.0)


def drops_what_is_late(generations: Any, true: Any = Generations.before_inner_step) -> None:
    """Wait for the freshest bundle that is there, and drop the places before it as too old."""
    slot, first, there = generations.p.slot, generations.data, list[int]()
    for _ in range(100):
        there = [g for g in range(first, first + 16) if layout.bundle_key(slot, g, 0, 0) in generations.w.objects]
        if there:
            break
        generations.clock.sleep(0.2)
    generations.data = there[-1] if there else first
    true(generations)


def kolmogorov_p(lengths: Sequence[float], tail: float) -> float:
    """Return the p-value of a Kolmogorov-Smirnov test of log-normal lengths (Stephens 1970; Kolmogorov's sum)."""
    n, expected = len(lengths), [NormalDist(0.0, tail).cdf(log(x)) for x in sorted(lengths)]
    off = max(max((i + 1) / n - x, x - i / n) for i, x in enumerate(expected))
    far = (sqrt(n) + 0.12 + 0.11 / sqrt(n)) * off
    return min(1.0, 2 * sum((-1) ** (k - 1) * exp(-2 * (k * far) ** 2) for k in range(1, 100)))


def trained_lengths(seeds: Sequence[int]) -> tuple[list[float], float]:
    """Return the lengths that were trained on in some schedules, and the actors' share of the bundles."""
    worlds = [World(long_tailed(seed)) for seed in seeds]
    for world in worlds:
        world.run()
    mine, theirs = (sum(w.fired[f"trained: {by}"] for w in worlds) for by in ("its own", "of an actor"))
    return [w.acting.length_of(*place) for w in worlds for place in w.bundles.places], theirs / (mine + theirs)


@pytest.mark.parametrize(
    "seeds", [(2,), *(pytest.param((s, s + 1), marks=pytest.mark.slow) for s in range(0, 12, 2))], ids=str
)
@pytest.mark.slow
def test_lengths_that_were_trained_on_are_those_of_the_prompts(
    seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long completions are not starved; a replica that drops late bundles fails this test."""
    lengths, of_actors = trained_lengths(seeds)
    assert len(lengths) > 200 * len(seeds) and of_actors > 0.3
    assert kolmogorov_p(lengths, 1.5) > 0.05
    monkeypatch.setattr(Generations, "before_inner_step", drops_what_is_late)
    shorter, of_actors = trained_lengths(seeds)
    assert kolmogorov_p(shorter, 1.5) < 0.05 and of_actors > 0.3
    assert fmean(map(log, shorter)) < fmean(map(log, lengths)) - 0.1


def test_the_checker_reads_a_bundle_by_itself_and_takes_no_torn_one() -> None:
    world = World(calm_acted(0))
    world.run()
    bodies = [body for key, body in world.objects.items() if key.endswith(".bundle")]
    assert len(bodies) > 20 and all(parsed(body) is not None for body in bodies)
    assert [parsed(bodies[0][:n]) for n in (0, 9, len(bodies[0]) - 1)] == [None, None, parsed(bodies[0])]
    assert parsed(bytes([bodies[0][0] ^ 1]) + bodies[0][1:]) is None


def test_a_seed_with_actors_replays_exactly() -> None:
    assert run(draw_acted(3)).trace == run(draw_acted(3)).trace
