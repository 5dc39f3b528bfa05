"""Requests of a fleet to its bucket, replicas and supervisor together: 8 replicas, 25 s per outer step, S3's timing.

Replicas are those of the simulator (tests/benchmarks/bench_scale.py), with bodies and means; the supervisor is the real
one, in virtual time, on a cloud whose replicas live and train nothing.

    python -m tests.executors.test_requests       the table
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from executors.supervision.looks import Looks
from rendezvous.agreement.membership import write_control
from rendezvous.store import Body, Buffer
from tests.benchmarks import bench_scale
from tests.rendezvous.test_keeping import fill
from tests.support.fakes import ManualClock
from tests.support.world import World

REPLICAS, STEP_S, INNER = 8, 25, 16


class Far:
    """A store that is not of this machine, and counts.   asked: (verb, first part of the key)."""

    def __init__(self, store: Any) -> None:
        self.url, self.store, self.asked = store.url, store, Counter[tuple[str, str]]()

    def _ask(self, verb: str, key: str) -> Any:
        self.asked[verb, key.partition("/")[0]] += 1
        return getattr(self.store, verb)

    def get(self, key: str) -> bytes | None:
        return self._ask("get", key)(key)

    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return self._ask("get_into", key)(key, out, start)

    def put(self, key: str, body: Body) -> None:
        self._ask("put", key)(key, body)

    def create(self, key: str, body: Buffer) -> None:
        self._ask("create", key)(key, body)

    def list(self, prefix: str) -> list[str]:
        return self._ask("list", prefix)(prefix)

    def delete(self, keys: Any) -> None:
        self.store.delete(keys)


def supervisors_requests(folder: Path, steps: int = 8) -> Counter[tuple[str, str]]:
    """Per outer step."""
    world = World(folder, REPLICAS)
    write_control(world.run.store, world.clock, steps=10_000)
    far = Far(world.run.store)
    object.__setattr__(world.run, "store", far)
    world.another()
    world.pass_time(60)
    world.cloud.begin(*sorted({slot for slot, _ in world.cloud.jobs}))
    world.pass_time(60)
    far.asked.clear()
    for t in range(steps):
        fill(far.store, t + 1, start=t)
        world.pass_time(STEP_S)
    found = Counter({what: n / steps for what, n in far.asked.items()})  # type: ignore[arg-type]
    assert world.outcome is None and not world.told("lost") and len(world.told("launched")) == REPLICAS
    return found  # type: ignore[return-value]


def replicas_requests(steps: int = 3) -> tuple[Counter[tuple[str, str]], float]:
    """Per replica and outer step, bodies and means too; and seconds per step."""
    inner, bench_scale.INNER["s3"] = bench_scale.INNER["s3"], INNER
    try:
        asked, seconds, _ = bench_scale.play(REPLICAS, steps, "s3", 0.3, 0.0)
    finally:
        bench_scale.INNER["s3"] = inner
    return Counter({what: n / REPLICAS for what, n in asked.items()}), seconds  # type: ignore[arg-type]


def test_a_fleet_asks_for_sixty_things_per_replica_and_step(tmp_path: Path) -> None:
    """About 160 before: the supervisor read everything each second, and each replica seven beats too many."""
    own, seconds = replicas_requests()
    supervisor = supervisors_requests(tmp_path)
    assert abs(seconds - STEP_S) < 2.0
    assert own.total() + supervisor.total() / REPLICAS <= 60.0, (own, supervisor)
    assert supervisor.total() / REPLICAS <= 10.0


def test_an_end_is_judged_by_all_there_is_and_a_stop_is_heard_within_a_beat() -> None:
    clock, asked = ManualClock(), list[Any]()
    looks = Looks(lambda focus: asked.append(focus) or asked, clock, 5.0)  # type: ignore[return-value]
    for _ in range(31):
        looks.report()
        clock.sleep(1.0)
    assert [f.control for f in asked] == [True] * len(asked) and 6 <= len(asked) <= 8
    assert [f.beats is None for f in asked].count(True) == 2
    looks.forget()
    looks.report()
    assert asked[-1].beats is None and asked[-1].sessions is None and asked[-1].supervisor


@pytest.mark.parametrize("beat_s", [0.0])
def test_a_store_of_this_machine_is_read_each_time(beat_s: float) -> None:
    asked = list[Any]()
    looks = Looks(lambda focus: asked.append(focus) or asked, ManualClock(), beat_s)  # type: ignore[return-value]
    for _ in range(3):
        looks.report()
    assert len(asked) == 3 and all(f.beats is None and f.sessions is None for f in asked)


if __name__ == "__main__":
    found, seconds = replicas_requests()
    with tempfile.TemporaryDirectory() as name:
        watched = supervisors_requests(Path(name))
    print(
        f"N = {REPLICAS}, {seconds:.1f} s a step: {found.total() + watched.total() / REPLICAS:.1f} per replica and step"
    )
    print(f"replica {found.total():.1f}:", ", ".join(f"{v} {k} {n:.1f}" for (v, k), n in found.most_common()))
    print(f"supervisor {watched.total():.1f}:", ", ".join(f"{v} {k} {n:.1f}" for (v, k), n in watched.most_common()))
