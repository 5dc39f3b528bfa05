"""Writes the texts about rewards that failed.

    a failed batch ──▶ failure_text: one line for the log          a session that ends ──▶ explain_end: what to do next
    an error of the user's code ──▶ next_step: a file or a module that the run lacks, a notebook's magic, or the line

A reward may come from TRL (an environment's get_reward), from this project (a task, a reward model), or from a package.
The line to correct is then the last line that was running outside of all packages.

Not promised: the line of the user's code, if the error did not come from the user's file; that the advice fits if the
code raised an error in place of another error.
"""

import importlib.util
import inspect
import re
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inner.usercode.attempts import Scored

ROOMS = [Path(__file__).parents[2] / room for room in ("inner", "diloco", "rendezvous", "executors")]
NO_LINE = (
    "a package that the reward uses raised this, and no line of your files was running; check the settings of the "
    "reward and the services that it asks"
)
FOLDERS: list[str] = []  # in a child process with copies: the originals' folders, and the shell's folder


def failure_text(name: str, scored: Scored, *, tries: int, batches: int) -> str:
    """Return the log's line about failed batches.   batches: number of failed batches since the last line."""
    before = f"; {batches} batches with failures since the last report" if batches > 1 else ""
    lost = f"{len(scored.failed)} of {len(scored.values)} completions are without a reward of their own"
    lost += f", {len(scored.blamed)} of them because they break it" if scored.blamed else ""
    return f"{name}: {scored.why} ({lost} after {scored.tries} of {tries} tries){before}"


def silent_text(generations: int, names: Sequence[str]) -> str:
    """Return the error of a session without any reward (None, or failed) for `generations` in a row."""
    return (
        f"{generations} generations in a row gave no reward: every reward ({', '.join(names)}) was None or failed "
        "(reward_failed in the log). None teaches nothing.\n"
        "  next: return a number for each completion that you can judge, 0.0 for a wrong one. Then start another "
        "--run, or use --again if no outer step was taken."
    )


def explain_end(name: str, reward: Any, scored: Scored, *, batches: int) -> str:
    """Return the error of a session whose rewards gave no number.   batches: number of such batches in a row."""
    often = "the first batch of this session" if batches == 1 else f"{batches} batches in a row"
    shown = f"  {scored.why}"
    if scored.failure is not None:
        shown = user_lines(scored.failure.error, _file_of(reward))
    return (
        f"the reward {name} gave no number for any completion of {often}, {scored.tries} tries each.\n"
        f"{shown}\n"
        "  This session ends. In a run without any outer step, its slot is started again at once, and twice at most;\n"
        "  in any other run, after 1, 4, 16, 30 and 30 minutes, and the sixth such end in a row ends the run.\n"
        "  If the reward's service was down and is up again: `diloco resume RUN` continues from the last commit.\n"
        "  A run keeps its files. To use a corrected file: `diloco train CONFIG --run RUN --again` if RUN has no outer "
        "step;\n  else another --run.\n"
        "  More patience: inner.rewards.retries, inner.rewards.timeout_s."
    )


def _file_of(reward: Any) -> Path | None:
    """Return the user's file that defines the reward; None for a package's reward and a reward that is an object."""
    try:
        file = inspect.getfile(inspect.unwrap(reward))
    except TypeError:
        return None
    return None if _is_of_package(file) else Path(file)


def _is_of_package(file: str) -> bool:
    """Whether a frame's file belongs to Python, to an installed package or to this project."""
    path, folders = Path(file), [*ROOMS, Path(sysconfig.get_path("stdlib"))]
    installed = not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return installed or file.startswith("<") or any(path.is_relative_to(folder) for folder in folders)


# -------------------------------------------------------------------- the next thing to do


def user_lines(error: BaseException, path: Path | None) -> str:
    """Return the error with the last line of the user's file that was running, and of the module that it called.

    path: the file; None: any file of the user."""
    what = "".join(traceback.format_exception_only(error)).strip()
    tb = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in tb if frame.filename == str(path) or not _is_of_package(frame.filename)]
    shown = [frame for frame in frames if path and Path(frame.filename).name == path.name][-1:]
    if frames and (not shown if path is None else shown and frames[-1].filename != shown[0].filename):
        shown.append(frames[-1])
    where = "".join(f"  {_brief(frame.filename)}, line {frame.lineno}: {frame.line}\n" for frame in shown)
    path, line = (Path(shown[-1].filename), shown[-1].line or "") if shown else (path, "")
    step = next_step(error, path, line) if path else NO_LINE
    return f"{where}  {what}\n  next: {step}."


def _brief(file: str) -> str:
    """Return a file's path below the folder from which Python imports it; of the user's file, its name."""
    above = [folder for folder in sys.path if folder and Path(file).is_relative_to(folder)]
    return str(Path(file).relative_to(max(above, key=len, default=str(Path(file).parent))))


def next_step(error: BaseException, path: Path, line: str) -> str:
    """Return the next thing to do.   path: the user's file.   line: the last line of it that ran."""
    if isinstance(error, FileNotFoundError) and (name := _left_behind(error, path)):
        return (
            f"a run carries code only, not {name}: write its values into a .py module that {path.name} imports, or "
            "give the absolute path of a file that every replica has"
        )
    if isinstance(error, ImportError):
        return _about_import(error, path, line)
    if isinstance(error, NameError) and error.name == "get_ipython":
        return f"take the notebook's magic lines (get_ipython(), %…, !…) out of {path.name}"
    return f"correct the line; `python {shlex.quote(path.name)}` runs the file by itself"


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
    if str(error).startswith("cannot import name") and top and importlib.util.find_spec(top):
        return f"install a version of {top} that has this name, or leave the import out of {path.name}"
    return f"install what it imports where this runs, or leave the import out of {path.name}"
