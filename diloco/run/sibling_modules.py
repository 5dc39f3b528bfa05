"""Collect modules that the user's code imports from its own folder into one .zip, which the run stores like the code.

    rewards.py: import helpers ──▶ helpers.py beside it, and its imports ──▶ ~/.cache/diloco/…/modules.zip
    python -m package.train: its imports from the package's folder, also `from .helpers import …`
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

    folder: the one that has the code's package, for `python -m package.code`; None: the code's own folder."""
    folder = folder or code.parent
    own = code.relative_to(folder).parts[0]  # the code's package, or else its file
    packages = [p / "__init__.py" for p in code.parents if p != folder and p.is_relative_to(folder)]
    found = {path.relative_to(folder).as_posix(): path for path in packages if path.is_file() and path != code}
    new = [code, *found.values()]
    while new:
        for name in sorted(set(_imported(new.pop(), folder))):
            for path in _files_of(folder, name, is_own=name == own):
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
    """Yield the first parts of all names that a file imports; its own package for `from . import …`."""
    try:
        tree = ast.parse(code.read_bytes())
    except (SyntaxError, ValueError):  # the pre-flight check reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = code.relative_to(folder).parts[0]
            yield (node.module or "").partition(".")[0] if node.level == 0 else inside


def _files_of(folder: Path, name: str, *, is_own: bool) -> list[Path]:
    """Return the files of a module or package in this folder; [] for other names.   is_own: it has the code itself."""
    package, module = folder / name, folder / f"{name}.py"
    if not (module.is_file() or package.is_dir()) or (not is_own and _is_installed(name, folder)):
        return []
    return sorted(p for p in package.rglob("*.py") if p.is_file()) or ([module] if module.is_file() else [])


def _is_installed(name: str, folder: Path) -> bool:
    others = [path for path in sys.path if Path(path or ".").resolve() != folder.resolve()]
    return name in sys.stdlib_module_names or PathFinder.find_spec(name, others) is not None
