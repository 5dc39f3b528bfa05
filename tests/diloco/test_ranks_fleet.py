"""Real fleets whose replicas have several ranks: they learn, one is killed, and the run goes on."""

from pathlib import Path
from typing import Any

from tests.inner.test_toolworld import SMALL
from tests.support.fleet import Fleet

NO_TEXT = {"text": None, "context_length": 64}


def fleet_of(folder: Path, **changes: Any) -> Fleet:
    inner = {**SMALL, "loop": "grpo", "model": "toolworld", "batch_size": 8, "data": NO_TEXT}
    sections: dict[str, Any] = {"outer": {"sync_every": 2}, "fleet": {"replicas": 2, "steps": 3, "min_replicas": 2}}
    for name, table in changes.items():
        sections[name] = {**sections.get(name, {}), **table}
    return Fleet(folder, inner={**inner, **sections.pop("inner", {})}, **sections)


def test_grpo(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path)
    fleet.start("r00", TEST_DEVICES="2")
    fleet.start("r01", TEST_DEVICES="1")
    codes = fleet.wait()
    print(fleet.logs())
    assert codes == {"r00": [0], "r01": [0]}
