"""The outputs that docs/from-the-notes.md prints are those of its commands. The digests of Monarch's example are
compared where Monarch is (tests/inner/test_monarch.py)."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/from-the-notes.md").read_text()
COUNTS = re.compile(r"pytest (?:-q )?((?:tests/\S+\.py ?)+)`(?: reports|:) (\d+) passed(?:, (\d+) skipped)?")


def test_the_numbers_of_tests_on_the_page_are_those_of_its_files(pytestconfig: pytest.Config) -> None:
    """They were those of the day on which each row was written."""
    told = [(m[1].split(), int(m[2]) + int(m[3] or 0)) for m in COUNTS.finditer(PAGE)]
    assert len(told) >= 5
    files = {name for names, _ in told for name in names}
    found: Mapping[str, int] = pytestconfig.stash[COLLECTED]
    found = found if files <= found.keys() else collected(files)  # this file alone was asked for
    assert [(names, sum(found.get(name, 0) for name in names)) for names, _ in told] == told


def collected(files: set[str]) -> dict[str, int]:
    words = ["-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", *sorted(files)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    said = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    return {name: int(n) for name, n in re.findall(r"^(tests/\S+\.py): (\d+)$", said.stdout, re.M)}


def test_the_generators_output_on_the_page_is_that_of_the_shipped_tasks() -> None:
    rows = (ROOT / "examples/feature_deletion/prompts.jsonl").read_text().splitlines()
    lines = list[str]()
    for task in (json.loads(json.loads(row)["task"]) for row in rows):
        fail, kept = len(task["fail_to_pass"]), len(task["tests"]) - len(task["fail_to_pass"])
        lines.append(f"{task['name']}: {fail} fail-to-pass, {kept} pass-to-pass; the solution scores 1\n")
    assert "prompts.jsonl\n" + "".join(lines) + "```" in PAGE
