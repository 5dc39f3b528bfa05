"""Three replicas with all three channels on, pairs from a local endpoint, one replica killed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reader import read_report
from diloco.runlog.summary import summary
from inner import Teacher, ToolWorld, TraceState, extract_dpo_pairs, replay_trace, save_pairs
from rendezvous.stores.open import open_store
from tests.support.audit import check_run
from tests.support.fleet import Fleet
from tests.support.teacher_server import Reply, TeacherServer, says

WORLD = ToolWorld(kinds=2, names=4)
INNER: dict[str, Any] = {
    "loop": "grpo",
    "model": "toolworld",
    "data": {"text": None},
    "batch_size": 16,
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 250},
    "sdpo": {"weight": 0.1},
    "replay": {"weight": 0.3, "pairs": "pairs.jsonl", "batch_size": 4},
}


def call(name: str, row: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps({"a": row["a"], "b": row["b"]})
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


def knows_the_names(body: dict[str, Any], n: int) -> Reply:
    kind, a, b = body["messages"][-1]["content"].removeprefix("op").split()
    return says("", tool_calls=[call(WORLD.right_name(int(kind)), {"a": int(a), "b": int(b)})])


def write_pairs(path: Path) -> int:
    """Write pairs from two teachers' actions where the student took a wrong name; return their number."""
    states = []
    for i, row in enumerate(WORLD.rows(24, seed=5)):
        right = WORLD.right_name(row["kind"])
        wrong = next(name for s in range(4) if (name := WORLD.name(row["kind"], s)) != right)
        arguments = json.dumps({"name": wrong, "arguments": {"a": row["a"], "b": row["b"]}})
        action = f"<tool_call>\n{arguments}\n</tool_call>"
        states.append(TraceState(state_id=f"s{i}", state_messages=row["prompt"], student_action=action))
    with TeacherServer(knows_the_names) as server:
        teachers = [Teacher(name, 1.0, 2.0, base_url=server.url, key_env=None) for name in ("m1", "m2")]
        actions = asyncio.run(replay_trace(states, teachers, 5.0, progress=False))
    pairs = extract_dpo_pairs(states, actions, agreement_threshold=2)
    save_pairs(pairs, path)
    return len(pairs)


def steps_told(root: Path) -> dict[str, list[dict[str, Any]]]:
    """session -> what its log says of each outer step."""
    told: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(root.glob("log/r*/*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        told.setdefault(path.parent.name, []).extend(e for e in events if e.get("event") == "step")
    return told


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_channels_on_every_replica_with_one_killed(tmp_path: Path) -> None:
    assert write_pairs(tmp_path / "pairs.jsonl") == 24
    fleet = Fleet(
        tmp_path,
        inner=INNER,
        outer={"sync_every": 2, "snapshot_every": 2},
        fleet={"steps": 4, "give_up_s": 120.0, "min_replicas": 3},
    )
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer@3")
    fleet.start("r02")
    fleet.wait_for(lambda: fleet.sessions["r01"][0].exitcode is not None)
    fleet.start("r01")
    codes = fleet.wait()
    assert codes["r00"] == codes["r02"] == [0] and codes["r01"] == [-9, 0], fleet.logs()

    root = Path(fleet.url)
    check_run(root, 4)  # θ bit-identical on every replica after every commit
    told = steps_told(root)
    assert {session.rpartition("-")[0] for session in told} == {"r00", "r01", "r02"}
    for slot in ("r00", "r01", "r02"):
        mine = [e for session, events in told.items() if session.startswith(slot) for e in events]
        for channel in ("grpo", "sdpo", "replay"):
            assert max(e.get(f"{channel}_coverage", 0.0) for e in mine) > 0, (slot, channel)
            assert max(e.get(f"{channel}_grad_norm", 0.0) for e in mine) > 0, (slot, channel)
    record = json.loads((root / "run.json").read_bytes())
    stored = root / record["files"]["pairs"]["key"]
    assert stored.read_bytes() == (tmp_path / "pairs.jsonl").read_bytes()
    assert "sdpo" in summary(read_report(open_store(fleet.url)))
