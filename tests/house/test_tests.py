"""What can be left out stands in docs/internals/tests.md, with the command that runs it; a test uses its cases."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = (ROOT / "docs/internals/tests.md").read_text()
SKIPS = re.compile(r"importorskip|mark\.skipif|pytest\.skip\(")


def test_each_file_that_can_skip_is_listed_with_who_runs_it() -> None:
    files = {path.relative_to(TESTS).with_suffix("").as_posix(): path for path in TESTS.rglob("*.py")}
    able = {name for name, path in files.items() if SKIPS.search(path.read_text())} - {"house/test_tests"}
    table = PAGE.partition("## Tests that")[2].partition("\n## ")[0]
    listed = set(re.findall(r"\b\w+/(?:test_\w+|chromium|absent)\b", table))
    assert able - listed == set(), "say in docs/internals/tests.md what they need, and which command has it"
    assert {name for name in listed if not (TESTS / f"{name}.py").exists()} == set(), "they are gone"


def test_each_target_that_runs_tests_is_listed() -> None:
    targets = re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert {t for t in targets if t != "test" and t not in PAGE} == set()


def unused_parameters(source: str) -> Iterator[tuple[str, str]]:
    """Yield (test, parameter) for the parameters of `parametrize` that the test does not use: its cases are one."""
    for test in ast.walk(ast.parse(source)):
        if not isinstance(test, ast.FunctionDef):
            continue
        used = {node.id for line in test.body for node in ast.walk(line) if isinstance(node, ast.Name)}
        for mark in test.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith("parametrize"):
                names = ast.literal_eval(mark.args[0])
                names = names.split(",") if isinstance(names, str) else names
                yield from ((test.name, name) for name in names if name.strip() not in used)


def test_a_test_uses_its_parameters() -> None:
    tests = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    found = [(name, *one) for name, source in tests.items() for one in unused_parameters(source)]
    assert found == [], "all cases of the test are the same"
    line = '@pytest.mark.parametrize(("a", "b"), [(1, 2)])\ndef test_x(a, b):\n    assert a\n'
    assert [*unused_parameters(line)] == [("test_x", "b")]
