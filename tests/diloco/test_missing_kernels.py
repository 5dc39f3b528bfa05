"""A replica whose machine has no C compiler says so, once, in its log and in the run's events."""

import json
from pathlib import Path

from tests.support.fleet import Fleet


def test_a_machine_without_a_compiler_is_told_with_what_it_costs(tmp_path: Path) -> None:
    """Before: three times as long per sync, and not a word."""
    fleet = Fleet(tmp_path, fleet={"replicas": 1, "steps": 2})
    fleet.start("r00", CC="no-such-compiler", XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert fleet.wait() == {"r00": [0]}
    lines = [line for path in Path(fleet.url).glob("log/r*/*.jsonl") for line in path.read_text().splitlines()]
    said = [event["text"] for event in map(json.loads, lines) if event.get("kind") == "kernels"]
    assert len(said) == 1 and "there is no C compiler" in said[0] and "three times as long" in said[0]
    assert fleet.logs().count("three times as long") == 1
