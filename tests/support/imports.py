"""What a local GRPO run imports, in all its processes, and what of that it never uses.

    measure(folder)      diloco train ─▶ fork server ─▶ replicas      each under a trace hook
                         module executors/cli/main.py                 which appends each code object once to one file
                         function executors/cli/main.py main

    python -m tests.support.imports      the table of docs/internals/size.md: a line per wing

idle: a module that defines functions, of which none ran.  A package's file of fewer than five lines is no module here.

Not promised: the same number twice; a function that runs for a lost request, or after a minute, may run or not.
"""

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("diloco", "executors", "inner", "rendezvous")
PACKAGE_LINES = 5  # a package's file below that only says what the package is
HOOK = """import os, sys, threading
_root = os.environ["DILOCO_TRACE_ROOT"] + "/"
_rooms = tuple(_root + room + "/" for room in os.environ["DILOCO_TRACE_ROOMS"].split())
_to = os.open(os.environ["DILOCO_TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_seen = set()
def _note(frame, event, argument):
    if event != "call" or frame.f_code in _seen:
        return
    _seen.add(frame.f_code)
    code = frame.f_code
    if code.co_filename.startswith(_rooms):
        kind = "module" if code.co_name == "<module>" else "function"
        if kind == "module" or code.co_flags & 1 and not code.co_name.startswith("<"):  # 1: no class body
            os.write(_to, f"{kind} {code.co_filename[len(_root):]} {code.co_qualname}\\n".encode())
sys.settrace(_note)
threading.settrace(_note)
"""
CONFIG = """[inner]
model = "toolworld"
toolworld.warm_start_steps = 1
batch_size = 8
[outer]
sync_every = 2
[fleet]
replicas = 2
steps = 2
"""
HEAD = """| wing | source lines | imported lines | modules | executed functions | idle modules |
|---|---|---|---|---|---|"""
TRAIN = "import sys; from executors.cli.main import main; sys.exit(main(['train', 'grpo.toml', '--run', 'runs/a']))"


@dataclass(frozen=True)
class Imports:
    """What the processes of one run imported.   lines: of each module.   functions: how many of its functions ran."""

    lines: Mapping[str, int]
    functions: Mapping[str, int]
    idle: tuple[str, ...]

    @property
    def modules(self) -> int:
        return len(self.lines)

    @property
    def total(self) -> int:
        return sum(self.lines.values())


def measure(folder: Path) -> Imports:
    """Train two outer steps on two replicas in `folder`, an empty one, and return what that imported."""
    (folder / "sitecustomize.py").write_text(HOOK)
    (folder / "grpo.toml").write_text(CONFIG)
    trace = folder / "trace"
    env = {
        **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},  # it imports more
        "DILOCO_TRACE": str(trace),
        "DILOCO_TRACE_ROOT": str(ROOT),
        "DILOCO_TRACE_ROOMS": " ".join(ROOMS),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
    }
    done = subprocess.run([sys.executable, "-c", TRAIN], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the run ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return read_trace(trace.read_text().splitlines())


def read_trace(trace: Iterable[str]) -> Imports:
    """Read what the hook wrote."""
    modules = set[str]()
    ran = defaultdict[str, set[str]](set)
    for entry in trace:
        kind, path, name = entry.split(" ", 2)
        if kind == "module":
            modules.add(path)
        else:
            ran[path].add(name)
    lines = {path: count for path in sorted(modules) if (count := _lines(path)) >= PACKAGE_LINES or not _package(path)}
    idle = tuple(path for path in lines if path not in ran and _defines_functions(path))
    return Imports(lines, {path: len(ran[path]) for path in lines}, idle)


def _lines(path: str) -> int:
    return len((ROOT / path).read_text().splitlines())


def _package(path: str) -> bool:
    return path.endswith("/__init__.py")


def _defines_functions(path: str) -> bool:
    tree = ast.parse((ROOT / path).read_text())
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(tree))


def table(found: Imports) -> str:
    """A line per wing: what it has, what the run imports of it, and what of that it uses."""
    sources = [str(path.relative_to(ROOT)) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    columns: tuple[Counter[str], ...] = (
        Counter[str](),  # source lines
        Counter[str](),  # imported lines
        Counter[str](),  # imported modules
        Counter[str](),  # executed functions
        Counter[str](),  # idle modules
    )
    for path in sources:
        wing, imported = _wing(path), path in found.lines
        numbers = (_lines(path), found.lines.get(path, 0), imported, found.functions.get(path, 0), path in found.idle)
        for column, number in zip(columns, numbers, strict=True):
            column[wing] += number
    rows = [(f"`{wing}`", *(column[wing] for column in columns)) for wing in sorted(columns[0])]
    rows.append(("**all**", *(column.total() for column in columns)))
    return "\n".join([HEAD, *("| " + " | ".join([row[0], *(f"{n:,}" for n in row[1:])]) + " |" for row in rows)])


def _wing(path: str) -> str:
    """The folder below the room; for a room's own files the room."""
    return "/".join(path.split("/")[:-1][:2])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        answer = measure(Path(place))
    print(table(answer))
    for one in sorted(answer.idle, key=lambda path: -answer.lines[path]):
        print(f"idle {answer.lines[one]:4d} {one}", file=sys.stderr)
