"""The rules of CONTRIBUTING.md that a machine can check, over the source of all four rooms.

a public class name means one class · four things by position at most six · functions of at most 60 lines
a class of at most 22 methods, but for those in LARGE, each with its reason · folders of at most 14 files
no circle of files, also not through imports inside functions · Namespace is known in executors/cli alone, by verbs
every tensor that rendezvous and diloco make names its dtype and its device · every Python that we start has -P
"""

import ast
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

from torch.utils._device import _device_constructors

ROOT = Path(__file__).parents[2]
ROOMS = ("diloco", "executors", "inner", "rendezvous")
MOST_METHODS, MOST_LINES, MOST_POSITIONAL, MOST_FILES = 22, 60, 6, 14
LARGE = {
    "ModalExecutor": "21 methods are a platform's interface, and Modal answers nearly all in its own way",
    "Rendezvous": "the protocol on one page, from claim to finish; its parts are objects that it calls",
    "StoreManager": "the surface of a torchft.Manager, whose names are not ours",
}
CALLS_BY_POSITION = {"_encode", "_add"}  # Triton kernels


@cache
def _trees() -> list[tuple[Path, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in paths]


def test_a_public_class_name_means_one_class() -> None:
    homes = defaultdict[str, list[str]](list)
    for path, tree in _trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


def test_no_class_grows_into_two_things() -> None:
    large = {
        node.name: count
        for _, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (count := sum(isinstance(b, ast.FunctionDef | ast.AsyncFunctionDef) for b in node.body)) > MOST_METHODS
    }
    assert set(large) <= set(LARGE), f"split it, or say in LARGE why it is one thing: {large}"
    assert set(LARGE) <= set(large), "take out of LARGE what is small by now"


def test_functions_fit_on_a_page() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    ]
    assert not long


def test_many_arguments_go_by_keyword() -> None:
    calls = [
        f"{path}:{node.lineno} {ast.unparse(node)[:80]}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL and _called(node) not in CALLS_BY_POSITION
    ]
    assert not calls


def _called(call: ast.Call) -> str:
    """The last name of the callee; for `kernel[grid](...)` the kernel's."""
    target = call.func.value if isinstance(call.func, ast.Subscript) else call.func
    return target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")


def test_rooms_are_wings_and_no_flat_folders() -> None:
    """`executors` has none but wings; no folder of any room has more files than a reader takes in at once."""
    assert [p.name for p in (ROOT / "executors").glob("*.py")] == ["__init__.py"]
    files = Counter(path.parent for path, _ in _trees())
    assert {str(folder): count for folder, count in files.items() if count > MOST_FILES} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Every import counts, also one inside a function; but for those under TYPE_CHECKING, which never happen."""
    homes = {_module_name(path): (path, tree) for path, tree in _trees()}
    arrows = {name: _imported_files(name, path, tree, set(homes)) for name, (path, tree) in homes.items()}
    circles = [sorted(circle) for circle in _circles(arrows)]
    assert circles == []


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_files(name: str, path: Path, tree: ast.Module, files: set[str]) -> set[str]:
    """The files of the four rooms that a file imports, wherever in it."""
    never = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = set[str]()
    for node in ast.walk(tree):
        if id(node) in never:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports name their room here"
            full = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {whole if whole in files else str(node.module) for whole in full.values()}
    return (found & files) - {name}


def _circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of files that reach each other."""
    reach = {name: set[str]() for name in arrows}
    for name in arrows:
        todo = list(arrows[name])
        while todo:
            if (one := todo.pop()) not in reach[name]:
                reach[name].add(one)
                todo += arrows[one]
    circles = list[set[str]]()
    for name in sorted(arrows):
        if name in reach[name] and not any(name in circle for circle in circles):
            circles.append({other for other in reach[name] if name in reach[other]})
    return circles


def test_namespace_is_known_in_the_command_line_alone() -> None:
    """What was typed leaves a verb as a request of its own kind; argparse's Namespace has any field, and no type."""
    knowing = {
        str(path)
        for path, tree in _trees()
        for node in ast.walk(tree)
        if "Namespace" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
    }
    ways = {f"executors/cli/{name}.py" for name in ("main", "answers", "reaching", "options")}
    assert {path for path in knowing if not path.endswith("/verbs.py")} == ways
    assert all(path.startswith("executors/cli/") for path in knowing)


def test_an_accelerator_is_asked_for_only_if_it_is_there() -> None:
    """torch's usual Linux wheel is built for CUDA; without check_available it names a GPU where there is none."""
    calls = [
        f"{path}:{node.lineno}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _called(node) == "current_accelerator"
        and "check_available" not in [k.arg for k in node.keywords]
    ]  # fmt: skip
    assert not calls


def test_tensors_of_the_rendezvous_and_of_the_outer_loop_name_dtype_and_device() -> None:
    """A script may set torch's defaults (bfloat16, "cuda"); our fp32 vectors go to C, and to other replicas.

    Exempt, because they do not read the defaults: *_like, new_*, from_numpy, frombuffer, and a tensor's own methods.
    """
    factories = {f.__name__ for f in _device_constructors()}
    calls = [
        f"{path}:{node.lineno} {ast.unparse(node)[:80]}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if path.parts[0] in ("diloco", "rendezvous") and isinstance(node, ast.Call)
        and ast.unparse(node.func) in {f"torch.{name}" for name in factories}
        and not {"dtype", "device"} <= {k.arg for k in node.keywords}
    ]  # fmt: skip
    assert {"empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand"} <= factories
    assert not calls


def test_children_do_not_import_from_the_folder_that_they_start_in() -> None:
    """`python -c` and `python -m` put the current folder first: a project's inner.py or token.py would be imported."""
    commands = [
        f"{path}:{node.lineno} {ast.unparse(node)[:80]}"
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.List) and len(node.elts) > 1 and ast.unparse(node.elts[0]) == "sys.executable"
        and ast.unparse(node.elts[1]) != "'-P'"
    ]  # fmt: skip
    assert not commands
