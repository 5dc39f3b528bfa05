"""The main job, whole: `diloco demo` in a process of its own, with real GRPO replicas and a real kill -9."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.audit import check_run


@pytest.mark.slow
@pytest.mark.demo
def test_the_demo_does_what_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "executors.cli.main", "demo", "--run", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=170,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = check_run(tmp_path / "run", 12)
    assert len(found.listed) >= 30
    logs = [p for p in tmp_path.glob("run/log/*/*.jsonl") if not p.name.endswith(".rollouts.jsonl")]
    events = [json.loads(line) for p in logs for line in p.read_text().splitlines()]
    assert [e["slot"] for e in events if e["event"] == "killed"] == ["r01"]
    last = [e["reward"] for e in events if e["event"] == "step" and e["step"] == 11]
    first = [e["reward"] for e in events if e["event"] == "step" and e["step"] == 0]
    assert sum(last) / len(last) >= 0.9 and sum(first) / len(first) < 0.2
    assert (tmp_path / "run" / "report.png").stat().st_size > 10_000
    assert "</main>" in (tmp_path / "run" / "report.html").read_text()
