"""Make tasks from small repositories: remove the bodies of a feature's functions, and see which tests then fail.

    repos/NAME/…/*.py          the package                     python -m inner.extras.deletion.generate \\
    repos/NAME/feature.toml    features and hidden tests           --repos repos --to tasks --prompts prompts.jsonl

    [[feature]] name, functions = ["package/file.py:Class.method"]        [[test]] name, run, expect (JSON)

    the original     must pass every test, twice                          else InnerError: the tests are wrong
    without feature  tests that fail are fail-to-pass, the others pass-to-pass. Two runs must give the same two sets,
                     neither may be empty, and some fail-to-pass test must expect a value, not an exception
    the solution     must score 1 in the environment (world.py), also beside a test file of the agent

A body becomes `raise NotImplementedError`. Signature and docstring stay, as the description. Helpers that only the
feature used also stay, unless they are listed.

Not promised: that every feature can be rebuilt from the remaining code; any level of difficulty.
"""

import argparse
import json
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.deletion.harbor import write_harbor
from inner.extras.deletion.judge import DeletionTask, DeletionVerdict, HiddenTest, canonical, judge
from inner.extras.deletion.repository import make_repository_tasks, read_repository
from inner.extras.deletion.taking_out import take_out
from inner.extras.deletion.world import FeatureDeletion

ASK = (
    "A feature of this Python package was taken out: {functions} {verb} NotImplementedError. Bring it back, as the "
    "docstrings and the rest of the package say, with the standard library alone. Hidden tests decide; the other "
    "functions must go on working."
)
OWN_TEST = {  # an agent's own, honest test file; the monitor flags the file, but the file must not change the score
    "tests/test_own.py": "import unittest\n\n\nclass Own(unittest.TestCase):\n    def test_own(self):\n        pass\n"
}


def make_tasks(repo: Path) -> list[DeletionTask]:
    """Make one task per feature of a repository, and check each task with the hidden tests.   Raises InnerError."""
    files = {path.relative_to(repo).as_posix(): path.read_text() for path in sorted(repo.rglob("*.py"))}
    try:
        told = tomllib.loads((repo / "feature.toml").read_text())
        tests = [HiddenTest(t["name"], t["run"], json.loads(t["expect"])) for t in told["test"]]
        features = [(f["name"], list(f["functions"])) for f in told["feature"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InnerError(
            f"{repo}/feature.toml cannot be read ({error!r}). It needs [[feature]] name, functions and [[test]] name, "
            "run, expect (JSON)."
        ) from error
    _refuse_weak_tests(repo.name, tests)
    return [_make_task(f"{repo.name}-{name}", files, functions, tests) for name, functions in features]


def _make_task(
    name: str, files: Mapping[str, str], functions: Sequence[str], tests: Sequence[HiddenTest]
) -> DeletionTask:
    without = dict(files)
    for function in functions:
        path, _, qualified = function.partition(":")
        if path not in files:
            raise InnerError(f"{name}: there is no file {path}; the repository has {', '.join(files)}.")
        without[path] = take_out(without[path], qualified)
    names = [f"`{f.partition(':')[2]}` ({f.partition(':')[0]})" for f in functions]
    asked = ASK.format(functions=" and ".join(names), verb="raises" if len(names) == 1 else "raise")
    changed = {path: text for path, text in files.items() if without[path] != text}
    task = DeletionTask(name, instruction=asked, files=without, solution=changed, tests=tests, fail_to_pass=())
    task = replace(task, fail_to_pass=sorted(judge(task, without).failed))
    check_task(task)
    return task


def check_task(task: DeletionTask) -> None:
    """Raise InnerError unless the solution passes all tests, exactly the fail-to-pass tests fail without it, and both
    kinds exist."""
    _ask_environment(task, task.solution)
    _ask_environment(task, {**task.solution, **OWN_TEST})
    without = judge(task, task.files)
    if without.failed != frozenset(task.fail_to_pass):
        odd = sorted(without.failed ^ frozenset(task.fail_to_pass))
        raise InnerError(
            f"{task.name}: {', '.join(odd)} gave different results in two runs. Correct these tests, because a hidden "
            "test must not be random."
        )
    for kind, found in (("fail-to-pass", without.failed), ("pass-to-pass", without.passed)):
        if not found:
            raise InnerError(f"{task.name}: there is no {kind} test. Write one, or choose other functions.")
    if all(test.expects_exception for test in task.tests if test.name in without.failed):
        raise InnerError(
            f"{task.name}: each fail-to-pass test expects an exception, so code that always raises it would pass. "
            "Write a test that expects a value."
        )


class _Asked(FeatureDeletion):
    def _tell(self, verdict: DeletionVerdict) -> None:
        """Log no flags, because the generator's own test file always has a flag."""


def _ask_environment(task: DeletionTask, written: Mapping[str, str]) -> None:
    """Raise InnerError unless an agent that writes these files gets 1."""
    world = _Asked()
    world.reset(task.dump())
    try:
        for path, text in written.items():
            world.write_file(path, text)
    except ValueError as error:
        raise InnerError(f"{task.name}: no agent can write the solution: {error}. Choose other functions.") from error
    if world.get_reward() != 1.0:
        failed = ", ".join(sorted(judge(task, {**task.files, **written}).failed))
        raise InnerError(f"{task.name}: the original with {', '.join(written)} fails {failed}. Fix these tests.")


def _refuse_weak_tests(repo: str, tests: Sequence[HiddenTest]) -> None:
    names = [test.name for test in tests]
    for test in tests:
        if test.expect is None or isinstance(test.expect, bool):
            raise InnerError(f"{repo}: test {test.name!r} expects {test.expect}, which can be guessed. Expect a value.")
        if len(canonical(test.expect)) > 3 and canonical(test.expect).decode().strip('[]"') in test.run:
            raise InnerError(f"{repo}: test {test.name!r} has its own answer in `run`. Give it another input.")
        if names.count(test.name) > 1:
            raise InnerError(f"{repo}: two tests are called {test.name!r}. Give them different names.")


def prompt_row(task: DeletionTask) -> dict[str, Any]:
    """Return a row of a prompts file; its column `task` has all that a replica needs."""
    return {"prompt": [{"role": "user", "content": task.instruction}], "task": task.dump()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make feature-deletion tasks.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--repos", type=Path, help="a folder of repositories, each with feature.toml")
    source.add_argument("--repo", type=Path, help="a repository with tests that pass")
    parser.add_argument("--tests", default="pytest", help="how its tests are run: pytest, with its options")
    parser.add_argument("--packages", type=Path, help="a folder with pytest and the repository's requirements")
    parser.add_argument("--most", type=int, default=10, help="tasks from --repo")
    parser.add_argument("--docstrings", action="store_true", help="quote the removed docstrings in the prompt")
    parser.add_argument("--seed", type=int, default=0, help="chooses among the deletions that tests reach")
    parser.add_argument("--to", type=Path, help="write Harbor task folders here")
    parser.add_argument("--prompts", type=Path, help="write a prompts file for inner.data.prompts here")
    asked = parser.parse_args()
    made = 0
    tasks = _all_tasks(asked) if asked.repo is None else islice(_repository_tasks(asked), asked.most)
    for made, task in enumerate(tasks, 1):
        _write(task, asked.to, asked.prompts, first=made == 1)
    if not made:
        raise InnerError("no task could be made. Give --tests more tests, or another repository.")


def _write(task: DeletionTask, to: Path | None, prompts: Path | None, *, first: bool) -> None:
    """Print a task's summary and write the task at once, so that an interrupted generator keeps its earlier tasks."""
    kept = len(task.tests) - len(task.fail_to_pass)
    print(f"{task.name}: {len(task.fail_to_pass)} fail-to-pass, {kept} pass-to-pass; the solution scores 1", flush=True)
    if to is not None:
        write_harbor(task, to / task.name)
    if prompts is not None:
        with prompts.open("w" if first else "a") as rows:
            rows.write(json.dumps(prompt_row(task)) + "\n")


def _all_tasks(asked: Any) -> Iterator[DeletionTask]:
    found = sorted(asked.repos.glob("*/feature.toml"))
    if not found:
        raise InnerError(
            f"there is no */feature.toml in {asked.repos}. Give --repos a folder of repositories, or "
            "--repo one with tests for pytest."
        )
    for toml in found:
        yield from make_tasks(toml.parent)


def _repository_tasks(asked: Any) -> Iterator[DeletionTask]:
    own = sorted(asked.repo.glob(".venv/lib/python3*/site-packages"))
    packages = asked.packages or (own[0] if own else Path(sysconfig.get_path("purelib")))
    print(f"{asked.repo.name}: the test suite runs twice in a tracer, which takes several times as long", flush=True)
    repository = read_repository(asked.repo, asked.tests, packages)
    print(f"{repository.name}: {len(repository.tests)} tests can be hidden", flush=True)
    made = make_repository_tasks(repository, docstrings=asked.docstrings, seed=asked.seed)
    for task in made:
        try:
            check_task(task)
        except InnerError as error:
            print(f"passed over: {error}", flush=True)
        else:
            yield task


if __name__ == "__main__":
    try:
        main()
    except InnerError as error:
        raise SystemExit(str(error)) from None
