"""Runs a repository's tests inside the sandbox, and outputs the values that the tests look at.   Needs only pytest.

    run_test   one test ── pytest ──▶ [the value of each assertion's computed side, spelled], which the judge compares
    trace      all tests ──▶ for each: the same, its seconds, and the functions that it reached; for the generator

suite.py has replaced `assert f(x) == 3` by `__seen__(f(x))`, so the 3 is not here. A test that fails or is skipped
raises. `spell` writes any value as JSON: equal values have equal spellings. Objects are spelled as class and repr.

Not promised: that pytest's report is true, for the repository's code runs in the same process. Only the values count.
"""

import builtins
import hashlib
import io
import json
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

LONG = 2000  # characters; for a longer spelling its digest is output
WORDS = ("-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--capture=sys", "--rootdir", ".", "--maxfail=0",
         "--continue-on-collection-errors", "--import-mode=importlib")  # fmt: skip


def spell(value: Any, near: bool = False, depth: int = 0) -> Any:
    """Return a value as JSON.   near: floats with six digits, for pytest.approx."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        told = float(f"{value:.6g}") if near else float(value)
        return int(told) if told.is_integer() else {"float": repr(told)}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    if depth > 30:
        return {"deep": type(value).__name__}
    if isinstance(value, dict):
        value, kind = list(value.items()), "dict"
    else:
        kind = next((k.__name__ for k in (list, tuple, set, frozenset) if isinstance(value, k)), "")
    if not kind:
        told = repr(value)
        return {"class": type(value).__qualname__, "repr": "" if " at 0x" in told else told}
    parts = [spell(one, near, depth + 1) for one in value]
    return (
        parts
        if kind == "list"
        else {kind.removeprefix("frozen"): parts if kind == "tuple" else sorted(parts, key=text)}
    )


def text(spelled: Any) -> str:
    return json.dumps(spelled, sort_keys=True)


def short(spelled: Any) -> Any:
    """Return a spelling, or its digest if it is long."""
    told = text(spelled)
    return spelled if len(told) <= LONG else {"sha256": hashlib.sha256(told.encode()).hexdigest()}


class Watcher:
    """pytest's plugin.   wanted: [path, class, function, number] of the one test.   work: folder for trace files."""

    def __init__(self, wanted: Any = None, work: str = "") -> None:
        self.wanted, self.work, self.found, self.numbers, self.codes = wanted, work, [], {}, {}
        setattr(builtins, "__seen__", lambda value, near=False: self.now["seen"].append(short(spell(value, near))))  # noqa: B010

    def pytest_itemcollected(self, item: Any) -> None:
        """Number the item among its function's items, before options such as -m leave some items out."""
        path = str(Path(item.path).relative_to(Path.cwd()))
        name = getattr(item, "originalname", None) or item.name
        key = (path, item.cls.__qualname__ if getattr(item, "cls", None) else "", name)
        self.numbers[key] = number = self.numbers.get(key, -1) + 1
        item.deletion_key = [*key, number]

    def pytest_collection_modifyitems(self, items: Any) -> None:
        items[:] = [item for item in items if self.wanted in (None, item.deletion_key)]

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.now = {"key": item.deletion_key, "seen": [], "passed": True, "seconds": time.monotonic()}
        self.codes.clear()
        if self.work:
            sys.settrace(self.note)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.now["passed"] &= report.outcome == "passed"

    def pytest_runtest_logfinish(self) -> None:
        sys.settrace(None)
        mine = [code for code in self.codes.values() if self.work and code.co_filename.startswith(self.work)]
        reached = sorted({f"{code.co_filename.removeprefix(self.work)}:{code.co_qualname}" for code in mine})
        self.found.append({**self.now, "reached": reached, "seconds": time.monotonic() - self.now["seconds"]})

    def note(self, frame: Any, _event: str, _argument: Any) -> None:
        """Record a call of a Python function. Return None, so that Python does not trace the function's lines."""
        self.codes[id(frame.f_code)] = frame.f_code


def run_test(key: Any, source: str) -> Any:
    """Return the values that one test has seen.   Raises RuntimeError unless the test passes."""
    import pytest

    watcher = Watcher(wanted=key)
    Path(key[0]).parent.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(Path(key[0]).parent.absolute()))  # suites import helpers beside a test file
    Path(key[0]).write_text(source)
    pytest.main([*WORDS, "-o", "addopts=", key[0]], plugins=[watcher])
    if len(watcher.found) != 1 or not watcher.found[0]["passed"]:
        raise RuntimeError("the test did not pass")
    return watcher.found[0]["seen"]


def trace(words: Any, work: str) -> Any:
    """Run pytest with the arguments `words`. Return all tests that it finds, each with the values and functions that
    the watcher saw in it, and pytest's lines about errors."""
    import pytest

    sys.path += sorted({str(path.parent.absolute()) for path in Path().rglob("*test*.py")})
    watcher = Watcher(work=work)
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        pytest.main([*WORDS, *words], plugins=[watcher])
    errors = [line[1:].strip() for line in said.getvalue().splitlines() if line.startswith("E  ")]
    return {"tests": watcher.found, "errors": list(dict.fromkeys(errors))[:50]}
