"""Hundreds of seeded schedules of the real engine, and proof that they would notice a broken rule.

A red schedule prints its seed and what it means; `python -m tests.sim 1 --start SEED` plays it again.
"""

import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
from greenlet import getcurrent

from rendezvous.agreement import rules
from rendezvous.agreement.rules import Rules
from tests.sim.bugs import BUGS, planted
from tests.sim.observer import Durable
from tests.sim.replica import Process
from tests.sim.simulate import Schedule, World, draw, draw_lost, main, run, table
from tests.sim.store import SimStore, rot

SCHEDULES, BATCH = 1080, 180  # about 60 ms of one core each
FAST = 60  # of them in every run of the tests; `make faults` has 100,000
FAULTS = {
    "error", "lost answer", "duplicate", "slow", "torn upload", "half a blob is seen", "outage", "store full",
    "stale LIST", "wrong clock", "kill before", "kill after", "pause before", "pause after", "zombie returns",
    "kill at create claim", "kill at put delta", "kill at create offer", "kill at create commit",
    "kill at put mean blob", "kill at create mean", "kill at put snapshot blob", "kill at create manifest",
    "kill at create leave", "kill at create control", "kill at delete", "kill at get", "kill at list",
    "kill at put beat", "double launch", "whole fleet lost", "SIGTERM", "grown", "hung trainer", "mute",
    "bit flip in memory", "rot: delta", "rot: mean blob", "rot: snapshot blob", "truncated: delta",
    "truncated: mean blob", "truncated: snapshot blob", "wish: grow", "wish: replicas", "wish: drain",
    "wish: min_replicas", "wish: stop", "wish: resume", "buffer poisoned", "vanished: delta", "vanished: mean blob",
    "vanished: snapshot blob", "vanished: offer", "vanished: claim", "vanished: manifest", "vanished: mean",
    "vanished: commit", "vanished: beat", "malformed: offer", "malformed: claim", "malformed: control",
    "malformed: leave", "malformed: mean", "malformed: manifest", "malformed: beat", "malformed: commit", "lying: beat",
    "foreign exception", "forged: offer", "forged: claim", "forged: commit", "forged: manifest",
}  # fmt: skip
ANSWERS = {
    "collected", "ends: Collected", "ends: Corrupt", "ends: Diverged", "ends: Fenced", "ends: GaveUp", "ends: left",
    "ends: finished", "half a blob is replaced", "mean announced", "part taken over", "repaired: delta",
    "repaired: bin", "repaired: safetensors", "round in flight", "waits for a greenlet", "background job",
    "told: forged", "repaired: a vanished blob", "ends: Forged", "ends: WireError", "ends: of a foreign exception",
    "told: adopted", "told: offer_lost",
    "told: replay_differs", "told: inherited", "restored by the operator",
}  # fmt: skip


RARE = {
    "ends: Collected", "told: replay_differs", "told: offer_lost", "repaired: delta", "repaired: bin",
    "repaired: safetensors", "truncated: snapshot blob", "rot: snapshot blob", "truncated: mean blob", "rot: mean blob",
    "kill at create mean", "kill at create control", "kill at create commit", "kill at delete", "kill at list",
    "kill at put snapshot blob", "kill at put mean blob", "kill at create manifest", "part taken over",
    "vanished: mean blob", "vanished: snapshot blob", "vanished: offer", "vanished: claim", "vanished: manifest",
    "vanished: mean", "vanished: commit", "vanished: beat", "vanished: delta", "repaired: a vanished blob",
}  # fmt: skip


RARE_IN = dict.fromkeys(RARE, 0) | {
    "kill at create commit": 180,
    "repaired: a vanished blob": 360,
}  # name -> the batch in which it must happen
RARER = RARE | {"ends: Corrupt", "ends: GaveUp"}  # what the first FAST schedules need not have


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("start", "count"),
    [(0, FAST), *(pytest.param(start, BATCH, marks=pytest.mark.slow) for start in range(0, SCHEDULES, BATCH))],
)
def test_the_promises_hold(start: int, count: int) -> None:
    """And everything that can happen does: in every batch, what is rare in the one that RARE_IN names."""
    results = [run(draw(seed)) for seed in range(start, start + count)]
    red = [f"seed {r.schedule.seed}: {r.red}\n{r.schedule}" for r in results if r.red]
    assert not red, "\n".join(red)
    assert sum(r.commits for r in results) > 3 * count, "the schedules hardly do anything"
    assert sum(r.carried for r in results) > 0
    fired = sum((r.fired for r in results), Counter[str]())
    elsewhere = RARER if count == FAST else {name for name, batch in RARE_IN.items() if batch != start}
    never = (FAULTS | ANSWERS) - elsewhere - {name for name, n in fired.items() if n}
    assert not never, f"never: {never}\n{table(fired)}"


LOST = {"store back", "commit away", "ends: RecordsLost", "ends: GaveUp", "ends: finds no run"} | {
    f"store {how}: {whom}" for how in ("gone", "older", "other") for whom in ("some", "all")
}


MEET_ALL = (*range(150, 160), 162, 168, 198)  # between them, all of LOST happens


@pytest.mark.parametrize(
    "seeds", [MEET_ALL, pytest.param(range(150, 1470), marks=pytest.mark.slow)], ids=["13", "1320"]
)
def test_a_store_that_is_taken_away_splits_nothing(seeds: Iterable[int]) -> None:
    """Gone, emptied, swapped for another or for a copy, back again; for some replicas and for all."""
    results = [run(draw_lost(seed)) for seed in seeds]
    red = [f"seed {r.schedule.seed}: {r.red}\n{r.schedule}" for r in results if r.red]
    assert not red, "\n".join(red)
    never = LOST - {name for r in results for name, n in r.fired.items() if n}
    assert not never, f"never: {never}"


RARE = {  # they take many schedules to be found
    "a lost commit is decided again", "one anchor", "a lost θ₀ is replaced", "a joiner trusts its store",
}  # fmt: skip


@pytest.mark.quick(16)
@pytest.mark.parametrize("name", [pytest.param(bug, marks=pytest.mark.slow if bug in RARE else ()) for bug in BUGS])
def test_a_planted_bug_is_found(name: str) -> None:
    bug = BUGS[name]
    with planted(name):
        seed = bug.red_seed(bug.first)
    assert seed is not None, f"{name}: all schedules from {bug.first} to {bug.seeds} stayed green"
    assert not run(bug.schedule(seed)).red, "the same schedule is red without the bug"
    if bug.without is not None:
        with planted(name):
            assert not run(bug.without(bug.schedule(seed))).red, "another ability finds it, too"


@pytest.mark.slow  # the test above begins where it is found today
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.first])
def test_no_earlier_seed_finds_a_planted_bug(name: str) -> None:
    with planted(name):
        assert BUGS[name].red_seed(0) == BUGS[name].first, "correct `first`"


@pytest.mark.slow  # the test above looks at the first seed that finds it
@pytest.mark.parametrize("name", [name for name, bug in BUGS.items() if bug.without is not None])
def test_no_other_ability_finds_it(name: str) -> None:
    bug = BUGS[name]
    with planted(name):
        seeds = range(min((bug.red_seed(bug.first) or 0) + 5, bug.seeds))
        found = [s for s in seeds if bug.without is not None and run(bug.without(bug.schedule(s))).red]
    assert not found


@pytest.mark.slow
def test_a_seed_replays_exactly() -> None:
    """The trace is the same under every hash seed of the process."""
    code = "from tests.sim.simulate import draw, run; print(*(run(draw(s)).trace for s in range(6)))"
    traces = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for hash_seed in ("0", "1", "77")
    }  # fmt: skip
    here = " ".join(run(draw(s)).trace for s in range(6)) + "\n"
    assert traces == {here}


def test_a_collected_blob_that_its_writer_mends_is_no_new_pseudogradient() -> None:
    """Seed 2002157 was red: who still reads a step that others have collected puts its own blob back."""
    world, process = World(draw(0)), Process(1, "r00", 0.0, work=bytes(4 * 3))
    world.observer.gone.add("collected")
    for key in ("collected", "fresh"):
        world.observer._encoded(process, 1, key)
    assert process.sent[1].key == "fresh" and world.fired["a collected blob comes back"] == 1


def test_a_blob_that_a_full_store_refuses_is_no_replica_s_fault() -> None:
    """Seed 3009649 was red."""
    for outage, waits in [((0.0, 0.0, ""), True), ((30.0, 30.0, "full"), False), ((70.0, 30.0, "full"), True)]:
        world = World(replace(draw(0), outage=outage))
        world.now = 60.0
        offer = cast(Any, SimpleNamespace(step=1, slot="r00"))
        world.observer.offers[1, "r00", "n"] = Durable(offer, 20.0)
        assert world.observer._waits(Process(1, "r00", 0.0), 1) is waits


def test_a_red_seed_prints_the_command_that_replays_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["2", "--start", "40", "--jobs", "2", "--bug", "no carry"]) == 1
    first = capsys.readouterr().out.splitlines()[:2]
    command = shlex.split(first[1])
    assert command[:3] == ["python", "-m", "tests.sim"]
    assert main(command[3:]) == 1
    assert capsys.readouterr().out.splitlines()[0] == first[0]


# ---------------------------------------------------------------------- blobs that rot


SHARDS = Rules(sync_every=4, shard_from=1, shard_elements=2)


@pytest.mark.parametrize("rules_", [Rules(sync_every=4), SHARDS], ids=["direct", "sharded"])
@pytest.mark.parametrize("whose", [["r00"], ["r00", "r01"], ["r00", "r01", "r02"]], ids=len)
def test_deltas_that_rot_in_an_open_step_are_put_back_by_their_writers(rules_: Rules, whose: list[str]) -> None:
    """They live and have the bytes, so no replica stops, and no operator is needed."""
    world = World(Schedule(0, replicas=3, min_replicas=3, rules=rules_, speeds=(1.0, 1.1, 1.5), end=120.0))
    written, damaged = world.observer.written, set[str]()

    def then_rots(process: Process, key: str, old: bytes | None, body: bytes) -> None:
        written(process, key, old, body)
        if key.startswith("steps/0000000001/commit"):
            for blob in [k for k in world.objects if "0000000001/delta" in k and any(slot in k for slot in whose)]:
                rot(world, blob)
            damaged.update(world.originals)

    with patch.object(world.observer, "written", then_rots):
        world.run()
    assert len(damaged) == len(whose) and not world.fired["restored by the operator"]
    assert len(world.observer.commits) > 5 and all(not p.ended or p.ended == "finished" for p in world.processes)


def test_a_session_that_hangs_in_a_request_puts_nothing_back() -> None:
    """A heartbeat that hangs is no excuse."""
    world, excused = (
        World(Schedule(1, replicas=2, min_replicas=1, slow=0.02, calm=240.0, end=240.0)),
        set[tuple[bool, bool]](),
    )
    hang = SimStore._hang

    def seen(store: SimStore, seconds: float) -> None:
        p, ends = store._process, world.now + seconds
        hang(store, seconds)
        excused.add((getcurrent() is p.tasks[1], p.hangs_until >= ends))

    with patch.object(SimStore, "_hang", seen):
        world.run()
    assert {(False, True), (True, False)} <= excused and (False, False) not in excused


# -------------------------------------------------------------------- the length of a wait, and the replicas it is for


def share(schedule: Schedule) -> dict[str, float]:
    """How many of the commits list a slot's offer fresh, after the first three."""
    world = World(schedule)
    world.run()
    commits = world.observer.commits[3:]
    counts = Counter(o.slot for c in commits for o in c.fresh_offers)
    return {slot: n / len(commits) for slot, n in counts.items()}


LONG = Schedule(0, replicas=3, min_replicas=1, rules=Rules(sync_every=4), end=200.0, settled=1000)


def test_a_slightly_slower_replica_is_waited_for() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 1.4))
    assert share(plan)["r02"] == 1.0
    with patch.object(rules, "waiting_for", lambda **given: {}):
        assert share(plan).get("r02", 0.0) < 0.7


def test_a_much_slower_replica_does_fewer_inner_steps_and_so_counts() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 4.0))
    paced = share(plan).get("r02", 0.0)
    with patch.object(rules, "next_cap", lambda sync_every, *args, **kwargs: sync_every):
        unpaced = share(plan).get("r02", 0.0)
    assert paced > 0.4 > unpaced


def steps_per_second(schedule: Schedule) -> float:
    """Inner steps that counted, of all replicas together, by the world's clock: those of replicas are wrong."""
    world = World(schedule)
    world.run()
    return sum(o.h for c in world.observer.commits for o in c.offers) / world.now


def test_in_an_unequal_fleet_all_offer_together_and_the_fast_ones_do_not_idle() -> None:
    """One is two thirds, one a third as fast as the first, which waited for the last."""
    plan = replace(LONG, speeds=(0.5, 0.75, 1.5), rules=Rules(sync_every=16), end=800.0)
    paced = steps_per_second(plan)
    with patch.object(rules, "next_cap", lambda sync_every, *args, **kwargs: sync_every):
        unpaced = steps_per_second(plan)
    assert unpaced < 2.4 and paced > 3.0, "of 4.0 without any sync"


def test_rounds_by_speed_settle_with_fragments_too() -> None:
    """A pseudogradient has the inner steps of F rounds inside: by them lengths swung between 32 and 41 for ever."""
    world = World(replace(LONG, speeds=(0.5, 0.75, 1.5), rules=Rules(fragments=3, sync_every=48), end=400.0))
    world.run()
    lengths = [{o.slot: o.h for o in c.fresh_offers} for c in world.observer.commits[12:]]
    assert len(lengths) > 15 and max(h["r01"] for h in lengths) - min(h["r01"] for h in lengths) <= 3, lengths
    assert all(h["r00"] == 48 and 12 <= h["r02"] <= 18 for h in lengths), lengths


def test_a_slot_whose_beat_does_not_get_through_still_counts() -> None:
    plan = replace(LONG, speeds=(1.0, 1.0, 1.2), mute=(2,))
    assert share(plan)["r02"] > 0.9


def test_a_hung_trainer_costs_two_patient_steps_and_no_more() -> None:
    world = World(replace(LONG, hung=(2,)))
    world.run()
    healthy = World(LONG)
    healthy.run()
    assert len(world.observer.commits) > 0.85 * len(healthy.observer.commits)


def test_no_replica_waits_long_for_the_dead() -> None:
    """kill -9: the others go on after the smaller of dead_after and their patience."""
    world = World(replace(LONG, actions=((30.0, "kill", 2),), speeds=(1.0,)))
    with patch.object(world.fleet, "_replace", lambda *args: None):
        world.run()
    times = world.observer.times
    gaps = [b - a for a, b in pairwise(times)]
    assert max(gaps) < min(gaps) + 6.0
