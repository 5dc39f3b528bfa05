"""Real fleets whose replicas have several ranks: they learn, one is killed, one hangs, and the run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import Report, read_report
from diloco.views.samples import session_samples
from rendezvous.agreement.membership import newest_claim
from rendezvous.stores.open import open_store
from tests.diloco.test_eval_fleet import INNER, write_files
from tests.inner.test_toolworld import SMALL
from tests.support.audit import check_run
from tests.support.fleet import ENDLESS, WAIT_S, Fleet
from tests.support.rank_channels import write_pairs

PLAIN = {**SMALL, "loop": "grpo", "model": "toolworld", "data": {"text": None, "context_length": 64}}
QUICK = {"batch_size": 8, "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 60}}
LORA = {"lora": {"r": 4}, "lr": 1e-2}


def report_of(fleet: Fleet) -> Report:
    return read_report(open_store(fleet.url))


def logged(fleet: Fleet, slot: str, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted(Path(fleet.url).glob(f"log/{slot}-*/*.jsonl")) for line in path.open()]
    return [event for event in map(json.loads, lines) if event.get("event") == kind]


def test_a_replica_of_two_ranks_takes_its_steps(tmp_path: Path) -> None:
    """With "#" in TMPDIR, the ranks waited for each other for ever."""
    (folder := tmp_path / "a #b").mkdir()
    fleet = Fleet(
        tmp_path,
        inner={**PLAIN, **QUICK},
        outer={"sync_every": 1},
        fleet={"replicas": 1, "steps": 1, "min_replicas": 1},
    )
    fleet.start("r00", TEST_DEVICES="2", TMPDIR=str(folder))
    assert fleet.wait() == {"r00": [0]}, fleet.logs()
    assert [event["samples"] for event in logged(fleet, "r00", "step")] == [16.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "ranks"), [({}, {}), ({}, {"TEST_SHARD": "1"}), (LORA, {})], ids=["replicated", "sharded", "lora"]
)
def test_a_replica_of_two_ranks_trains_and_evaluates_beside_one_of_one(
    inner: dict[str, Any], ranks: dict[str, str], tmp_path: Path
) -> None:
    write_files(tmp_path, held_out=15)
    fleet = Fleet(
        tmp_path, inner={**INNER, **QUICK, **inner}, outer={"sync_every": 2},
        fleet={"replicas": 2, "steps": 2, "min_replicas": 2}, eval={"prompts": "held_out.jsonl", "samples": 1},
    )  # fmt: skip
    fleet.start("r00", TEST_DEVICES="2", **ranks)
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    check_run(tmp_path / "run", 2)
    report = report_of(fleet)
    steps = [(slot, event["samples"]) for slot in ("r00", "r01") for event in logged(fleet, slot, "step")]
    assert steps == [("r00", 32.0), ("r00", 32.0), ("r01", 16.0), ("r01", 16.0)]
    scores = [(e.step, kind, e.scores[kind]["reward"].prompts) for e in report.evaluations for kind in e.scores]
    assert scores == [(t, kind, 15) for t in (0, 2) for kind in ("greedy", "sampled")]
    assert session_samples(open_store(fleet.url), "r00", 1, 100), "rank 0's rollouts are in the log"


REPLAY = {"weight": 0.3, "pairs": "pairs.jsonl", "batch_size": 2}
OWN_WORLD = """
import os

from inner import ToolWorld

WORLD = ToolWorld(kinds=2, names=4)
World = WORLD.environment()


def hint(row, error):
    if os.environ.get("RANK") == "1" and row["a"] % 4 == 3:
        raise ValueError("no hint for this one")
    return WORLD.hint(row, error) if os.environ.get("RANK") == "1" else None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inner", "ranks"),
    [
        ({}, {}),
        ({}, {"TEST_SHARD": "1"}),
        (LORA, {}),
        ({**LORA, "optimizer": "muon"}, {}),
        ({"sdpo": {"weight": 0.1, "context": "rollout"}}, {"TEST_SHARD": "1"}),
        ({"sampling": {"environment": "world.py:World"}}, {}),
        ({"sampling": {"environment": "world.py:World"}}, {"TEST_SHARD": "1"}),
    ],
    ids=str,
)
def test_a_replica_of_two_ranks_distils_and_learns_from_pairs(
    inner: dict[str, Any], ranks: dict[str, str], tmp_path: Path
) -> None:
    """In the last two, only rank 1 has hints, and some of them fail."""
    (tmp_path / "world.py").write_text(OWN_WORLD)
    write_pairs(tmp_path / "pairs.jsonl")
    fleet = Fleet(
        tmp_path, inner={**PLAIN, **QUICK, "sdpo": {"weight": 0.1}, "replay": REPLAY, **inner},
        outer={"sync_every": 3}, fleet={"replicas": 2, "steps": 3, "min_replicas": 2},
    )  # fmt: skip
    fleet.start("r00", TEST_DEVICES="2", **ranks)
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    check_run(tmp_path / "run", 3)
    steps = logged(fleet, "r00", "step")
    assert all(step["replay_coverage"] == 1.0 for step in steps)
    assert any(step["sdpo_coverage"] > 0 and step["loss/sdpo_kl"] > 0 for step in steps)


@pytest.mark.slow
def test_a_slot_with_the_channels_comes_back_with_another_number_of_ranks(tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    fleet = Fleet(
        tmp_path, inner={**PLAIN, **QUICK, "sdpo": {"weight": 0.1}, "replay": REPLAY}, outer={"sync_every": 2},
        fleet={"replicas": 2, "steps": 6, "min_replicas": 2},
    )  # fmt: skip
    fleet.start("r00", TEST_DEVICES="2", TEST_SHARD="1")
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.head() >= 2)
    fleet.signal("r00", signal.SIGKILL)
    fleet.start("r00")
    assert fleet.wait() == {"r00": [-signal.SIGKILL, 0], "r01": [0]}, fleet.logs()
    check_run(tmp_path / "run", 6)
    samples = [event["samples"] / event["h"] for event in logged(fleet, "r00", "step") if event["h"]]
    assert samples[0] == 16.0 and samples[-1] == 8.0  # in an inner step: of two ranks, of one


@pytest.mark.slow
def test_a_replica_of_two_ranks_leaves_with_its_work(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path, inner={**PLAIN, **QUICK}, outer={"sync_every": 8},
        fleet={"replicas": 1, "steps": ENDLESS, "min_replicas": 1},
    )  # fmt: skip
    slot = fleet.start("r00", TEST_DEVICES="2")
    fleet.wait_for(lambda: fleet.training("r00", 1))
    ranks = Path(f"/proc/{slot.pid}/task/{slot.pid}/children").read_text().split()
    fleet.signal("r00", signal.SIGTERM)
    assert fleet.wait() == {"r00": [exitcodes.LEFT]}, fleet.logs()
    session = report_of(fleet).sessions[0]
    assert session.end == "left" and len(ranks) == 1 and not Path(f"/proc/{ranks[0]}").exists()
    assert fleet.store.list(f"steps/{fleet.head():010d}/offer/"), "the inner steps since the last sync are offered"


HANGS = """
import os, time

calls = 0

def score(completions, **columns):
    global calls
    calls += 1
    while os.environ.get("RANK") == "1" and calls in (3, 4):
        time.sleep(.05)
    return [float(len(c[-1]["content"])) for c in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tries", "end", "code"), [({}, "hung", exitcodes.HUNG), ({"retries": 1}, "done", 0)])
def test_a_rank_that_hangs_ends_its_session_unless_its_reward_is_tried_again(
    tries: dict[str, Any], end: str, code: int, tmp_path: Path
) -> None:
    """The reward's limit is 4 s for a call, below the session's 6 s, and two calls take more."""
    write_files(tmp_path)
    (tmp_path / "rewards.py").write_text(HANGS)
    rewards = {**INNER["rewards"], **tries, "timeout_s": 4.0 if tries else 0.0}
    fleet = Fleet(
        tmp_path, inner={**INNER, "batch_size": 8, "rewards": rewards}, outer={"sync_every": 2},
        fleet={"replicas": 1, "steps": 4, "min_replicas": 1, "hung_after_s": 6.0},
    )  # fmt: skip
    fleet.start("r00", TEST_DEVICES="2")
    assert fleet.wait() == {"r00": [code]}, fleet.logs()
    assert report_of(fleet).sessions[0].end == end
    stands = fleet.log("r00").read_text().partition("rank 1 stands here:\n")[2]
    assert ("rewards.py" in stands and " in score" in stands) == (end == "hung"), "rank 0 waits in an all_gather"
    told = [event["where"].partition("; rank 0: ") for event in logged(fleet, "r00", "hung")]
    assert [first.startswith("rank 1: ") and " score" in first for first, *_ in told] == [True] * (end == "hung")
    assert end != "hung" or fleet.log("r00").read_text().splitlines()[-1].startswith("r00: no inner step for")


AWAY = """
import os

def score(completions, **columns):
    if os.environ.get("RANK") in {ranks}:
        raise ConnectionError("the judge is away")
    return [float(len(c[-1]["content"])) for c in completions]
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [("1",), ("0", "1")])
def test_a_rank_without_rewards_is_told_and_only_a_replica_without_any_ends(ranks: Any, tmp_path: Path) -> None:
    write_files(tmp_path)
    (tmp_path / "rewards.py").write_text(AWAY.format(ranks=ranks))
    rewards = {**INNER["rewards"], "retries": 0}
    fleet = Fleet(
        tmp_path, inner={**INNER, "batch_size": 8, "rewards": rewards}, outer={"sync_every": 2},
        fleet={"replicas": 1, "steps": 2, "min_replicas": 1},
    )  # fmt: skip
    fleet.start("r00", TEST_DEVICES="2")
    ends = {1: exitcodes.DONE, 2: exitcodes.NO_REWARD}
    assert fleet.wait() == {"r00": [ends[len(ranks)]]}, fleet.logs()
    told = [event["text"] for event in logged(fleet, "r00", "reward_failed")]
    assert any(text.startswith("rank 1: score: ") and "the judge is away" in text for text in told), told
    ended = [event["error"] for event in logged(fleet, "r00", "crashed")]
    assert len(ended) == len(ranks) - 1 and all(text.startswith("RewardFailed: the reward score") for text in ended)


CONFIG = """[inner]
model = "toolworld"
batch_size = 8
[outer]
sync_every = 2
[fleet]
replicas = 2
min_replicas = 2
steps = {steps}
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slot_whose_rank_is_killed_is_replaced_by_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG.format(steps=8))
    command = [sys.executable, "-m", "executors.cli", "train", "run.toml", "--run", "runs/a", "--executor", "local"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    train = subprocess.Popen([*command, "--option", "devices=2"], env=env)
    store = open_store(f"file://{tmp_path}/runs/a")
    until = time.monotonic() + WAIT_S
    while store.get("steps/0000000001/commit.json") is None and time.monotonic() < until:
        time.sleep(0.02)
    claim = newest_claim(store, "r00")
    assert claim is not None
    ranks = [int(pid) for pid in Path(f"/proc/{claim.pid}/task/{claim.pid}/children").read_text().split()]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    assert train.wait(WAIT_S) == exitcodes.DONE
    report = read_report(store)
    assert report.done and report.head == 8
    assert [x.name for x in report.sessions if x.name.startswith("r00")] == ["r00-1", "r00-2"]
    (told,) = report.of_kind("crashed")
    assert told["error"] == "rank 1 of 2 ended (killed by SIGKILL); the replica ends with it"
    assert not Path(f"/proc/{claim.pid}").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_learn_as_one_does_with_twice_the_batch(tmp_path: Path) -> None:
    ends: dict[str, list[float]] = {}
    for name, ranks, batch in (("one", 1, 32), ("two", 2, 16)):
        (tmp_path / name).mkdir()
        fleet = Fleet(
            tmp_path / name, inner={**PLAIN, "batch_size": batch}, outer={"sync_every": 4},
            fleet={"replicas": 1, "steps": 12, "min_replicas": 1},
        )  # fmt: skip
        fleet.start("r00", TEST_DEVICES=str(ranks))
        assert fleet.wait(400) == {"r00": [0]}, fleet.logs()
        ends[name] = [event["reward"] for event in logged(fleet, "r00", "step")]
    for rewards in ends.values():
        assert sum(rewards[-3:]) / 3 > rewards[0] + 0.25
    assert abs(sum(ends["one"][-3:]) - sum(ends["two"][-3:])) / 3 < 0.15
