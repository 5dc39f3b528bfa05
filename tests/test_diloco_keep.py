"""fleet.keep: what may be written there, what older configs meant, and what `plan` says of it."""

import json
from pathlib import Path

import pytest

from diloco.config import ConfigError, FleetConfig, RunConfig, keep_bytes
from diloco.footprint import footprint, lines
from diloco.launch import open_run, read_run
from rendezvous.clock import SystemClock
from tests.fleet import config


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


def test_the_sentence_says_what_stays_and_how_far_back_it_reaches(tmp_path: Path) -> None:
    """Of the run of issue 13: 0.5 B parameters, three replicas, fp32: 8 GB per step, 22 steps are 175 GB."""
    large = footprint(config(tmp_path, outer={"snapshot_every": 10}), 500_000_000, 3, 22)
    assert (large.each_step, large.each_snapshot) == (8 * 10**9, 4 * 10**9)
    assert large.needed == (3 * 4 + 21 * 2 + 12 * 6) * 10**9, (
        "snapshots, means since the older one, deltas since the newest"
    )
    small = footprint(config(tmp_path), 1_000_000, 3, 10_000)
    assert "what a replica may need, up to" in lines(large, 100, 20 * 10**9)[1]
    assert lines(small, 10_000, 20 * 10**9)[1].endswith("steps or more")
    assert "stay" not in lines(small, 10, None)[1]
