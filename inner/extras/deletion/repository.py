"""Make tasks from a repository with passing tests: run its suite once traced, and take out what tests reach.

    python -m inner.extras.deletion.generate --repo DIR --tests 'pytest tests' --packages FOLDER --prompts prompts.jsonl

    DIR ──▶ code · suite ──▶ each test in its hidden form (suite.py) ──▶ one run, traced: values, functions reached
    a function, a method or a whole module that a test reaches ──▶ its body is gone ──▶ the tests that reach it, again
        fail without it, also if it returns None; pass with it; and strong (suite.py)   fail-to-pass
        pass without it                                        pass-to-pass, and further tests that do not reach it
    generate.py check_task ──▶ the environment gives the solution 1

FOLDER has pytest and the packages that the repository needs (`pip install --target FOLDER pytest …`), without the
repository itself. FOLDER is mounted read-only. Everything runs in the sandbox, the first run, too.

Not promised: tests that need a process, a thread, a socket, a file outside the suite, or more than 1 s; they are left
out. Only text files are read.
"""

import ast
import importlib.metadata
import json
import random
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.deletion.judge import AT_ONCE, DeletionTask, HiddenTest, canonical, run_hidden
from inner.extras.deletion.sandbox import WORK, SandboxLimits, Surroundings, checked_path, run_sandboxed
from inner.extras.deletion.suite import TestKey, hide_answers, is_strong, program_of, trace_program
from inner.extras.deletion.taking_out import GONE, Deletion, functions_of, take_out
from inner.extras.deletion.world import MOST_TEXT

TRACED = SandboxLimits(seconds=600, memory=2 << 30, output=256 << 20, tmp=256 << 20, tmp_files=10_000)
LONGEST_S = 1.0  # seconds; a test that takes longer in the traced run is left out
LARGEST = 400_000  # characters of a file
TEST_FOLDERS = {"tests", "test", "testing"}
LEFT_OUT = {"docs", "doc", "examples", "benchmarks", "build", "dist", "node_modules", "venv", "setup.py", "noxfile.py"}
SETTINGS = {"pytest.ini", "pyproject.toml", "setup.cfg", "tox.ini"}
RUNNER = (Path(__file__).parent / "inside_suite.py").read_text()
MOST_TESTS = 5  # at most so many tests of each kind in a task


@dataclass(frozen=True)
class TracedTest:
    """One test.   file: the text of its file.   seen: values that it checks.   reached: functions, as path:function."""

    key: TestKey
    file: str
    seen: list[Any]
    reached: frozenset[str]

    @cached_property
    def hidden(self) -> HiddenTest:
        path, within, name, number = self.key
        name = "::".join(part for part in (path, within, f"{name}[{number}]") if part)
        return HiddenTest(name, program_of(self.key, hide_answers(self.file, self.key)), self.seen)

    @property
    def is_strong(self) -> bool:
        return is_strong(self.seen, hide_answers(self.file, self.key))


@dataclass(frozen=True)
class Repository:
    """A repository.   code: path -> text.   tests: the tests that pass twice with the same values."""

    name: str
    code: Mapping[str, str]
    around: Surroundings
    tests: Sequence[TracedTest]


def read_repository(folder: Path, tests: str, packages: Path) -> Repository:
    """Trace the suite of a repository.   tests: "pytest", and options of pytest after it.   Raises InnerError."""
    words = shlex.split(tests)
    if words[:1] != ["pytest"]:
        raise InnerError(f"--tests must be `pytest` with its options, found {tests!r}. Other runners do not work.")
    code, suite = _read_files(folder)
    _refuse_copies(code, packages)
    roots = ["src", ""] if any(path.startswith("src/") for path in code) else [""]
    beside = {path: text for path, text in suite.items() if not _is_test(path)} | {"inside_suite.py": RUNNER}
    requires = [f"{d.name}=={d.version}" for d in importlib.metadata.distributions(path=[str(packages)])]
    around = Surroundings(roots, str(packages.resolve()), sorted(requires), beside)
    files = {path: text for path, text in suite.items() if _is_test(path) and _parses(text)}
    return Repository(folder.name, code, around, _trace(code, files, around, words[1:]))


def _read_files(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return (code, suite): path -> text."""
    code, suite = dict[str, str](), dict[str, str]()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
        parts = path.relative_to(folder).parts
        if LEFT_OUT & set(parts) or any(part.startswith(".") or part.endswith(".egg-info") for part in parts):
            continue
        try:
            name, text = checked_path("/".join(parts)), path.read_text(encoding="utf-8")
        except ValueError:
            continue
        if len(text) > LARGEST:
            continue
        if TEST_FOLDERS & set(parts[:-1]) or _is_test(name) or name in SETTINGS or parts[-1] == "conftest.py":
            suite[name] = text
        elif path.suffix == ".py" or (path.parent / "__init__.py").is_file():
            code[name] = text
    return code, suite


def _is_test(path: str) -> bool:
    name = path.rpartition("/")[2]
    return (name.startswith("test_") and name.endswith(".py")) or name.endswith("_test.py")


def _parses(text: str) -> bool:
    """Whether this Python can parse the text: suites contain files for older versions, and files that are only data."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _refuse_copies(code: Mapping[str, str], packages: Path) -> None:
    """Raise InnerError if the folder of packages has a file of the repository, which would be the solution."""
    mine = {path.rpartition("/")[2]: _heads(text) for path, text in code.items()}
    for path in packages.rglob("*.py"):
        heads = mine.get(path.name, set())
        if len(heads) > 1 and len(heads & _heads(path.read_text(errors="replace"))) > len(heads) / 2:
            raise InnerError(
                f"{path} is a copy of the repository's {path.name}: the solution. Give --packages without it."
            )


def _heads(text: str) -> set[str]:
    return {line for line in text.splitlines() if line.lstrip().startswith(("def ", "class ", "async def "))}


def _trace(
    code: Mapping[str, str], files: Mapping[str, str], around: Surroundings, words: Sequence[str]
) -> list[TracedTest]:
    """Run the suite as it is, and in its hidden form, whose assertions record values instead of comparing them."""
    found = _run_suite(code, files, around, words)
    hidden = {path: hide_answers(text) for path, text in files.items()}
    seen = {key: test["seen"] for key, test in _run_suite(code, hidden, around, words).items()}
    return [
        TracedTest(key, files[key[0]], seen[key], frozenset(test["reached"]))
        for key, test in found.items()
        if key in seen and key[0] in files
    ]


def _run_suite(
    code: Mapping[str, str], files: Mapping[str, str], around: Surroundings, words: Sequence[str]
) -> dict[TestKey, dict[str, Any]]:
    """Return key -> trace of each test that passes.   Raises InnerError if no test passes.

    Use the addopts of the repository's settings: they may leave out slow tests. If no test runs with the addopts, run
    without them: they may need a plugin that is not installed.
    """
    everything = replace(around, beside={**around.beside, **files})
    traced = _traced(code, everything, words)
    if not traced["tests"]:
        traced = _traced(code, everything, ["-o", "addopts=", *words])
    if found := {tuple(t["key"]): t for t in traced["tests"] if t["passed"] and t["seconds"] <= LONGEST_S}:
        return found
    missing = [line for line in traced["errors"] if line.startswith("ModuleNotFoundError")]
    seen = "; ".join((missing or traced["errors"])[:5])
    advice = "Give --packages a folder with what it needs, and --tests the tests that need no network"
    if not seen:
        seen, advice = "pytest found none", "Give --tests a folder of tests; archives of PyPI often leave them out"
    raise InnerError(f"no test of the suite passed in the sandbox: {seen}. {advice}.")


def _traced(code: Mapping[str, str], around: Surroundings, words: Sequence[str]) -> dict[str, Any]:
    ended = run_sandboxed(code, trace_program(words, f"{WORK}/"), TRACED, value=True, around=around)
    if ended.why == "time limit":
        raise InnerError(
            f"the traced suite took more than {TRACED.seconds:.0f} s. Name a part of it, as in "
            "--tests 'pytest tests/test_one.py', or leave out a test that waits for ever, with --deselect."
        )
    try:
        return json.loads(ended.output)
    except ValueError as error:
        raise InnerError(
            f"pytest could not be traced: {ended.why} {ended.output[-300:]!r}. Is it in --packages?"
        ) from error


def propose(repository: Repository, seed: int) -> Iterator[Deletion]:
    """Yield deletions that at least one test reaches, of files that an agent can write, in the seed's order."""
    reached = {place for test in repository.tests for place in test.reached}
    found = list[Deletion]()
    for path, text in repository.code.items():
        if any(place.startswith(f"{path}:") for place in reached) and len(text) <= MOST_TEXT:
            names = [name for name in functions_of(text) if f"{path}:{name}" in reached]
            found += [Deletion(path, (name,)) for name in names]
            found += [Deletion(path, tuple(names))] if len(names) > 1 else []
    random.Random(seed).shuffle(found)
    yield from found


def make_repository_tasks(repository: Repository, *, docstrings: bool, seed: int) -> Iterator[DeletionTask]:
    """Yield tasks; deletions without both kinds of tests are passed over."""
    solo = _Solo(repository)
    for deletion in propose(repository, seed):
        if (task := _make_task(repository, deletion, solo, docstrings)) is not None:
            yield task


class _Solo:
    """A cache of the results of single tests on the original code."""

    def __init__(self, repository: Repository) -> None:
        self._repository, self._good = repository, dict[TestKey, bool]()

    def good(self, tests: Sequence[TracedTest]) -> list[TracedTest]:
        """Return the tests that see the same values when they run alone as they saw among the other tests."""
        new = [test for test in tests if test.key not in self._good]
        failed = run_all(self._repository.code, new, self._repository.around)
        self._good |= {test.key: test.key not in failed for test in new}
        return [test for test in tests if self._good[test.key]]


def run_all(code: Mapping[str, str], tests: Sequence[TracedTest], around: Surroundings) -> set[TestKey]:
    """Return the keys of the tests that do not see their expected values."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda test: run_hidden(code, test.hidden.run, around), tests))
    return {test.key for test, end in zip(tests, ended, strict=True) if end.output != canonical(test.seen)}


def _make_task(repository: Repository, deletion: Deletion, solo: _Solo, docstrings: bool) -> DeletionTask | None:
    without = dict(repository.code)
    for name in deletion.functions:
        without[deletion.path] = take_out(without[deletion.path], name, docstring=False)
    places = {f"{deletion.path}:{name}" for name in deletion.functions}
    near = sorted((t for t in repository.tests if t.reached & places), key=lambda t: (len(t.reached), t.key))
    strong = solo.good(list(islice((test for test in _spread(near) if test.is_strong), MOST_TESTS)))
    failed = run_all(without, strong, repository.around)
    idle = {path: text.replace(GONE, "return None") for path, text in without.items()}
    strong = [t for t in strong if t.key not in failed or t.key in run_all(idle, [t], repository.around)]
    far = [test for test in repository.tests if not test.reached & places]
    far = sorted(far, key=lambda t: (-len({p for p in t.reached if p.startswith(f"{deletion.path}:")}), t.key))
    kept = [test for test in strong if test.key not in failed] + solo.good(_spread(far)[:MOST_TESTS])
    fail, kept = [test for test in strong if test.key in failed], kept[:MOST_TESTS]
    kept = [test for test in kept if test.key not in run_all(without, kept, repository.around)]
    if not fail or not kept:
        return None
    return DeletionTask(
        f"{repository.name}-{deletion.name}", instruction=deletion.ask(repository.code[deletion.path], docstrings),
        files=without, solution={deletion.path: repository.code[deletion.path]},
        tests=[test.hidden for test in (*fail, *kept)], fail_to_pass=sorted(t.hidden.name for t in fail),
        around=repository.around,
    )  # fmt: skip


def _spread(tests: Sequence[TracedTest]) -> list[TracedTest]:
    """Return the tests, reordered: first one test of each test function, then a second test of each, …"""
    by_function = defaultdict[Any, list[TracedTest]](list)
    for test in tests:
        by_function[test.key[:3]].append(test)
    most = max(map(len, by_function.values()), default=0)
    return [group[n] for n in range(most) for group in by_function.values() if n < len(group)]
