"""Each replica reads its own share of the prompts, and so does the one that takes its place; the log says which."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from inner.data.order import Share, prompt_order
from tests.inner.test_toolworld import SMALL, WORLD
from tests.support.fleet import Fleet

REWARD = """
import os

def score(completions, number, **columns):
    with open(os.environ["READ"], "a") as file:
        print(*number, file=file)
    return [float(len(str(c)) % 7) for c in completions]
"""
ROWS = 24
PER_STEP = 2  # groups of 8 completions


def founded(folder: Path, **sections: Any) -> Fleet:
    (folder / "rewards.py").write_text(REWARD)
    rows = [{**row, "number": n} for n, row in enumerate(WORLD.rows(ROWS, seed=3))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    inner = {
        **SMALL, "loop": "grpo", "model": "toolworld", "batch_size": 8 * PER_STEP,
        "data": {"prompts": "prompts.jsonl", "text": None, "context_length": 64},
        "rewards": {"function": "rewards.py:score"}, "sampling": {"num_generations": 8},
    }  # fmt: skip
    return Fleet(folder, environ={"READ": str(folder / "published")}, inner=inner, **sections)


def rows_read(path: Path) -> list[int]:
    """In order, each once per group."""
    return [int(n) for line in path.read_text().splitlines() for n in line.split()[::8]]


@pytest.mark.slow
@pytest.mark.parametrize("outer", [{"sync_every": 1}, {"sync_every": 64, "sync_seconds": 0.01}])
def test_two_replicas_and_a_replacement_read_every_prompt_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outer: dict[str, Any]
) -> None:
    monkeypatch.setenv("READ", str(tmp_path / "published"))
    fleet = founded(tmp_path, outer=outer, fleet={"replicas": 2, "steps": ROWS // (2 * PER_STEP), "min_replicas": 2})
    fleet.start("r00", READ=str(tmp_path / "r00"))
    fleet.start("r01", die="after:create:/offer/@2", READ=str(tmp_path / "r01"))
    fleet.wait_for(lambda: fleet.commit(1))  # with its offer; for the next it must come back
    fleet.start("r01", READ=str(tmp_path / "r01 again"))
    codes = fleet.wait()
    assert codes["r00"] == [0] and codes["r01"] == [-9, 0], fleet.logs()

    said = data_events(fleet)
    assert [(e["share"], e["of"]) for e in said["r00"]] == [(0, 2)]
    assert [(e["share"], e["of"]) for e in said["r01"]] == [(1, 2), (1, 2)]
    assert [e["inner_step"] for e in said["r01"]] == [0, 2], "two outer steps of one inner step each have counted"
    for slot, sessions in said.items():
        for event, name in zip(sessions, (slot, f"{slot} again"), strict=False):
            at = prompt_order(ROWS, Share(event["seed"], event["share"], event["of"]))
            read = rows_read(tmp_path / name)
            first = event["inner_step"] * PER_STEP
            assert read == [at(first + i) for i in range(len(read))]
    epoch = (ROWS // 2, ROWS // 2)
    assert set(rows_read(tmp_path / "r00")[: epoch[0]]).isdisjoint(rows_read(tmp_path / "r01")[: epoch[1]])


def data_events(fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    said = defaultdict[str, list[dict[str, Any]]](list)
    for path in sorted(Path(fleet.url).glob("log/r*/*.jsonl")):
        for event in map(json.loads, path.read_text().splitlines()):
            if event.get("event") == "data":
                said[path.parent.name.partition("-")[0]].append(event)
    return said
