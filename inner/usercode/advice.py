"""Say what to do next about an error of the user's code, from its kind and its text.

    FileNotFoundError of a file that is beside the original      a run carries code alone
    relative import · import_module · another missing module     import … ; install …
    get_ipython                                                  the notebook's magic
    others                                                       correct the line

Not promised: that the advice fits: the code may have caught an error, and raised another one.
"""

import importlib.util
import re
from pathlib import Path

FOLDERS: list[str] = []  # folders of the originals and of the user's shell, where a child process has copies


def next_step(error: BaseException, path: Path, line: str) -> str:
    """Return the next thing to do.   path: the user's file.   line: its last line that was running."""
    if isinstance(error, FileNotFoundError) and (name := _left_behind(error, path)):
        return (
            f"a run carries code only, not {name}: write its values into a .py module that {path.name} imports, or "
            "give the absolute path of a file that every replica has"
        )
    if isinstance(error, ImportError):
        return _about_import(error, path, line)
    if isinstance(error, NameError) and error.name == "get_ipython":
        return f"take the notebook's magic lines (get_ipython(), %…, !…) out of {path.name}"
    return f"correct the line; `python {path.name}` shows what the file does by itself"


def _left_behind(error: FileNotFoundError, path: Path) -> str:
    """Return the missing file's name as the code gives it, if it is in one of FOLDERS; else ""."""
    if not isinstance(error.filename, str | bytes):
        return ""
    name = error.filename.decode(errors="replace") if isinstance(error.filename, bytes) else error.filename
    asked = Path(name)
    if asked.is_absolute() and asked.is_relative_to(path.parent.absolute()):  # Path(__file__).parent / "weights.json"
        asked = asked.relative_to(path.parent.absolute())
    found = not asked.is_absolute() and any(Path(folder, asked).exists() for folder in FOLDERS)
    return str(asked) if found else ""


def _about_import(error: ImportError, path: Path, line: str) -> str:
    if "relative import" in str(error):
        written = re.search(r"from\s+\.+(\w[\w.]*)?\s+import\s+(.+)", line)
        module, names = written.groups() if written else (None, "the module")
        plain = f"from {module} import {names}" if module else f"import {names}"
        return f"write `{plain}`, without dots, or put {path.name} above the package and import the package by its name"
    top = (error.name or "").partition(".")[0]
    beside = any(Path(folder, f"{top}.py").is_file() or Path(folder, top).is_dir() for folder in FOLDERS)
    if top and beside and importlib.util.find_spec(top) is None:
        return f"write `import {top}`, so that the run finds and carries {top}.py (it reads the import statements)"
    return f"install what it imports where this runs, or leave the import out of {path.name}"
