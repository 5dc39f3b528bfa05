"""Replicas of several ranks: the number of ranks, and how they hold the model, change no bit of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from diloco.runlog.reader import read_report
from rendezvous.stores.open import open_store
from tests.support.ranks import run_fleet, start, wait, words

slow = pytest.mark.slow


# -------------------------------------------------------------------- (a), (b): equal bits


@pytest.mark.parametrize(
    ("kind", "outer"),
    [
        ("", {"codec": "fp32"}),
        ("sharded", {"codec": "int8", "fragments": 2}),
        pytest.param("", {"codec": "int8", "outer_lr": "auto"}, marks=slow),
        pytest.param("sharded", {"codec": "fp32", "fragments": 2, "outer_lr": 1.0, "outer_momentum": 0.0}, marks=slow),
        pytest.param("sharded", {"codec": "topk"}, marks=slow),
        pytest.param("sharded bfloat16", {"codec": "int4", "fragments": 2}, marks=slow),
        pytest.param("sharded", {"fragment_update_alpha": 0.5, "fragment_sync_delay": 1}, marks=slow),
        pytest.param(
            "bfloat16", {"fragment_update_alpha": 0.25, "fragment_sync_delay": 1, "fragments": 2}, marks=slow
        ),
    ],
    ids=str,
)
def test_two_slots_of_two_ranks_are_two_slots_of_one(kind: str, outer: Mapping[str, Any], tmp_path: Path) -> None:
    settings = {"kind": kind, "sync_every": 6, **outer}
    one = run_fleet(tmp_path / "one", {"r00": 1, "r01": 1}, **settings)
    two = run_fleet(tmp_path / "two", {"r00": 2, "r01": 2}, **settings)
    assert one == two and one["r00"] == one["r01"] and len(set(one["r00"])) == 3
    offers = [offered(tmp_path / name) for name in ("one", "two")]
    assert offers[0] == offers[1] and len(offers[0]) == 3, "the bytes in the bucket are the same"


def offered(folder: Path) -> list[list[str]]:
    """The digests of the pseudogradients that each commit counts."""
    records = [json.loads(path.read_bytes()) for path in sorted((folder / "run/steps").glob("*/commit.json"))]
    return [sorted(offer["digest"] for offer in record["offers"]) for record in records]


@pytest.mark.parametrize("kind", ["sharded", pytest.param("sharded bfloat16", marks=slow)])
def test_slots_of_one_two_and_three_ranks_hold_the_same_bits(kind: str, tmp_path: Path) -> None:
    found = run_fleet(tmp_path / "mixed", {"r00": 1, "r01": 2, "r02": 3}, kind=kind, sync_every=4)
    assert found["r00"] == found["r01"] == found["r02"] and len(set(found["r00"])) == 3


def test_a_slot_of_two_ranks_that_missed_steps_offers_late_and_catches_up(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    commit = folder / "steps/0000000002/commit.json"
    settings: dict[str, Any] = {"replicas": 2, "min_replicas": 1, "steps": 5, "sync_every": 4, "kind": "sharded"}
    ahead = start(tmp_path, "r00", 1, **settings)
    late = start(tmp_path, "r01", 2, faults=f"wait 6 {commit}", **settings)
    assert wait(ahead) == wait(late) == 0, words(tmp_path)
    ends = [json.loads((tmp_path / f"{slot}.json").read_text())[-1] for slot in ("r00", "r01")]
    report = read_report(open_store(f"file://{folder}"))
    assert ends[0] == ends[1] and report.head == 5 and [e["missed"] for e in report.of_kind("caught_up")]
