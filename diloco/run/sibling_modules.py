"""The modules beside the user's code that it imports: one .zip of them, which the run carries as it carries the code.

    rewards.py: import helpers ──▶ helpers.py beside it, and what that imports ──▶ ~/.cache/diloco/…/modules.zip
    a replica: the .zip stands first on sys.path before the code is run (inner/usercode/userfiles.py)

A name that is installed here, or Python's own, is not a module of the user's.  Equal files give equal bytes.

Not promised: modules that the code finds at run time alone (importlib), or files that it opens; pre-flight runs the
code without its folder, and names those.
"""

import ast
import io
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from diloco.run.config import ConfigError

WHEN = (1980, 1, 1, 0, 0, 0)  # of each file in the .zip: the earliest that there is


def find_siblings(code: Path) -> dict[str, Path]:
    """Name in the .zip -> file, of all that `code` imports from its own folder, and what those import from there."""
    found: dict[str, Path] = {}
    new = [code]
    while new:
        for name in sorted(set(_imported(new.pop()))):
            for path in _files_of(code.parent, name):
                if (inside := path.relative_to(code.parent).as_posix()) not in found and path != code:
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
    """Join the sibling modules of several code files.   Raises ConfigError for two different modules of one name."""
    joined: dict[str, Path] = {}
    for code, siblings in codes.items():
        for name, path in siblings.items():
            if joined.setdefault(name, path).read_bytes() != path.read_bytes():
                raise ConfigError(
                    f"{code} imports {path}, and other code of this run {joined[name]}: two modules of one name. "
                    "Rename one of them"
                )
    return joined


def _imported(code: Path) -> Iterator[str]:
    """First parts of the names that a file imports, wherever in it."""
    try:
        tree = ast.parse(code.read_bytes())
    except (SyntaxError, ValueError):  # pre-flight says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _files_of(folder: Path, name: str) -> list[Path]:
    """A module's file or a package's, in this folder; [] for a name that means something else."""
    package, module = folder / name, folder / f"{name}.py"
    if not (module.is_file() or package.is_dir()) or _is_installed(name, folder):
        return []
    return sorted(p for p in package.rglob("*.py") if p.is_file()) or ([module] if module.is_file() else [])


def _is_installed(name: str, folder: Path) -> bool:
    others = [path for path in sys.path if Path(path or ".").resolve() != folder.resolve()]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
