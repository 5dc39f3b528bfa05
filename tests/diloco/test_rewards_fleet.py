"""Fleets of three real replicas whose reward, hint or environment has bad moments: they reach their last step, and say
what happened while it happens."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import read_report
from executors.cli.looking.status import status_table
from rendezvous.stores.open import open_store
from tests.support.audit import check_run
from tests.support.fleet import Fleet
from tests.support.tables import merge_tables

REWARD = '''
import os, random, sys, time
from pathlib import Path
from inner.worlds.toolworld import ToolWorld

WORLD, HERE = ToolWorld(kinds=2, names=4), Path(os.environ["TEST_MARKS"])
calls = 0


def once(name):
    """True for the first caller of all processes."""
    try:
        (HERE / name).touch(exist_ok=False)
        return True
    except FileExistsError:
        return False


def score(completions, **columns):
    global calls
    calls += 1
    values = WORLD.reward(completions=completions, **columns)
    {body}
    return values
'''
INNER: dict[str, Any] = {
    "loop": "grpo",
    "model": "toolworld",
    "data": {"text": None},
    "batch_size": 16,
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 250},
    "rewards": {"function": "reward.py:score"},
}
RARELY = "if any(random.Random(f'{c} {calls}').random() < 0.04 for c in completions): raise ConnectionError('429')"
HANGS = "if calls == 3 and once('hung'): time.sleep(600)"
NAN = "if calls == 3 and once('nan'): values[2] = float('nan')"
ONE_SLOT_DOWN = "if calls > 3 and os.environ.get('TEST_DOWN'): raise ConnectionError('the judge is gone')"


def fleet_with(tmp_path: Path, body: str, min_replicas: int = 2, **inner: Any) -> Fleet:
    (tmp_path / "marks").mkdir()
    (tmp_path / "reward.py").write_text(REWARD.replace("{body}", body))
    os.environ["TEST_MARKS"] = str(tmp_path / "marks")  # publishing checks the reward in this process
    return Fleet(
        tmp_path, environ={"TEST_MARKS": str(tmp_path / "marks")}, inner=merge_tables(INNER, inner),
        outer={"sync_every": 2, "snapshot_every": 2},
        fleet={"steps": 6, "give_up_s": 120.0, "min_replicas": min_replicas},
    )  # fmt: skip


def status_of(fleet: Fleet) -> str:
    return "\n".join(status_table(read_report(open_store(fleet.url)), time.time()))


def status_says(fleet: Fleet, words: str) -> bool:
    return words in status_of(fleet)


def events(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    lines = [line for p in sorted(Path(fleet.url).glob("log/r*/*.jsonl")) for line in p.read_text().splitlines()]
    return [e for line in lines if (e := json.loads(line)).get("event") == kind and not e.get("rollouts")]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reward_that_raises_now_and_then_ends_nothing(tmp_path: Path) -> None:
    fleet = fleet_with(tmp_path, RARELY)
    fleet.start_all()
    assert fleet.wait(240.0) == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    check_run(Path(fleet.url), 6)
    assert any("ConnectionError: 429" in e["text"] for e in events(fleet, "reward_failed"))
    assert "ConnectionError: 429" in status_of(fleet)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reward_that_hangs_once_is_interrupted_and_status_says_so_while_it_waits(tmp_path: Path) -> None:
    fleet = fleet_with(tmp_path, HANGS, min_replicas=3, rewards={"timeout_s": 12.0})  # or two end the run meanwhile
    fleet.start_all()
    fleet.wait_for(lambda: status_says(fleet, "waits for the reward score, 4 s so far; interrupted after 12 s"), 200.0)
    assert fleet.wait(240.0) == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    check_run(Path(fleet.url), 6)
    assert "TimedOut: no answer within 12 s (0 of 16 completions are without a reward" in status_of(fleet)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reward_that_returns_nan_once_loses_one_completion_and_says_so(tmp_path: Path) -> None:
    fleet = fleet_with(tmp_path, NAN)
    fleet.start_all()
    assert fleet.wait(240.0) == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    check_run(Path(fleet.url), 6)
    assert [e["failed"] for e in events(fleet, "reward_failed")] == [1]
    assert sum(e.get("reward_missing", 0) for e in events(fleet, "step")) == 1
    assert "returned nan (1 of 16 completions are without a reward" in status_of(fleet)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_reward_that_is_gone_for_one_replica_costs_its_session_and_nobody_elses(tmp_path: Path) -> None:
    fleet = fleet_with(tmp_path, ONE_SLOT_DOWN, rewards={"retries": 0})
    fleet.start("r00")
    fleet.start("r01", TEST_DOWN="1")
    fleet.start("r02")
    codes = fleet.wait(240.0)
    assert codes == {"r00": [0], "r01": [exitcodes.NO_REWARD], "r02": [0]}, fleet.logs()
    assert "3 batches in a row" in fleet.log("r01").read_text() and "the judge is gone" in fleet.log("r01").read_text()
    check_run(Path(fleet.url), 6)


ENVIRONMENT = """
import os
from pathlib import Path
from inner.worlds.toolworld import ToolWorld

WORLD = ToolWorld(kinds=2, names=4)


class World(WORLD.environment()):
    def __init__(self):
        if (Path(os.environ["TEST_MARKS"]) / "away").exists():
            raise ConnectionError("the tool server does not answer")
        super().__init__()
        self.__class__.__name__ = "World"


def hint(row, error):
    raise KeyError("this column is not in every line")
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_hint_that_raises_costs_hints_and_a_tool_server_that_is_away_one_session(
    tmp_path: Path,
) -> None:
    (tmp_path / "world.py").write_text(ENVIRONMENT)
    fleet = fleet_with(tmp_path, "pass", sampling={"environment": "world.py:World"}, sdpo={"weight": 0.1})
    fleet.start("r00")
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.commit(0) is not None, 200.0)
    (tmp_path / "marks" / "away").touch()
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None, 100.0)
    (tmp_path / "marks" / "away").unlink()
    codes = fleet.wait(240.0)
    assert codes["r01"] == [exitcodes.CRASHED], "no exit 2: the files were right when the run began\n" + fleet.logs()
    assert codes["r00"] == codes["r02"] == [0], fleet.logs()
    assert any("KeyError" in e["text"] for e in events(fleet, "hint_failed"))
