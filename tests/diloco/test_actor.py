"""Actors: which place one takes, and a fleet that trains on what they sampled."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.actor import main
from diloco.actor.actor import Actor, Heard, _act_to_the_end
from diloco.actor.places import (
    Pace,
    Speed,
    Standing,
    _hash,
    chosen_place,
    filled_places,
    open_places,
    pace_of,
    read_standings,
)
from diloco.audit.inner import recompute_offers
from diloco.process import exitcodes
from diloco.run.combinations import prepared_for_actors, refuse_actors, staleness_of
from diloco.run.config import ConfigError, RunConfig
from diloco.run.record import read_run
from rendezvous import layout
from rendezvous.agreement.membership import read_beat, read_control, write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.errors import GaveUp
from rendezvous.layout import SUPERVISOR
from rendezvous.records.records import Beat, Claim
from rendezvous.records.rollouts import Rollouts, read_record
from rendezvous.stores.memory import MemoryStore
from tests.diloco.test_recorded_fleet import PLAIN, a_fleet, events
from tests.sim import acting
from tests.sim.simulate import Schedule, World
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet

H4 = Pace(interval=4, accumulated=1, served=1)


def places(at: Standing, weights: int, staleness: int, pace: Pace = H4, there: set[int] | None = None) -> list[int]:
    is_filled = lambda slot, g, rank: g in (there or set())  # noqa: E731
    return [g for _, _, g in open_places([at], is_filled, pace, weights=weights, staleness=staleness)]


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(0, [10, 11]), (1, [10, 11, 12, 13, 14, 15]), (2, [10, 11, *range(12, 20)])],
)
def test_places_are_open_to_the_rounds_end_and_as_many_rounds_as_may_be_stale(
    staleness: int, expected: list[int]
) -> None:
    """Outer step 2 began at inner step 8; the replica trains generation 9 now."""
    assert places(Standing("r00", step=2, data=9, inner=1), weights=2, staleness=staleness) == expected


@pytest.mark.parametrize(("end", "expected"), [(0, [10, 11, 12, 13, 14, 15]), (3, [10, 11]), (4, [*range(10, 16)])])
def test_no_place_is_open_after_the_runs_end(end: int, expected: list[int]) -> None:
    at = Standing("r00", step=2, data=9, inner=1)
    found = open_places([at], lambda *_: False, H4, weights=2, staleness=1, end=end)
    assert [g for _, _, g in found] == expected


def test_older_weights_reach_less_far_and_filled_places_are_passed_over() -> None:
    at = Standing("r00", step=2, data=9, inner=1)
    assert places(at, weights=1, staleness=1) == [10, 11]
    assert places(at, weights=1, staleness=0) == []
    assert places(at, weights=2, staleness=0, there={10}) == [11]


@pytest.mark.parametrize(
    ("pace", "data", "expected"),
    [
        (
            Pace(4, accumulated=1, served=2),
            8,
            [5],
        ),  # two inner steps on each generation: 4 has 8 and 9, 5 has 10 and 11
        (Pace(4, accumulated=2, served=1), 8, [17, 18, 19, 20, 21, 22, 23]),  # two generations in each inner step
        (Pace(4, accumulated=2, served=4), 8, [5]),
    ],
)
def test_places_of_other_batches(pace: Pace, data: int, expected: list[int]) -> None:
    assert places(Standing("r00", step=2, data=data, inner=0), weights=2, staleness=0, pace=pace) == expected


def test_places_that_the_slot_reaches_sooner_come_last() -> None:
    """An actor needs 1 s, the slot .4 s per generation: it may have reached the fourth from now."""
    at = Standing("r00", step=2, data=8, inner=0, rate=0.4)
    found = open_places([at], lambda *_: False, H4, weights=2, staleness=1, takes_s=1.0)
    assert [g for _, _, g in found] == [12, 13, 14, 15, 11, 10, 9]
    assert {chosen_place(found, f"a{i}") for i in range(40)} == {("r00", 12)}, "one alone: the nearest"
    assert chosen_place(found[4:], "a01") is None
    assert chosen_place(found[4:], "a01", probes=True) == ("r00", 11)
    assert chosen_place([], "a01", probes=True) is None
    assert chosen_place(found[:1], "a01", ["a01", "a02", "a03", "a04"], probes=True) in (None, ("r00", 12))


def test_each_place_belongs_to_one_actor_that_takes_its_nearest() -> None:
    names = [f"a{i:02d}" for i in range(4)]
    near = [(distance, f"r0{slot}", 7 + distance) for distance in range(40) for slot in range(2)]
    owners = Counter(name for place in near for name in names if chosen_place([place], name, names) == place[1:])
    assert sum(owners.values()) == len(near) and min(owners.values()) > 10
    own = {name: chosen_place(near, name, names) for name in names}
    assert len(set(own.values())) == 4 and all(place[1] < 27 for place in own.values() if place)
    for name in names:  # it fills its places one after the other, and no other actor does
        left, taken = list(near), []
        while (place := chosen_place(left, name, names)) is not None:
            taken.append(place)
            left = [one for one in left if one[1:] != place]
        assert taken == sorted(taken, key=lambda place: (place[1], place[0])) and len(taken) == owners[name]
    assert chosen_place([], "a00", names) is None


def test_an_actor_without_a_place_of_its_own_takes_an_overdue_one() -> None:
    names = ["a00", "a01"]
    near = [(1, f"r{i:02d}", 7) for i in range(40)]
    strangers = [place for place in near if max(names, key=lambda name: _hash(name, place)) == "a00"]
    assert 10 < len(strangers) < 30
    assert chosen_place(strangers, "a01", names) is None, "its owner may be at work"
    late = [place[1:] for place in strangers]
    assert chosen_place(strangers, "a01", names, late) in late[:8]
    assert chosen_place(strangers, "a01", names, late[9:10]) == late[9]


@dataclass
class Played:
    """What one actor did beside one replica.   took: began, seconds and whether in time, of each of its bundles."""

    took: list[tuple[float, float, bool]]
    speed: Speed

    def stood(self, since: float) -> int:
        return sum(stands for began, _, stands in self.took if began >= since)

    def busy_in_vain(self) -> float:
        return sum(seconds for _, seconds, stands in self.took if not stands)


def play(
    takes: Callable[[float, int], float],
    *,
    interval: int,
    generation_s: float,
    staleness: int,
    until: float,
    others: Callable[[int], bool] = lambda ahead: False,
) -> Played:
    """Play an actor's looks.   takes: (time, number of the bundle) -> its seconds.   others: what other actors fill."""
    pace, now, speed, filled, took = Pace(interval, 1, 1), 0.0, Speed(), set[int](), []
    while now < until:
        at_work = int(now / generation_s)
        step, inner = divmod(at_work, interval)
        at = Standing("r00", step, at_work, inner, generation_s)
        at_hand = partial(open_places, [at], pace=pace, weights=step, staleness=staleness, takes_s=speed.takes_s)
        found = at_hand(lambda slot, g, rank: g in filled or others(g - at_work))  # noqa: B023
        speed = speed.after_look(at_hand(lambda *_: False), now)
        place = chosen_place(found, "a00", ["a00"], probes=speed.probes_at(now))
        if place is None:
            now += 0.5
            continue
        seconds = takes(now, len(took))
        took.append((now, seconds, place[1] > (now + seconds) / generation_s))
        filled.add(place[1])
        now, speed = now + seconds, speed.after_bundle(seconds)
    return Played(took, speed)


@pytest.mark.parametrize("late", [5, 28, 200, 12_000])
@pytest.mark.parametrize("number", [0, 1, 40], ids=["the first bundle", "the second", "a later one"])
@pytest.mark.parametrize(
    ("interval", "generation_s", "staleness"), [(2, 0.3, 2), (20, 10.0, 0)], ids=["short steps", "long steps"]
)
def test_one_slow_bundle_does_not_silence_an_actor(
    late: int, number: int, interval: int, generation_s: float, staleness: int
) -> None:
    """Before: after one bundle of 8.5 s (a suspended host, a compilation), it filled no place for ever."""
    takes = lambda _, at: generation_s * (late if at == number else 1)  # noqa: E731
    again = (60 + late) * generation_s + min(late * generation_s, 60.0)
    end = again + 100 * generation_s
    played = play(takes, interval=interval, generation_s=generation_s, staleness=staleness, until=end)
    assert played.stood(since=again) >= 20


def test_an_actor_of_which_all_bundles_become_slow_and_fast_again_is_used_again() -> None:
    takes = lambda now, _: 9.0 if 100.0 <= now < 400.0 else 0.3  # noqa: E731
    played = play(takes, interval=2, generation_s=0.3, staleness=2, until=700.0)
    assert played.stood(0.0) and played.stood(550.0) > 100, "the longest wait is 16 bundles of 9 s"


@pytest.mark.parametrize("seconds", [2.0, 30.0, 600.0])
def test_an_actor_that_is_too_slow_for_good_samples_ever_less(seconds: float) -> None:
    played = play(lambda *_: seconds, interval=2, generation_s=0.3, staleness=2, until=100 * seconds)
    assert 3 <= len(played.took) <= 14 and played.busy_in_vain() <= 14 * seconds
    assert played.speed.probes == len(played.took) - 1


def test_a_fast_actor_in_a_filled_window_makes_no_probe() -> None:
    """Other actors fill all places in time; what is left open is too near, and no sign of a slow actor."""
    others = lambda ahead: ahead > 1  # noqa: E731
    played = play(lambda *_: 0.3, interval=4, generation_s=0.5, staleness=3, until=60.0, others=others)
    assert len(played.took) == 1 and played.speed.slow_since is None


def test_places_of_others_in_time_are_no_reason_for_a_probe() -> None:
    slow = Speed((9.0,)).after_look([(-1, "r00", 3)], 50.0)
    assert not slow.probes_at(58.0) and slow.probes_at(59.0) and slow.after_look([], 60.0) == slow
    assert not slow.after_look([(0, "r00", 9)], 58.0).probes_at(1e9)
    assert not Speed().probes_at(1e9), "before its first bundle, all places are in time"
    many = Speed((9.0,), 0.0, probes=10_000)
    assert many.probes_at(144.0) and not many.probes_at(143.0)


def test_a_slow_first_bundle_in_a_fleet_is_told_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: the actor lived, followed the weights, and delivered nothing more."""
    notes, sample, began = list[str](), acting.StubSampler.sample, list[float]()

    def slow_at_first(self: acting.StubSampler, *args: Any) -> Any:
        began.append(self.actor.w.now)
        notes.append(self.actor._status.note)
        self.actor.w.wait(self.actor.p, 12.0 if len(began) == 1 else 0.0)
        return sample(self, *args)

    monkeypatch.setattr(acting.StubSampler, "sample", slow_at_first)
    plan = acting.Acting(actors=1, staleness=1, takes=0.4)
    world = World(Schedule(3, replicas=1, min_replicas=1, speeds=(1.0,), acting=plan, calm=40.0, end=80.0))
    world.run()
    assert world.bundles.delivered[True] >= 10
    assert "too slow for this window" in notes[1] and "too slow" not in notes[-1]


def test_a_slot_that_is_dead_gets_no_more_places() -> None:
    """Before: actors filled them for its whole outage, and its replacement found bundles that were all too old."""
    pace, at = Pace(6, 1, 1), Standing("r00", 10, 60, 0, 0.1)
    assert open_places([at], lambda *_: False, pace, weights=11, staleness=1)
    assert open_places([at], lambda *_: False, pace, weights=13, staleness=1) == []


def test_a_slot_with_outer_steps_shorter_than_a_heartbeat_is_not_dead() -> None:
    """Before: with .6 s steps and a heartbeat each 5 s, a living slot's heartbeat was up to 8 steps old: no places."""
    actor: Any = Actor.__new__(Actor)
    clock = ManualClock()
    actor._session, actor._steps = SimpleNamespace(clock=clock, timing=Timing(beat=5.0)), []
    actor._status, pace, dead_at = SimpleNamespace(step=0), Pace(2, 1, 1), 60.0
    began, had = clock.now(), list[bool]()
    while (passed := clock.now() - began) < 90.0:
        actor._status.step = int(passed / 0.6)
        read = int(min(passed, dead_at) // 5 * 5 / 0.6)
        at, former = Standing("r00", read, 2 * read, 0, 0.3), actor._former_step()
        found = open_places([at], lambda *_: False, pace, weights=int(passed / 0.6), former=former, staleness=4)
        had.append(bool(found))
        clock.sleep(0.5)
    alive, after = int(dead_at / 0.5), int((dead_at + 2 * 5.0 + 4 * 0.6) / 0.5)
    assert all(had[20:alive]) and not any(had[after:]), "two heartbeats after its last one, a dead slot gets none"


def test_standings_are_those_of_slots_that_train() -> None:
    store = MemoryStore("memory://x")
    write_control(store, SystemClock(), replicas=3, steps=9, min_replicas=1)
    for slot, phase, data in (("r00", "train", 7), ("r01", "heal", 0)):
        store.put(layout.beat_key(slot), Beat(slot, 1, 3, phase, 2, 1, 0.1, 5.0, data=data).encode())
    store.put(layout.claim_key("r00", 1), Claim("r00", 1, "n", 0.0, ranks=2).encode())
    ranks = dict[tuple[str, int], int]()
    assert read_standings(store, ["r00", "r01", "r02"], ranks) == [Standing("r00", 2, 7, 1, 0.1, ranks=2)]
    store.delete([layout.claim_key("r00", 1)])
    assert read_standings(store, ["r00"], ranks)[0].ranks == 2, "a session's claim is read once"
    foreign = (
        "rollouts/r00/x",
        "rollouts/r00/0000000105/0001.0.bundle",
        "rollouts/r00/00000000zz/0000.0.bundle",
        "rollouts/r00/0000000004/0000.0.verdict",
    )
    for generation, rank in ((3, 0), (105, 0), (105, 1)):
        store.put(layout.bundle_key("r00", generation, rank, 0), b"")
    for key in foreign:
        store.put(key, b"")
    is_filled = filled_places(store)
    assert [(g, k) for g in range(250) for k in range(3) if is_filled("r00", g, k)] == [(3, 0), (105, 0), (105, 1)]


def test_each_rank_of_a_slot_has_places_of_its_own() -> None:
    at = Standing("r00", step=2, data=9, inner=1, ranks=2)
    found = open_places([at], lambda slot, g, rank: (g, rank) == (10, 1), H4, weights=2, staleness=0)
    assert found == [(0, "r00", 20), (1, "r00", 22), (1, "r00", 23)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fleet": {"record_rollouts": False}}, "without fleet.record_rollouts"),
        ({"fleet": {"broadcast_weights": False}}, "without fleet.broadcast_weights"),
        ({"inner": {"loop": "supervised"}}, "no rollouts"),
        ({"inner": {**PLAIN, "grpo": {"objective": "dapo"}}}, "Start no actors"),
        ({"fleet": {"actor_engine": "sglang:http://x"}}, "Use openai:http://HOST:PORT, llama_cpp:BASE.gguf"),
        ({"fleet": {"actor_engine": "llama_cpp"}}, "Use openai:http://HOST:PORT, llama_cpp:BASE.gguf"),
        ({"fleet": {"actor_engine": "openai:localhost:8000"}}, "Use openai:http://HOST:PORT, llama_cpp:BASE.gguf"),
        ({"fleet": {"actor_engine": "mlx:"}}, "Use openai:http://HOST:PORT, llama_cpp:BASE.gguf, mlx or"),
        ({"fleet": {"actor_engine": "mlx"}}, "takes LoRA adapters only"),
        ({"fleet": {"actor_engine": "openai:http://x"}}, "takes LoRA adapters only"),
    ],
)
def test_a_run_without_use_for_actors_says_so(
    tmp_path: Path, changes: dict, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {**changes, "fleet": {"broadcast_weights": True, **changes.get("fleet", {})}}
    fleet = a_fleet(tmp_path, **asked)
    assert main([fleet.url, "--name", "a01"]) == exitcodes.USER_ERROR
    assert words in capsys.readouterr().err
    assert main([fleet.url, "--name", "../x"]) == exitcodes.USER_ERROR


@pytest.mark.parametrize(
    ("typed", "expected"), [((), "llama_cpp:b.gguf"), (("--engine", "transformers"), "transformers")]
)
def test_an_actor_has_the_runs_engine_unless_you_type_another(
    tmp_path: Path,
    typed: tuple[str, ...],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("diloco.replica.replica.hear_asking", lambda act: None)
    lora = {**PLAIN, "lora": {"r": 4, "alpha": 8.0}}
    fleet = a_fleet(tmp_path, inner=lora, fleet={"broadcast_weights": True, "actor_engine": "llama_cpp:b.gguf"})
    assert main([fleet.url, "--engine", "sglang:x"]) == exitcodes.USER_ERROR
    assert "'sglang:x' is not known. Use openai:" in capsys.readouterr().err
    assert not read_control(read_run(fleet.url).store).guests, "a refused actor takes no name"
    asked = list[str]()
    monkeypatch.setattr("diloco.actor.actor.Actor", lambda run, session, scratch, engine: asked.append(engine))
    monkeypatch.setattr("diloco.actor.actor._act_to_the_end", lambda *_, **__: (exitcodes.DONE, "done"))
    assert main([fleet.url, *typed]) == exitcodes.DONE
    assert asked == [expected]


@pytest.mark.parametrize(("step", "expected"), [(2, (12, 18)), (5, (18, 20)), (7, (22, 24))])
def test_an_actors_rewards_read_no_position_behind_the_end(
    step: int, expected: tuple[int, int], tmp_path: Path
) -> None:
    """Before: max_steps stayed at the end of the launch after --steps had made the run longer."""
    raw = {"inner": {"model": "toolworld"}, "fleet": {"steps": 5}, "outer": {"sync_every": 2}}
    record = SimpleNamespace(parent=SimpleNamespace(outer_steps=4))
    run = SimpleNamespace(config=RunConfig.from_dict(raw, tmp_path), record=record)
    actor: Any = SimpleNamespace(_run=run, _status=SimpleNamespace(step=step))
    assert tuple(Actor._progress(actor).values()) == expected


def test_a_run_over_a_lighthouse_has_no_actors(tmp_path: Path) -> None:
    raw = {"inner": {"model": "toolworld"}, "rendezvous": "lighthouse://x:1"}
    with pytest.raises(ConfigError, match="meet in the bucket"):
        refuse_actors(prepared_for_actors(RunConfig.from_dict(raw, tmp_path)))


def test_after_the_runs_end_an_actor_takes_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = (fleet := a_fleet(tmp_path, fleet={"broadcast_weights": True})).store
    store.put(layout.commit_key(read_control(store).steps - 1), b"{}")
    assert main([fleet.url]) == exitcodes.DONE
    assert "outer steps are committed; nothing to do" in capsys.readouterr().out
    assert not read_control(store).guests and not store.list("replicas/")


@pytest.mark.parametrize(
    ("beats", "with_supervisor", "beating_s", "ends_at"),
    [("r00", False, 0.0, 600.0), ("r00", False, 2000.0, 2600.0), ("r00", True, 2000.0, 2600.0),
     (SUPERVISOR, False, 2000.0, 600.0), (SUPERVISOR, True, 2000.0, 2600.0)],
)  # fmt: skip
def test_an_actor_ends_when_no_replica_has_been_alive_for_long(
    beats: str, with_supervisor: bool, beating_s: float, ends_at: float
) -> None:
    """It had waited for ever, also on a rented GPU.   A slow inner step changes only the heartbeat's counter.

    A supervisor that is alive starts replicas again, and ends its actors."""
    clock, store = ManualClock(), MemoryStore("memory://run")

    def act() -> bool:
        assert clock.at < 10_000, "it waits for ever"
        if clock.at <= beating_s:
            beat = Beat(slot=beats, generation=1, n=int(clock.at), phase="train", step=0, inner=0, rate=0.0, at=0.0)
            store.put(layout.beat_key(beats), beat.encode())
        return False

    wanted = SimpleNamespace(steps=100, slot_names=["r00", "r01"])
    members = SimpleNamespace(refuse_if_fenced=lambda: None, generation=1)
    rv = SimpleNamespace(members=members, is_leaving=False, wanted=wanted, slot="a00", generation=1)
    session: Any = SimpleNamespace(clock=clock, rv=rv, flush_soon=lambda: None)
    run: Any = SimpleNamespace(store=store, timing=Timing(give_up=600.0))
    with pytest.raises(GaveUp, match=r"no replica .* heartbeat for 6\d\d s .*`diloco status memory://run`"):
        _act_to_the_end(SimpleNamespace(act=act), run, session, with_supervisor=with_supervisor)  # pyright: ignore
    assert ends_at <= clock.at < ends_at + 50


def test_an_actor_reads_few_heartbeats() -> None:
    """All of them once, and then one for each look, however many replicas there are."""
    store, slots, asked = MemoryStore(), [layout.slot_name(i) for i in range(32)], list[str]()
    counted: Any = SimpleNamespace(url=store.url, get=lambda key: (asked.append(key), store.get(key))[1])
    heard = Heard(600.0, 0.0)
    for look in range(10):
        for slot in slots:
            beat = Beat(slot=slot, generation=1, n=look, phase="train", step=0, inner=0, rate=0.0, at=0.0)
            store.put(layout.beat_key(slot), beat.encode())
        heard.refuse_silence(counted, slots, 10.0 * look)
    assert len(asked) == 32 + 9 and heard.at == 90.0


@pytest.mark.parametrize(
    ("asked", "sync_every", "expected"),
    [(None, 1, 5), (None, 2, 2), (None, 3, 1), (None, 6, 0), (None, 50, 0), (2, 50, 2), (0, 1, 0)],
)
def test_weights_are_about_six_inner_steps_old_at_most_unless_the_run_says_otherwise(
    tmp_path: Path, asked: int | None, sync_every: int, expected: int
) -> None:
    fleet = {} if asked is None else {"staleness": asked}
    raw = {"inner": {"model": "toolworld"}, "outer": {"sync_every": sync_every}, "fleet": {"replicas": 1, **fleet}}
    assert staleness_of(RunConfig.from_dict(raw, tmp_path)) == expected


def test_with_fragments_an_outer_step_has_fewer_inner_steps(tmp_path: Path) -> None:
    outer = {"sync_every": 8, "fragments": 4}
    config = RunConfig.from_dict({"inner": {"model": "toolworld"}, "outer": outer}, tmp_path)
    assert staleness_of(config) == 2, "six inner steps are three outer ones, of which one is the present"
    pace = pace_of(config, served=1)
    assert pace.outer_step_of(Standing("r00", step=10, data=20, inner=0), 26) == 13


# ---------------------------------------------------------------------- a fleet with actors


def start_actor(fleet: Fleet, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "diloco.actor", fleet.url, "--name", name]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def bundles(fleet: Fleet) -> dict[str, Rollouts]:
    root = Path(fleet.url)
    return {
        path.relative_to(root).as_posix(): read_record(path.read_bytes())[0]
        for path in root.glob("rollouts/*/*/*.bundle")
    }


def sampled_by(fleet: Fleet, name: str) -> int:
    return sum(record.actor == name for record in bundles(fleet).values())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_replicas_train_on_what_two_actors_sampled_and_one_is_killed(tmp_path: Path) -> None:
    """Every inner step is taken again from the bucket, the actors' rollouts with TRL's correction."""
    inner = {**PLAIN, "batch_size": 64, "sdpo": {"weight": 0.1}}
    fleet = a_fleet(tmp_path, inner=inner, fleet={"steps": 100_000, "broadcast_weights": True, "min_replicas": 1})
    actors = {name: start_actor(fleet, name) for name in ("a01", "a02")}
    fleet.start_all()
    fleet.wait_for(lambda: all(sampled_by(fleet, name) >= 3 for name in actors))
    actors["a01"].kill()
    before = max(record.step for record in bundles(fleet).values())
    fleet.wait_for(lambda: max(record.step for record in bundles(fleet).values()) >= before + 3)
    fleet.end_in(1)
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    said, _ = actors["a02"].communicate(timeout=60)
    assert actors["a02"].returncode == exitcodes.DONE, said
    assert not events(fleet, "rollouts_refused") and not events(fleet, "rollouts_lost")
    assert sum(event["bundles"] for event in events(fleet, "rollouts_found")) >= 3
    found = recompute_offers(read_run(fleet.url))
    assert not found.off and not found.close and not found.unchecked and found.equal > 2 * before, found
    assert found.remade == 0
    gone = next(key for key, record in sorted(bundles(fleet).items()) if record.actor)
    (Path(fleet.url) / gone).unlink()
    found = recompute_offers(read_run(fleet.url))
    assert not found.off and [text for text in found.unchecked if gone in text], found


@pytest.mark.slow
def test_an_actor_ends_when_it_is_interrupted(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path, fleet={"steps": 100_000, "broadcast_weights": True})
    actor = start_actor(fleet, "a01")
    fleet.wait_for(lambda: (beat := read_beat(fleet.store, "a01")) is not None and beat.phase == "sample")
    actor.send_signal(signal.SIGINT)
    said, _ = actor.communicate(timeout=60)
    assert actor.returncode == exitcodes.LEFT and "Traceback" not in said, said
