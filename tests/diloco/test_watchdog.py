"""An inner step that never ends: noticed, named, ended, replaced; and no replica is accused that is only slow."""

import threading
from pathlib import Path
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.process.watchdog import Watchdog, where_it_stands
from diloco.run.config import ConfigError, FleetConfig, RunConfig
from diloco.runlog.reader import Reader
from executors.supervision.grace import FINISH_S, finish_s
from inner.settings.inner import InnerConfig
from rendezvous.records.records import Beat
from tests.support.audit import check_run
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet

LEAST_S = 60.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def stepping(clock: ManualClock, *durations: float) -> Watchdog:
    """A watchdog that has seen inner steps of these durations, and whose next one has begun."""
    dog = Watchdog(clock, LEAST_S)
    for seconds in durations:
        dog.resume()
        clock.sleep(seconds)
        dog.rest()
    dog.resume()
    assert dog.look(1.0) is None, "the first look only begins to count"
    return dog


@pytest.mark.parametrize(
    ("durations", "limit"),
    [
        ((), 3 * LEAST_S),  # the first step may compile, download, start an engine
        ((1.0, 1.0, 1.0), LEAST_S),
        ((20.0, 20.0, 20.0), 200.0),
        ((100.0, 1.0, 1.0, 1.0), 300.0),  # rollouts in one step of four
    ],
)
def test_the_limit_follows_the_steps_that_were_seen(
    clock: ManualClock, durations: tuple[float, ...], limit: float
) -> None:
    dog = stepping(clock, *durations)
    assert dog.limit_s == limit
    assert dog.look(limit) is None and dog.look(1.0) == limit + 1.0


def test_a_sync_is_no_inner_step(clock: ManualClock) -> None:
    dog = stepping(clock, 1.0)
    dog.rest()
    assert [dog.look(1000.0) for _ in range(3)] == [None, None, None]
    clock.sleep(5000.0)
    dog.resume()
    assert dog.limit_s == LEAST_S and dog.look(1.0) is None


def test_every_step_begins_a_new_count(clock: ManualClock) -> None:
    dog = stepping(clock, 1.0)
    for _ in range(20):
        assert dog.look(LEAST_S - 1) is None
        dog.rest()
        dog.resume()
        assert dog.look(LEAST_S - 1) is None


def test_zero_means_never(clock: ManualClock) -> None:
    dog = Watchdog(clock, 0.0)
    dog.resume()
    assert dog.look(1.0) is None and dog.look(1e9) is None


def test_it_names_the_line_where_the_main_thread_stands() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(where_it_stands()))
    thread.start()
    thread.join()
    assert "test_watchdog.py" in found[0] and "test_it_names_the_line" in found[0]


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
def test_a_limit_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"fleet.hung_after_s = .* must be at least 0"):
        FleetConfig(hung_after_s=value)


@pytest.mark.parametrize(
    ("own", "sampling", "limit"),
    [
        (600.0, {}, 600.0),
        (600.0, {"tool_timeout_s": 30.0, "environment_timeout_s": 300.0}, 600.0),
        (600.0, {"environment_timeout_s": 900.0}, 1800.0),
        (100.0, {"tool_timeout_s": 80.0}, 160.0),
        (0.0, {"environment_timeout_s": 900.0}, 0.0),
    ],
)
def test_a_call_within_its_own_limit_does_not_end_the_session(
    own: float, sampling: dict[str, Any], limit: float
) -> None:
    """A `get_reward` that may take 900 s ended its session after 600 s, and the next session too."""
    sampling = {"environment": "world.py:World", **sampling}
    inner = InnerConfig(model="gpt2", data={"prompts": "rows.jsonl"}, sampling=sampling)
    assert RunConfig(inner=inner, fleet=FleetConfig(hung_after_s=own)).hung_after_s == limit


@pytest.mark.parametrize(
    ("phase", "step", "rate", "seconds"),
    [
        ("train", 9, 0.5, 20.0 + 1.5),  # in the inner steps of a step that was decided without it
        ("train", 9, 60.0, 20.0 + 180.0),
        ("train", 9, 600.0, FINISH_S),
        ("train", 10, 0.5, FINISH_S),  # its last step is taken: it writes its goodbye
        ("wait", 9, 0.5, FINISH_S),  # it applies what was decided without it
        ("left", 10, 0.5, 20.0),
    ],
)
def test_only_who_writes_gets_the_long_wait_at_the_end(phase: str, step: int, rate: float, seconds: float) -> None:
    beat = Beat(slot="r00", generation=1, n=9, phase=phase, step=step, inner=3, rate=rate, at=0.0)
    assert finish_s(beat, steps=10, usual=20.0) == seconds


def test_a_replica_whose_inner_step_hangs_ends_with_words_and_its_successor_goes_on(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, outer={"sync_every": 20}, fleet={"hung_after_s": 4.0})
    fleet.start("r00")
    fleet.start("r01", die="hang:30")  # in the middle of its second round
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None)
    assert fleet.sessions["r01"][0].exitcode == exitcodes.HUNG
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [exitcodes.HUNG, 0], "r02": [0]}, fleet.logs()
    check_run(tmp_path / "run", 6)
    told = fleet.log("r01").read_text()
    assert "no inner step for" in told and "victim.py" in told and "Thread 0x" in told
    events = [e for e in Reader(fleet.store).refresh().events if e["event"] == "hung"]
    assert len(events) == 1 and events[0]["inner"] >= 1 and "victim.py" in events[0]["where"]
