"""Make a task's rows in a child process.

    parent ── {"spec", "known", "chat", "answer"} ──▶ python -m inner.tasks.make ──▶ {"rows", "left_out"} or {"refused"}
              PYTHONHASHSEED=0, random is seeded: several datasets of reasoning-gym iterate over sets of strings, or use
              the global generator. So equal settings give equal rows on any machine with these versions

Rows in `known` (the training prompts, for a held-out set) are left out and counted; other rows replace them.
We call the scorer for the first row, to find its errors before the run.

Not promised: a time limit for a dataset that needs minutes per row. The caller may interrupt.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.tasks.score import package_module, score_replies
from inner.tasks.spec import ACTS, TaskSpec


@dataclass(frozen=True)
class MadeRows:
    """The task's rows.   left_out: number of rows left out because their prompts are known."""

    rows: list[dict[str, Any]]
    left_out: int

    @property
    def acts(self) -> bool:
        """Whether an agent plays the rows."""
        return TaskSpec.from_json(self.rows[0]["task"]).acts


def make_rows(
    setting: str, spec: TaskSpec, *, chat: bool, known: Iterable[Any] = (), folder: Path = Path()
) -> MadeRows:
    """Make the task's rows in a child process. The package must be installed (`refuse_absent`).   Raises InnerError.

    setting: the setting's name, for messages.   chat: whether prompts are messages or texts.
    known: prompts that no row may have, or entries, if an agent plays them (games may all have one prompt).
    folder: base folder of a task's relative paths."""
    with tempfile.TemporaryDirectory(prefix="task-") as scratch:
        answer = Path(scratch) / "answer.json"
        asked = {"spec": spec.to_json(), "known": [question_of(p) for p in known], "chat": chat, "answer": str(answer)}
        asked["folder"] = str(folder)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "inner.tasks.make"], input=json.dumps(asked), capture_output=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )  # fmt: skip
        if not answer.is_file():
            last = "\n".join(f"  {line}" for line in done.stderr.strip().splitlines()[-4:])
            raise InnerError(f"{setting} = {spec.task!r}: its process ended with exit code {done.returncode}.\n{last}")
        found = json.loads(answer.read_text(encoding="utf-8"))
    if "refused" in found:
        raise InnerError(f"{setting} = {spec.task!r}: {found['refused']}")
    return MadeRows(found["rows"], found["left_out"])


def question_of(prompt: Any) -> str:
    """Return a prompt's text without system messages, for comparison."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(str(m.get("content")) for m in prompt if m.get("role") != "system")


# -------------------------------------------------------------------- in the child process


def take_rows(spec: TaskSpec, *, chat: bool, known: Iterable[str]) -> MadeRows:
    """Return the first spec.size rows that are not known."""
    spec = replace(spec, version=spec.installed_version)
    never = set(known)
    rows = list[dict[str, Any]]()
    left_out, acts = 0, False
    for row in package_module(spec).make_rows(spec):
        plays = row.pop(ACTS, False)
        if (row["entry"] if plays else question_of(row["prompt"])) in never:
            left_out += 1
            continue
        prompt = row["prompt"] if chat else _as_text(row["prompt"])
        acts = plays or acts
        rows.append({**row, "prompt": prompt})
        if len(rows) == spec.size:
            break
    rows = [{**row, "task": replace(spec, acts=acts).to_json()} for row in rows]
    if not rows and left_out:
        raise InnerError(
            f"all {left_out:,} rows that the task makes are among the training prompts, so nothing is left to hold "
            "out. Give the task options with more room, or set inner.data.task_size lower."
        )
    if not rows:
        raise InnerError("it makes no rows. Change its options, or choose another task.")
    if "entry" in rows[0] and not acts:
        _try_scorer(rows[0])
    return MadeRows(rows, left_out)


def _as_text(messages: list[dict[str, str]]) -> str:
    if len(messages) > 1:
        raise InnerError(
            f"its prompts have {len(messages)} messages, the first: {messages[0]['content'][:60]!r}. They are not one "
            "text: leave inner.data.task_chat = false out."
        )
    return messages[0]["content"]


def _try_scorer(row: Mapping[str, Any]) -> None:
    """Score two replies in an empty folder, because a replica's folder has none of the files beside the run.toml."""
    try:
        with tempfile.TemporaryDirectory(prefix="task-") as empty, chdir(empty):
            score_replies(["", "garbled"], [row["task"]] * 2, [row["entry"]] * 2)
    except InnerError:
        raise
    except Exception as error:
        missing = " (replicas do not run in this folder: give the file's full path)" if _is_absent(error) else ""
        first = f"{type(error).__name__}: {error}{missing}"
        raise InnerError(f"its scorer cannot score an empty reply: {first}") from error


def _is_absent(error: BaseException | None) -> bool:
    """Whether an error, or its cause, is a file that does not exist."""
    return error is not None and (isinstance(error, FileNotFoundError) or _is_absent(error.__cause__))


def main(asked: Mapping[str, Any]) -> None:
    random.seed(0)
    os.chdir(asked["folder"])
    try:
        made = take_rows(TaskSpec.from_json(asked["spec"]), chat=asked["chat"], known=asked["known"])
        found: dict[str, Any] = {"rows": made.rows, "left_out": made.left_out}
    except InnerError as error:
        found = {"refused": str(error)}
    Path(asked["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
