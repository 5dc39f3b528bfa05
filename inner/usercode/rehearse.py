"""Try the user's code in a child process, because it may hang, print, exit, or crash.

    parent ── {"inner": …, "files": …} ──▶ python -m inner.usercode.rehearse ──▶ {"refused", "missing"}

    reward        imports · runs on two prompts with empty completions        check.py: a replica makes the same
    environment   imports · can be built · every tool has a schema            checks before its first step

The child gets the user's files like a replica: copies, and an empty working folder.

A package that is missing here may exist where replicas run: `missing` names it, and the caller decides.

Not promised: that code which passes also works for other prompts and completions.
"""

import atexit
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from inner.errors import SandboxMissing
from inner.settings.inner import Files, InnerConfig, InnerError
from inner.usercode import reward_form, reward_words
from inner.usercode.apart import take_notes

TIME_S = 8.0
SANDBOX = "inner.extras.deletion.sandbox"


@dataclass(frozen=True)
class Rehearsal:
    """Result of a rehearsal.   refused: the fault as text.   missing: an imported package that this machine lacks.

    late: the code did not finish within TIME_S, so the result is unknown.
    sandboxed: the code runs programs in bubblewrap, so replicas need it; no_sandbox: this machine has no sandbox.
    warning: about a reward that works, but gives every answer the same number.
    """

    refused: str = ""
    missing: str = ""
    late: bool = False
    sandboxed: bool = False
    no_sandbox: bool = False
    warning: str = ""


def rehearse(config: InnerConfig, files: Files, time_s: float = TIME_S, *, steps: int | None = None) -> Rehearsal:
    """Try the user's code in a child process for at most `time_s` seconds.   steps: inner steps of the run."""
    if not config.own_code:
        return Rehearsal()
    child = ask_child("inner.usercode.rehearse", config, files, {"steps": steps}, time_s=time_s)
    if child.answer is not None:
        return Rehearsal(**child.answer)
    if child.late:
        return Rehearsal(late=True)
    return Rehearsal(_explain_exit(config, child.code, child.stderr))


@dataclass(frozen=True)
class Trying:
    """The end of a child process.   late: whether it was killed after its time.   answer: in its file, or None."""

    late: bool = False
    answer: dict[str, Any] | None = None
    code: int = 0
    stderr: str = ""


def ask_child(
    module: str, config: InnerConfig, files: Files, asked: Mapping[str, Any], *, time_s: float, prints: bool = False
) -> Trying:
    """Run `python -m module` with the user's files as a replica has them: copies, each in its own folder, and an empty
    working folder.   prints: send the child's output to stderr."""
    with tempfile.TemporaryDirectory(prefix="rehearsal-", ignore_cleanup_errors=True) as scratch:
        empty = Path(scratch, "empty")
        empty.mkdir()
        whole = {"inner": config.to_dict(), "files": copy_files(files, Path(scratch)), **asked}
        whole["answer"] = str(Path(scratch, "answer.json"))
        whole["folders"] = [str(Path(path).absolute().parent) for path in files.values()] + [os.getcwd()]
        command = [sys.executable, "-P", "-m", module, json.dumps(whole)]
        out = sys.stderr.fileno() if prints else subprocess.PIPE
        answer = Path(whole["answer"])
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=None if prints else subprocess.PIPE,
                text=True, timeout=time_s, cwd=empty, env={**os.environ, "PYTHONPATH": python_path()},
            )  # fmt: skip
            late, code, stderr = False, done.returncode, done.stderr or ""
        except subprocess.TimeoutExpired:
            late, code, stderr = True, 0, ""
        written = json.loads(answer.read_text(encoding="utf-8")) if answer.is_file() else None
        return Trying(late, written, code, stderr)


def python_path() -> str:
    """Return this process's PYTHONPATH for a child in any folder, after this project's own folder."""
    told = os.environ.get("PYTHONPATH")
    return os.pathsep.join(
        map(os.path.abspath, [str(Path(__file__).parents[2]), *(told.split(os.pathsep) if told else ())])
    )


def copy_files(files: Files, scratch: Path) -> dict[str, str]:
    """Copy the user's files, code below its digest as in a run (fetch.py); return kind -> the copy's path."""
    copies = dict[str, str]()
    for kind, path in ((kind, Path(path)) for kind, path in files.items()):
        folder = scratch / (sha256(path.read_bytes()).hexdigest() if path.suffix == ".py" else kind)
        folder.mkdir(exist_ok=True)
        copies[kind] = str(shutil.copyfile(path, folder / path.name))
    return copies


def _explain_exit(config: InnerConfig, code: int, stderr: str) -> str:
    """Explain why the user's code ended the whole process: sys.exit, os._exit, a crash in C."""
    first = config.own_code.partition(", ")[0]
    last = "\n".join(f"  {line}" for line in stderr.strip().splitlines()[-4:])
    return (
        f"{config.own_code}: the code ended its process with exit code {code} when it was tried "
        f"on two prompts.\n{last}\n  next: take the exit out, or see what crashes: "
        f"`python {shlex.quote(Path(first.rpartition(':')[0]).name)}`."
    )


# -------------------------------------------------------------------- in the child process


def end_child() -> NoReturn:
    """End this process and its Pools' workers.  Python would wait for threads that the user's code has left."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def read_asked(asked: Mapping[str, Any]) -> tuple[InnerConfig, Files]:
    """Return the config and the files that the parent gave to `ask_child`; store its folders and steps for messages."""
    reward_words.FOLDERS[:] = asked["folders"]
    reward_form.START.max_steps = asked.get("steps") or reward_form.START.max_steps
    return InnerConfig.from_dict(asked["inner"]), {kind: Path(path) for kind, path in asked["files"].items()}


def run_checks(config: InnerConfig, files: Files) -> Rehearsal:
    from inner.usercode.check import check_inner

    try:
        check_inner(config, files)
    except InnerError as error:
        no_sandbox = any(isinstance(cause, SandboxMissing) for cause in causes_of(error))
        return Rehearsal(str(error), missing_package(error), sandboxed=no_sandbox, no_sandbox=no_sandbox)
    except BaseException as error:  # the user's code may raise SystemExit
        what = f"{config.own_code} raised {type(error).__name__}: {error}"
        return Rehearsal(f"{what}. Take that out: a run calls the code for each batch")
    return Rehearsal(sandboxed=SANDBOX in sys.modules)


def missing_package(error: BaseException) -> str:
    """Return the top-level package whose absence caused this error; "" for another cause."""
    for cause in causes_of(error):
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            top = cause.name.partition(".")[0]
            return top if importlib.util.find_spec(top) is None else ""
    return ""


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def main(asked: Mapping[str, Any]) -> None:
    config, files = read_asked(asked)
    found = run_checks(config, files)
    if found.refused:  # perhaps because a setting that the file made was undone
        found = replace(found, refused="\n".join([found.refused, *map("  note: {}".format, take_notes())]))
    _write(Path(asked["answer"]), found)  # before try_answers, which may take too long
    if not found.refused:
        _write(Path(asked["answer"]), try_answers(found, config, files))


def try_answers(found: Rehearsal, config: InnerConfig, files: Files) -> Rehearsal:
    """Add the findings about the reward from the rows' own answers."""
    from inner.usercode.check import SilentReward, constant_reward, lost_tools_warning

    try:
        warned = [constant_reward(config, files), lost_tools_warning(config, files)]
        return replace(found, warning="\n".join(filter(None, [*warned, *map("warning: {}".format, take_notes())])))
    except SilentReward as error:
        return replace(found, refused=str(error))
    except InnerError as error:  # the reward works for empty answers, but fails for the rows' answers
        return replace(found, warning=f"warning: {error}")


def _write(path: Path, found: Rehearsal) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(asdict(found)), encoding="utf-8")
    whole.replace(path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    end_child()
