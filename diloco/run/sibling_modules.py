"""Collect modules that the user's code imports from its own folder into one .zip, which the run stores like the code.

    rewards.py: import helpers ──▶ helpers.py beside it, and its imports ──▶ ~/.cache/diloco/…/modules.zip
    python -m package.train: its imports from the package's folder; of its own package, only modules that it imports
    a replica: puts the .zip first on sys.path before it runs the code (inner/usercode/userfiles.py)

Installed packages and Python's own modules are left out.  Equal files give equal bytes.

Not promised: modules that the code imports by importlib, or files that it opens. The pre-flight check runs the
code without its folder, and reports them.
"""

import ast
import io
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from diloco.run.config import ConfigError

WHEN = (1980, 1, 1, 0, 0, 0)  # time of each file in the .zip: the earliest possible


def find_siblings(code: Path, folder: Path | None = None) -> dict[str, Path]:
    """Return name in the .zip -> file, for the modules of a folder that `code` imports, also indirectly.

    folder: contains the code's package, for `python -m package.code`, or is elsewhere; None: the code's own folder.
    From that package we take only the imported modules, from another package all modules."""
    folder = folder or code.parent
    own = next(iter(_below(folder, code)), "")  # the code's package, or else its file
    packages = [p / "__init__.py" for p in code.parents if p != folder and p.is_relative_to(folder)]
    found = {path.relative_to(folder).as_posix(): path for path in packages if path.is_file() and path != code}
    new, looked = [code, *found.values()], set[str]()
    while new:
        imported = _imported(new.pop(), folder)
        names = {name if (first := name.partition(".")[0]) == own else first for name in imported}
        for name in sorted(names - looked):
            looked.add(name)
            for path in _files_of(folder, name, own):
                if (inside := path.relative_to(folder).as_posix()) not in found and path != code:
                    found[inside] = path
                    new.append(path)
    return found


def zip_modules(files: Mapping[str, Path]) -> bytes:
    body = io.BytesIO()
    with ZipFile(body, "w") as made:
        for name in sorted(files):
            made.writestr(ZipInfo(name, WHEN), files[name].read_bytes())
    return body.getvalue()


def join_siblings(codes: Mapping[Path, Mapping[str, Path]]) -> dict[str, Path]:
    """Join the sibling modules of several code files.   Raises ConfigError for two different modules with one name."""
    joined: dict[str, Path] = {}
    for code, siblings in codes.items():
        for name, path in siblings.items():
            if joined.setdefault(name, path).read_bytes() != path.read_bytes():
                raise ConfigError(
                    f"{code} imports {path}, and other code of this run imports {joined[name]}. These are two modules "
                    "of one name, and the run stores only one. Rename one of them"
                )
    return joined


def _imported(code: Path, folder: Path) -> Iterator[str]:
    """Yield the full names of all modules that a file imports, and of modules that `from … import` may mean."""
    try:
        tree = ast.parse(code.read_bytes())
    except (SyntaxError, ValueError):  # the pre-flight check reports such a file
        return
    package = _below(folder, code)[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _below(folder: Path, code: Path) -> tuple[str, ...]:
    """Return the parts of a file's path below the folder; () for a file elsewhere."""
    return code.relative_to(folder).parts if code.is_relative_to(folder) else ()


def _files_of(folder: Path, name: str, own: str) -> list[Path]:
    """Return the files of a module in this folder, of another package than `own` all files; [] for other names."""
    parts = name.split(".")
    if parts[0] == own and parts[-1] == "*":  # __all__ may name modules
        package = folder.joinpath(*parts[:-1])
        return sorted([*package.glob("*.py"), *package.glob("*/__init__.py")])
    if parts[0] == own:
        stems = [folder.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
        return [p for stem in stems for p in (stem / "__init__.py", stem.parent / f"{stem.name}.py") if p.is_file()]
    package, module = folder / parts[0], folder / f"{parts[0]}.py"
    if not (module.is_file() or package.is_dir()) or _is_installed(parts[0], folder):
        return []
    return sorted(p for p in package.rglob("*.py") if p.is_file()) or ([module] if module.is_file() else [])


def _is_installed(name: str, folder: Path) -> bool:
    others = [path for path in sys.path if Path(path or ".").resolve() != folder.resolve()]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
