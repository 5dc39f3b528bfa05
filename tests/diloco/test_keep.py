"""fleet.keep: what may be written there, what older configs meant, and what `plan` says of it."""

import json
from math import ceil
from pathlib import Path

import pytest

from diloco.run.config import ConfigError, FleetConfig, RunConfig
from diloco.run.footprint import Footprint, footprint, lines
from diloco.run.founding import open_run
from diloco.run.record import read_run
from diloco.run.sections import keep_bytes
from rendezvous.clock import SystemClock
from tests.support.fleet import config


@pytest.mark.parametrize(
    ("keep", "size"),
    [("20 GB", 20 * 10**9), ("500 MB", 5 * 10**8), ("1.5GiB", 3 << 29), (1000, 1000), ("12 kB", 12_000), ("7", 7),
     ("all", None), ("window", 0), (0, 0)],
)  # fmt: skip
def test_a_size_a_word_or_a_number(keep: int | str, size: int | None) -> None:
    assert keep_bytes(keep) == size


@pytest.mark.parametrize("keep", ["", "20 gigs", "-1 GB", "everything", "1e9", "GB", "20 GB of it", -5])
def test_anything_else_is_refused_with_what_would_do(keep: int | str) -> None:
    with pytest.raises(ConfigError, match=r'fleet.keep = .* is not known. Use a size such as "20 GB"'):
        keep_bytes(keep)


@pytest.mark.parametrize("word", ["all", "window"])
def test_an_older_config_means_what_it_meant(word: str) -> None:
    assert RunConfig.from_dict({"fleet": {"retention": word}}).fleet.keep == word
    assert RunConfig.from_dict({"fleet": {}}).fleet.keep == FleetConfig().keep == "20 GB"
    with pytest.raises(ConfigError, match="some"):
        RunConfig.from_dict({"fleet": {"retention": "some"}})


def test_a_run_that_an_older_release_founded_can_be_read_and_resumed(tmp_path: Path) -> None:
    started = config(tmp_path)
    open_run(started, str(tmp_path / "run"), SystemClock())
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_bytes())
    del record["config"]["fleet"]["keep"]
    record["config"]["fleet"]["retention"] = "all"
    path.write_text(json.dumps(record, sort_keys=True, separators=(",", ":")))
    assert read_run(str(tmp_path / "run")).config.fleet.keep == "all"
    assert open_run(started, str(tmp_path / "run"), SystemClock()).resumed


def test_a_run_of_another_release_says_so(tmp_path: Path) -> None:
    """Before: "unknown setting", as if you had mistyped it; an actor of an older release ended with these words."""
    open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    path = tmp_path / "run" / "run.json"
    path.write_text(path.read_text().replace('"keep":', '"keeps":'))
    with pytest.raises(ConfigError, match=r"unknown setting fleet\.keeps.*Another release of .* started this run"):
        _ = read_run(str(tmp_path / "run")).config


def half_a_billion(folder: Path, keep: str | int, codec: str = "fp32", steps: int = 100) -> Footprint:
    """The footprint of the run of issue 13: 0.5 B parameters, three replicas, a snapshot every 10 steps."""
    started = config(folder, outer={"snapshot_every": 10, "codec": codec}, fleet={"keep": keep})
    return footprint(started, 500_000_000, 3, steps)


def test_the_sentence_says_what_stays_and_how_far_back_it_reaches(tmp_path: Path) -> None:
    """fp32: 8 GB per step, 22 steps are 175 GB."""
    large = half_a_billion(tmp_path, "window")
    assert (large.each_step, large.each_snapshot, large.period) == (8 * 10**9, 4 * 10**9, 10)
    assert large.needed == ceil((3 * 4 + 23 * 2 + 13 * 6) * 10**9 / 0.95), (
        "snapshots, means since the older one, deltas since the newest, and what dies with its replica"
    )
    small = footprint(config(tmp_path), 1_000_000, 3, 10_000)
    assert "that a replica may need, up to" in lines(large, 100, 0)[1]
    assert lines(small, 10_000, 20 * 10**9)[1].endswith("steps or more")
    assert "stay" not in lines(small, 10, None)[1]


@pytest.mark.parametrize(("keep", "period"), [("150 GB", 10), ("100 GB", 5), ("60 GB", 2), ("49 GB", 1)])
def test_a_smaller_budget_brings_snapshots_forward_and_the_sentence_says_so(
    tmp_path: Path, keep: str, period: int
) -> None:
    found, size = half_a_billion(tmp_path, keep), keep_bytes(keep) or 0
    assert found.period == period and found.needed <= size
    assert found.in_all == found.once + 100 * found.each_step + 100 // period * found.each_snapshot
    often = f"with a snapshot every {period} steps" if period > 1 else "with a snapshot at every step"
    assert f"at most {keep} of" in (text := lines(found, 100, size)[1]) and often in text


def test_below_the_floor_the_sentence_says_what_to_change(tmp_path: Path) -> None:
    """20 GB at 0.5 B in fp32: three snapshots of 4 GB, three steps of 8 and one of 10."""
    found = half_a_billion(tmp_path, "20 GB")
    assert (found.period, found.needed) == (1, ceil(46e9 / 0.95)) and found.needed == found.floor
    text = lines(found, 100, 20 * 10**9)[1]
    assert "that a replica may need, up to 48.4 GB" in text and 'fleet.keep = "48.5 GB" is the least' in text
    assert 'outer.codec = "int8" makes that 21.6 GB, which is still more' in text
    assert "makes that 21.6 GB, which fits" in lines(half_a_billion(tmp_path, "25 GB"), 100, 25 * 10**9)[1]
    assert "int8" not in lines(half_a_billion(tmp_path, "20 GB", "int8"), 100, 20 * 10**9)[1].partition(";")[2]
    assert half_a_billion(tmp_path, "25 GB", "int8").needed <= 25 * 10**9
