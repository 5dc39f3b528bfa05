"""What a plain local GRPO run imports: bars that only go down.

The goal is 25,000 lines in 150 modules, and none of which no function runs.  `python -m tests.support.imports` prints
where they are, and which modules are idle.  What is optional is imported where it is asked for.
"""

from pathlib import Path

from tests.support.absent import HAS_TORCHFT
from tests.support.imports import measure

MOST_LINES, MOST_MODULES, MOST_IDLE = 25_000, 150, 0  # 2026-11-26: 24,991, 141, 0; at first 41,893, 276, 81


def test_a_local_grpo_run_imports_little_that_it_does_not_use(tmp_path: Path) -> None:
    found = measure(tmp_path)
    assert found.total <= MOST_LINES + 120 * (not HAS_TORCHFT)  # streaming.py takes its place
    assert found.modules <= MOST_MODULES
    assert len(found.idle) <= MOST_IDLE, found.idle
