"""Replicas of several ranks: the number of ranks, and how they hold the model, change no bit of a run."""

from pathlib import Path

import pytest

from tests.support.ranks import run_fleet


def test_two(tmp_path: Path) -> None:
    one = run_fleet(tmp_path / "one", {"r00": 1, "r01": 1}, sync_every=4)
    two = run_fleet(tmp_path / "two", {"r00": 2, "r01": 2}, sync_every=4)
    three = run_fleet(tmp_path / "three", {"r00": 2, "r01": 3}, sync_every=4, kind="sharded")
    print(one, two, three)
    assert one == two
