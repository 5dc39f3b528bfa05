"""Paths of source files that pages name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("AGENTS.md", "CONTRIBUTING.md", "docs/internals/architecture.md")
EXAMPLES = ("executors/platforms/on_NAME.py",)  # what a reader would make
PATH = re.compile(r"`((?:diloco|executors|inner|rendezvous|tests|docs|examples)/[\w/.]+\.\w+)[ `]")


@pytest.mark.parametrize("page", PAGES)
def test_each_path_on_the_page_exists(page: str) -> None:
    found = [path for path in PATH.findall((ROOT / page).read_text()) if path not in EXAMPLES]
    assert found and [path for path in found if not (ROOT / path).exists()] == []


def test_a_path_names_its_folder() -> None:
    """`averaging.py` alone sends a reader to grep."""
    text = (ROOT / "docs/internals/architecture.md").read_text()
    assert re.findall(r"`\w+\.py`", text) == []
