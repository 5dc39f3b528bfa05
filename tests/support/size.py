"""Numbers of a house: how much of it there is, and how its parts hang together.

    python -m tests.support.size [ROOT=.]       the table of docs/internals/size.md, of any checkout of this project

    files ─▶ lines by room · the fullest folder · the longest file and function
    imports between modules (not those for type checking) ─▶ arrows between wings, circles
    classes and functions ─▶ the most methods, and functions that one place calls

A wing is a folder of a room.  An arrow: a module of one wing imports a module of another; both ways: of two wings that
import each other.  Circles: groups of modules that import each other, imports inside functions included.

Not promised: calls through a table or getattr; a function that only those reach counts as called from nowhere.
"""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import networkx

ROOMS = ("rendezvous", "inner", "diloco", "executors")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_trees(root: Path) -> dict[Path, ast.Module]:
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return {path.relative_to(root): ast.parse(path.read_text()) for path in files}


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported(tree: ast.Module, modules: set[str]) -> set[str]:
    """The modules of ours that this one imports, but for type checking."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update(one for a in node.names for one in (f"{node.module}.{a.name}", node.module))
        for child in ast.iter_child_nodes(node):
            walk(child)

    walk(tree)
    leaves = {one for one in found if one in modules}
    return {one for one in leaves if not any(other.startswith(one + ".") for other in leaves)}


def wing_of(module: str, path: Path) -> str:
    return ".".join(path.parts[: min(2, len(path.parts) - 1)])


def methods(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, sum(isinstance(one, FUNCTIONS) for one in node.body)


def called_once(trees: dict[Path, ast.Module], root: Path) -> tuple[int, int]:
    """-> private functions that one place names beside their definition, and all private ones."""
    names = Counter(chain.from_iterable(re.findall(r"\w+", (root / path).read_text()) for path in trees))
    private = [
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS) and node.name.startswith("_") and not node.name.startswith("__")
    ]
    return sum(names[name] == 2 for name in private), len(private)


def numbers(root: Path) -> dict[str, str]:
    trees = read_trees(root)
    lines = {path: (root / path).read_text().count("\n") for path in trees}
    paths = {module_of(path): path for path in trees}
    graph = {name: imported(trees[path], set(paths)) - {name} for name, path in paths.items()}
    wings = {(wing_of(a, paths[a]), wing_of(b, paths[b])) for a in graph for b in graph[a]}
    arrows = {(a, b) for a, b in wings if a != b}
    arrows_of = networkx.DiGraph([(a, b) for a in graph for b in graph[a]])
    folders = Counter(path.parent for path in trees)
    spans = [node.end_lineno - node.lineno + 1 for tree in trees.values() for node in ast.walk(tree)
             if isinstance(node, FUNCTIONS) and node.end_lineno]  # fmt: skip
    per_class = list(chain.from_iterable(map(methods, trees.values())))
    once, private = called_once(trees, root)
    rooms: dict[str, int] = defaultdict(int)
    for path, count in lines.items():
        rooms[path.parts[0]] += count
    fullest, files = folders.most_common(1)[0]
    return {
        "source lines": f"{sum(lines.values()):,} ({', '.join(f'{room} {rooms[room]:,}' for room in ROOMS)})",
        "modules, folders": f"{len(trees)}, {len(folders)}",
        "most files in a folder": f"{files} ({fullest})",
        "longest file, function": f"{max(lines.values())}, {max(spans)} lines",
        "arrows between wings": str(len(arrows)),
        "of them both ways": str(sum((b, a) in arrows for a, b in arrows) // 2),
        "circles of modules": str(sum(len(group) > 1 for group in networkx.strongly_connected_components(arrows_of))),
        "classes above 20 methods": str(sum(count > 20 for _, count in per_class)),
        "private functions called once": f"{once} of {private}",
    }


if __name__ == "__main__":
    here = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    print("| | |\n|---|---|")
    for name, value in numbers(here).items():
        print(f"| {name} | {value} |")
