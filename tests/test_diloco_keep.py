"""fleet.keep: what may be written there, what older configs meant, and what `plan` says of it."""

import json
from pathlib import Path

import pytest

from diloco.config import ConfigError, FleetConfig, OuterConfig, RunConfig, keep_bytes
from diloco.launch import open_run, read_run
from diloco.sizing import footprint, kept_words
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


def test_bytes_per_step_are_what_the_replicas_write() -> None:
    """Against the run of issue 13: 0.5 B parameters, three replicas, fp32: 8 GB per step, 22 steps are 175 GB."""
    outer = OuterConfig()
    each = footprint(500_000_000, 3, outer)
    assert (each.deltas, each.mean, each.snapshot) == (6 * 10**9, 2 * 10**9, 4 * 10**9)
    small = footprint(500_000_000, 3, outer, "int4")
    assert 0.7e9 < small.deltas < 0.8e9 and 0.25e9 < small.mean < 0.26e9
    assert footprint(100_000, 2, OuterConfig(codec="int8")).mean == 0, "two deltas of int8 are less than a mean of fp32"


def test_the_sentence_says_how_far_back_the_budget_reaches() -> None:
    assert "8.0 GB in the bucket and a snapshot 4.0 GB; what a replica needs" in kept_words(
        500_000_000, 3, OuterConfig(), "20 GB"
    )
    assert "reaches back about" in kept_words(1_000_000, 3, OuterConfig(), "20 GB")
    assert kept_words(100_000, 3, OuterConfig(), "all").endswith("all of it stays (fleet.keep = all)")
