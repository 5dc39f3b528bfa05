"""Examples and benchmarks import names of the four rooms that exist: only slow tests, or a person, run most of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.house.test_rules import ROOMS, ROOT


def names_in(module: Path) -> set[str]:
    """Return the names that a module may have: those that its code binds outside functions, and lazily loaded ones."""
    found = set[str]()
    todo: list[ast.AST] = [ast.parse(module.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # the keys of a table that __getattr__ reads
    return found


def imports_of(script: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) for each `from module import name` of the rooms."""
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ROOMS:
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_there(module: str, name: str) -> bool:
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    part = path / name
    return part.is_dir() or part.with_suffix(".py").is_file() or (source.is_file() and name in names_in(source))


def test_what_examples_and_benchmarks_import_is_there() -> None:
    """Before: a function had moved, and `modal run examples/modal_grpo.py` ended in an ImportError."""
    scripts = [*(ROOT / "examples").rglob("*.py"), *(ROOT / "tests" / "benchmarks").rglob("*.py")]
    asked = [(script, *one) for script in scripts for one in imports_of(script)]
    assert len(asked) > 100
    assert not [f"{script.relative_to(ROOT)}: {m}.{name}" for script, m, name in asked if not is_there(m, name)]
