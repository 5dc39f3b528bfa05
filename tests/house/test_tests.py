"""No test is in no list: what can be left out stands in docs/internals/tests.md, with the command that runs it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs/internals/tests.md").read_text()
SKIPS = re.compile(r"importorskip|mark\.skipif|pytest\.skip\(")


def test_each_file_that_can_skip_is_listed_with_who_runs_it() -> None:
    files = {path.relative_to(TESTS).with_suffix("").as_posix(): path for path in TESTS.rglob("*.py")}
    able = {name for name, path in files.items() if SKIPS.search(path.read_text())} - {"house/test_tests"}
    table = PAGE.partition("## Tests that")[2].partition("\n## ")[0]
    listed = set(re.findall(r"\b\w+/(?:test_\w+|chromium)\b", table))
    assert able - listed == set(), "say in docs/internals/tests.md what they need, and which command has it"
    assert {name for name in listed if not (TESTS / f"{name}.py").exists()} == set(), "they are gone"


def test_each_target_that_runs_tests_is_listed() -> None:
    targets = re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {t for t in targets if t != "test" and t not in PAGE} == set()
