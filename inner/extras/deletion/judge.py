"""Defines a task, and judges it: compares results, as bytes, outside the sandbox with values that the code cannot see.

    for each hidden test   a fresh sandbox: the agent's files and this one test's program        inside.py
                           its output, byte for byte == canonical JSON of the expected value     here
    reward 1               every test of both sets passed; a flag changes nothing
    share                  the share of fail-to-pass tests that passed

    fail-to-pass   tests that fail without the feature     pass-to-pass   tests that pass without it and must still pass

The expected values never enter a sandbox, and no output is parsed here. To forge a pass, code must write the right
value, which it can only know by computing it. Not promised: that a value with few possibilities cannot be guessed
(generate.py refuses tests that expect true, false or null); that the tests cover the whole feature.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from inner.errors import InnerError
from inner.extras.deletion.sandbox import ALONE, Ended, SandboxLimits, Surroundings, run_sandboxed

CANARY = "serverless-diloco feature deletion 5b1f6a52-3c0e-4b9d-9f0e-7a8d2c41e6b7: do not train on these hidden tests"
GRADING = SandboxLimits(seconds=5.0, output=64 << 10)
SUITES = SandboxLimits(seconds=20.0, output=64 << 10)  # pytest starts first
AT_ONCE = 2  # sandboxes at the same time


@dataclass(frozen=True)
class HiddenTest:
    """`run` is a program that stores its value in `result`; if it raises, the value is {"raises": error class}."""

    name: str
    run: str
    expect: Any

    @property
    def expects_exception(self) -> bool:
        return isinstance(self.expect, dict) and set(self.expect) == {"raises"}


@dataclass(frozen=True)
class DeletionTask:
    """One task.   files: the repository without the feature (path → text).   solution: the original files."""

    name: str
    instruction: str
    files: Mapping[str, str]
    solution: Mapping[str, str]
    tests: Sequence[HiddenTest]
    fail_to_pass: Sequence[str]
    canary: str = CANARY
    around: Surroundings = ALONE

    def dump(self) -> str:
        """Return JSON for one column of a prompts file, without the solution, which no replica needs."""
        told = {**asdict(self), "solution": {}}
        return json.dumps({k: v for k, v in told.items() if k != "around" or self.around != ALONE}, sort_keys=True)


def load_task(text: str) -> DeletionTask:
    """Parse the text that `dump` returned.   Raises InnerError."""
    try:
        found = json.loads(text)
        found["around"] = Surroundings(**found.get("around", {}))
        return DeletionTask(**{**found, "tests": [HiddenTest(**test) for test in found["tests"]]})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InnerError(
            f"the column `task` is not a feature-deletion task ({error!r}: {text[:80]!r}). Make the prompts with "
            "`python -m inner.extras.deletion.generate`."
        ) from error


@dataclass(frozen=True)
class DeletionVerdict:
    """The result.   passed, failed: names of hidden tests.   flags: findings of the monitor and of the sandbox."""

    passed: frozenset[str]
    failed: frozenset[str]
    flags: tuple[str, ...] = ()

    @property
    def reward(self) -> float:
        return float(bool(self.passed) and not self.failed)

    def share(self, task: DeletionTask) -> float:
        """Return the share of fail-to-pass tests that passed; 0 if a pass-to-pass test failed.

        Also 0 if all tests that passed expect exceptions, because code that always raises would pass them."""
        back = {test.name: test for test in task.tests if test.name in task.fail_to_pass and test.name in self.passed}
        if self.failed - set(task.fail_to_pass) or all(test.expects_exception for test in back.values()):
            return 0.0
        return len(back) / len(task.fail_to_pass)


def judge(task: DeletionTask, files: Mapping[str, str], flags: Sequence[str] = ()) -> DeletionVerdict:
    """Run every hidden test on `files`.   flags: the monitor's findings."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(lambda test: run_hidden(files, test.run, task.around), task.tests))
    right = [end.output == canonical(test.expect) and not end.why for test, end in zip(task.tests, ended, strict=True)]
    names = [test.name for test in task.tests]
    passed = frozenset(name for name, is_right in zip(names, right, strict=True) if is_right)
    seen = {flag for end, is_right in zip(ended, right, strict=True) if not is_right for flag in _flags_of(end)}
    return DeletionVerdict(passed, frozenset(names) - passed, (*flags, *sorted(seen - set(flags))))


def run_hidden(files: Mapping[str, str], program: str, around: Surroundings) -> Ended:
    return run_sandboxed(files, program, SUITES if around.beside else GRADING, value=True, around=around)


def canonical(value: Any) -> bytes:
    """Return the one JSON spelling of a value: 1, 1.0 and true differ."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _flags_of(ended: Ended) -> list[str]:
    """Return flags for ends of a test's process that are rare for honest code: a limit, or no value."""
    if ended.why:
        return [ended.why]
    if not ended.output:
        return ["left without a value"]
    return ["memory limit"] if b'"MemoryError"' in ended.output else []
